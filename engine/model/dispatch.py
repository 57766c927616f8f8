"""Dispatch: the routed experts of a group, layer by layer: rows to the ranks that hold their experts, outputs back.

Each layer is two exchanges of the mesh. In the first a rank sends, to each other one, the rows that it must compute
and pairs (row, slot, key); in the second come the outputs, one for each pair. The home rank sums a row's experts in
ascending order of ids by the product that a rank without a group uses, so results are those, bit for bit, wherever the
experts are. Every rank sends to every other one in both, be it nothing: that is what keeps them in step. The first
exchange of a step carries the pact's words; it is always one of the target's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.pact import WORDS_BYTES, Agreement, Words, agree, unpack_words
from engine.errors import RemoteProtocolError
from engine.model.exchange import Key, Piece
from engine.model.slots import ExpertPool, SlotPool, SlotTable, identify_rows
from engine.model.tiles import Choice, pad_rows

Ints = npt.NDArray[np.int64]
_COUNTS = 8
"""Bytes of int32[2], pairs and rows, that a frame begins with unless it has none."""
UNOPENED = -1
"""In place of a part while no pass is open."""


class Mesh(Protocol):
    """What is needed of `exchange.Mesh`."""

    @property
    def places(self) -> tuple[int, ...]: ...
    def start(self, key: Key, frames: Mapping[int, Sequence[Piece]]) -> None: ...
    def finish(self, key: Key) -> dict[int, memoryview]: ...
    def close(self) -> None: ...


class _Sent(NamedTuple):
    """What one layer's first exchange left to be done.

    Attributes:
        layer: which; `x`, `choice`: as they were given.
        chosen: per place, int64[n]: which of all (row, expert) pairs it computes, row by row.
        slots: int64[n], those of this place's own.
    """

    layer: int
    x: Tensor
    choice: Choice
    chosen: dict[int, Ints]
    slots: Ints


class Load:
    """What one part's experts did.

    Attributes:
        counts: int64[layers, experts], rows of this rank sent to each expert.
        pairs, expert_ns: pairs computed here, and what that took, nanoseconds.
    """

    def __init__(self, pool: ExpertPool) -> None:
        """Nothing yet."""
        self.counts = np.zeros((pool.info.layers, pool.info.experts), np.int64)
        self.pairs = self.expert_ns = 0

    def add(self, other: Load) -> None:
        """Takes another stretch in."""
        self.counts += other.counts
        self.pairs += other.pairs
        self.expert_ns += other.expert_ns


class Dispatch:
    """`transformer.Mixture` over a mesh. Belongs to the device's worker thread.

    Attributes:
        agreement: what the words of the step's first exchange mean; valid from its end on.
    """

    def __init__(self, pools: Sequence[SlotPool], idle_limit: int) -> None:
        """Args: `pools`: by part, borrowed. `idle_limit`: as `pact.agree` takes it."""
        self._pools = pools
        self._pool = pools[0]
        self._idle_limit = idle_limit
        self._loads = [Load(pool) for pool in pools]
        self._pass_load = Load(pools[0])

    def enter(self, mesh: Mesh, place: int, ranks: Sequence[int], membership: int) -> None:
        """Takes the mesh of a membership, whose member at each place is of these ranks."""
        self._mesh = mesh
        self._place = place
        self._ranks = ranks
        self._membership = membership
        self._others = [other for other in mesh.places if other != place]

    def open_step(self, step: int, words: Words, tables: Sequence[SlotTable], active: tuple[int, ...]) -> None:
        """A step of the membership begins, with one snapshot of this rank's words.

        Args:
            tables: per part, of the epoch in force.
            active: per part, that epoch.
        """
        self._step, self._words, self._tables, self._active = step, words, tables, active
        self._pass = -1
        self._part = UNOPENED
        self._agreed: Agreement | None = None

    @property
    def agreement(self) -> Agreement:
        assert self._agreed is not None
        return self._agreed

    def open_pass(self, positions: Ints, ids: Ints, part: int = 0) -> None:
        """See `Mixture.open_pass`. What is counted goes on from an earlier one that was not closed."""
        self._pass += 1
        self._identity = identify_rows(positions, ids)
        if part != self._part:
            self._part, self._pool, self._table = part, self._pools[part], self._tables[part]
            self._pass_load = Load(self._pool)

    def close_pass(self) -> None:
        """See `Mixture.close_pass`. What a broken pass counted is dropped: it runs again."""
        self._loads[self._part].add(self._pass_load)
        self._part = UNOPENED

    def send(self, layer: int, x: Tensor, choice: Choice) -> None:
        """See `Mixture.send`.

        Raises:
            MeshBroken: a connection has ended.
            DeviceError: a slot of this rank does not hold what its own table names.
        """
        top_k = choice.ids.shape[1]
        keys, places, slots = self._table.find(layer, choice.ids, self._identity)
        self._pass_load.counts[layer] += np.bincount(choice.ids.ravel(), minlength=self._pool.info.experts)
        flat, keys, slots = places.ravel(), keys.ravel(), slots.ravel()
        rows = x.numpy()
        own = (flat == self._place).nonzero()[0]
        self._pool.check_pairs(slots[own], keys[own], self._rank, self._rank)
        chosen = {self._place: own}
        frames: dict[int, Sequence[Piece]] = {}
        first = self._pass == 0 and layer == 0
        for other in self._others:
            picked = (flat == other).nonzero()[0]
            chosen[other] = picked
            frame = _pack_rows(rows, picked // top_k, slots[picked], keys[picked])
            frames[other] = [self._words.pack(), *frame] if first else frame
        self._mesh.start((self._step, self._pass, layer, 1), frames)
        self._sent = _Sent(layer, x, choice, chosen, slots[own])

    def receive(self) -> Tensor:
        """See `Mixture.receive`.

        Raises:
            MeshBroken: a member did not answer.
            DeviceError: a slot does not hold what a pair names.
            RemoteProtocolError: a frame that is none.
        """
        sent = self._sent
        own = self._compute()
        rows, top_k = sent.choice.ids.shape
        hidden = own.shape[1]
        arrived = self._mesh.finish((self._step, self._pass, sent.layer, 2))
        picked = torch.empty((rows * top_k, hidden))
        into = picked.numpy()
        into[sent.chosen[self._place]] = own
        for other, frame in arrived.items():
            pairs = sent.chosen[other]
            if frame.nbytes != len(pairs) * hidden * 4:
                raise RemoteProtocolError(
                    f"rank {self._ranks[other]} answered {len(pairs)} pairs of layer {sent.layer} with {frame.nbytes} "
                    f"bytes, each has {hidden * 4}"
                )
            if len(pairs):
                into[pairs] = np.frombuffer(frame, np.float32).reshape(-1, hidden)
        if not rows:
            return picked
        share = torch.from_numpy(sent.choice.weights).unsqueeze(1)
        return torch.bmm(share, picked.view(rows, top_k, hidden)).squeeze(1)

    def take_loads(self) -> list[Load]:
        """Per part, what closed passes came to since the last call."""
        taken = self._loads
        self._loads = [Load(pool) for pool in self._pools]
        return taken

    @property
    def _rank(self) -> int:
        return self._ranks[self._place]

    def _hear_words(self, arrived: dict[int, memoryview]) -> dict[int, memoryview]:
        words = [self._words, *(unpack_words(frame[:WORDS_BYTES]) for frame in arrived.values())]
        self._agreed = agree(words, self._active, self._membership, self._idle_limit)
        return {other: frame[WORDS_BYTES:] for other, frame in arrived.items()}

    def _compute(self) -> npt.NDArray[np.float32]:
        """All pairs of this place in one go, and begins the second exchange with the other members' outputs.

        Returns:
            float32[pairs, hidden], the outputs of its own.
        """
        sent = self._sent
        key = (self._step, self._pass, sent.layer, 1)
        arrived = self._mesh.finish(key)
        if self._pass == 0 and sent.layer == 0:
            arrived = self._hear_words(arrived)
        own = sent.chosen[self._place]
        all_rows, all_slots, data = [own // sent.choice.ids.shape[1]], [sent.slots], [sent.x]
        hidden, before = sent.x.shape[1], len(sent.x)
        asked: list[tuple[int, int]] = []
        for other, frame in arrived.items():
            rows, slots, keys, lines = _unpack_rows(frame, hidden, self._ranks[other])
            asked.append((other, len(rows)))
            if len(rows):
                self._pool.check_pairs(slots, keys, self._rank, self._ranks[other])
                all_rows.append(rows + before)
                all_slots.append(slots)
                data.append(torch.from_numpy(lines))
                before += len(lines)
        if len(data) == 1:
            outputs = self._evaluate(sent.x, all_rows[0], sent.slots)
        else:
            outputs = self._evaluate(pad_rows(torch.cat(data)), np.concatenate(all_rows), np.concatenate(all_slots))
        frames: dict[int, Sequence[Piece]] = {}
        at = len(own)
        for other, count in asked:
            frames[other] = [outputs[at : at + count]] if count else ()
            at += count
        self._mesh.start((self._step, self._pass, sent.layer, 2), frames)
        return outputs[: len(own)]

    def _evaluate(self, x: Tensor, rows: Ints, slots: Ints) -> npt.NDArray[np.float32]:
        began = time.perf_counter_ns()
        outputs: npt.NDArray[np.float32] = self._pool.bank.evaluate(x, rows, slots).numpy()
        self._pass_load.expert_ns += time.perf_counter_ns() - began
        self._pass_load.pairs += len(slots)
        return outputs


def _pack_rows(x: npt.NDArray[np.float32], rows: Ints, slots: Ints, keys: Ints) -> list[Piece]:
    """The frame of some pairs, `rows` ascending: int32 counts, pairs column by column, then each row once."""
    if not len(rows):
        return []
    begins = np.empty(len(rows), bool)
    begins[0] = True
    np.not_equal(rows[1:], rows[:-1], out=begins[1:])
    distinct = rows[begins]
    head = np.empty(2 + 3 * len(rows), np.int32)
    head[:2] = len(rows), len(distinct)
    columns = head[2:].reshape(3, -1)
    columns[0] = np.cumsum(begins) - 1
    columns[1] = slots
    columns[2] = keys
    return [head, x[distinct]]


def _unpack_rows(frame: memoryview, hidden: int, rank: int) -> tuple[Ints, Ints, Ints, npt.NDArray[np.float32]]:
    """(rows, slots, keys, float32[n, hidden]) of a frame. Raises RemoteProtocolError if it is none of `rank`'s."""
    if not frame.nbytes:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing, np.empty((0, hidden), np.float32)
    pairs, distinct = np.frombuffer(frame[:_COUNTS], np.int32).tolist() if frame.nbytes >= _COUNTS else (0, 0)
    end = _COUNTS + 12 * pairs
    if pairs < 1 or distinct < 1 or frame.nbytes != end + 4 * hidden * distinct:
        raise RemoteProtocolError(
            f"rank {rank} sent a frame of {frame.nbytes} bytes as {pairs} pairs and {distinct} rows of {hidden} numbers"
        )
    columns = np.frombuffer(frame[_COUNTS:end], np.int32).reshape(3, -1).astype(np.int64)
    rows, slots, keys = columns
    if int(rows.min()) < 0 or int(rows.max()) >= distinct:
        raise RemoteProtocolError(f"rank {rank} sent {distinct} rows and a pair of another one")
    return rows, slots, keys, np.frombuffer(frame[end:], np.float32).reshape(distinct, hidden)


class Warmup:
    """A `Mixture` without experts, for the step that warms a device up before it has a group."""

    def open_pass(self, positions: Ints, ids: Ints, part: int = 0) -> None:
        """Nothing to be done."""

    def send(self, layer: int, x: Tensor, choice: Choice) -> None:
        """Remembers how many rows there are."""
        self._size = (len(choice.ids), x.shape[1])

    def receive(self) -> Tensor:
        """Zeros."""
        return torch.zeros(self._size)

    def close_pass(self) -> None:
        """Nothing to be done."""
