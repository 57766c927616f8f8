"""Nvlink: the exchanges of a rank whose peers' memory its device reaches: mailboxes, who is where, what has expired.

A mailbox is memory that the peers reach, allocated before any graph is captured: a rank's is `peer_memory`'s, that of
tools symmetric memory of torch (`allocate_mailbox`, `meet`). Graphs find peers' addresses, and the numbers of their
exchanges, in memory of the device, so they outlive a membership: `enter` sets both. A place belongs to one process at a
time; it goes to another only after the death of the first is certain, as everywhere in a group, because a write that is
under way can not be called back.

`NvlinkRows` has the place of `PeerRows` in a step. The host is in none of it. After a step it looks whether a wait has
expired (`find_expiry`, or `failure` among what it copies anyway); what was computed since is void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.combine import combine_rows
from kernels.exchange import ExchangeConfig, dispatch_rows
from kernels.forms import PairSums
from kernels.mailbox import (
    COUNTER_BITS,
    FAILED,
    FAILURE,
    LIMIT,
    STATE_WORDS,
    Mailbox,
    MailboxLayout,
    first_words,
)

PHASES = ("dispatch", "combine")


class Expiry(NamedTuple):
    """A wait that has expired, the first one of this rank in its membership.

    Of several ranks that tell of one, the one with the least (step, layer, phase) names who is to blame.

    Attributes:
        step: graphs, counted from 0 in the membership: a step of a group may have several, or none.
        layer: of the step.
        phase: 0 for the dispatch, 1 for the combine.
        place: whose flag did not come; of several, any.
    """

    step: int
    layer: int
    phase: int
    place: int

    def __str__(self) -> str:
        return f"place {self.place} was silent in the {PHASES[self.phase]} of layer {self.layer} in step {self.step}"


def read_failure(word: int, layers: int) -> Expiry | None:
    """What a failure's word says, in a model with so many layers; None for 0."""
    if not word:
        return None
    step, layer = divmod(word & (1 << COUNTER_BITS) - 1, layers)
    return Expiry(step, layer, word >> 60 & 1, word >> 52 & 0xFF)


def allocate_mailbox(layout: MailboxLayout, device: torch.device) -> Tensor:
    """uint8[layout.num_bytes], zeros, that `meet` can make known to peers. Never inside a capture."""
    # Loaded here: where there is no NVLink, nobody needs torch's distributed parts.
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    # Rows that never came are read along with others, so they must not look like NaN.
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def meet(memory: Tensor, group: torch.distributed.ProcessGroup, places: Sequence[int]) -> dict[int, int]:
    """By place, where each member's mailbox begins for kernels of this rank. All members call it; it waits for them.

    Args:
        memory: from `allocate_mailbox`, of the same layout on all ranks. May meet again in another group.
        group: the members.
        places: the place of each rank of `group`.
    """
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(memory, group)
    # Not necessarily at the beginning of what was mapped, but at the same place in each.
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    return {place: handle.buffer_ptrs[rank] + offset for rank, place in enumerate(places)}


class NvlinkExchange:
    """A rank's mailbox, and its membership. Its kernels run on one stream, and on what waits for it.

    Attributes:
        mailbox: what launchers take.
        failure: int64[1] on the device, for `read_failure`.
    """

    def __init__(self, layout: MailboxLayout, place: int, memory: Tensor, *, limit_s: float) -> None:
        """Nothing can be exchanged before `enter`.

        Args:
            layout: equal on all ranks.
            place: the own one.
            memory: uint8[layout.num_bytes], borrowed.
            limit_s: longest wait for a peer; above all that may hold up a rank that lives.
        """
        if memory.nbytes != layout.num_bytes:
            raise ValueError(f"a mailbox of this layout has {layout.num_bytes} bytes, not {memory.nbytes}")
        device = memory.device
        self.mailbox = Mailbox(
            layout,
            place,
            memory,
            torch.zeros(layout.ranks, dtype=torch.int64, device=device),
            torch.zeros(STATE_WORDS, dtype=torch.int64, device=device),
        )
        self.failure = self.mailbox.state[FAILURE : FAILURE + 1]
        self._limit_ns = int(limit_s * 1e9)
        on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._told = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)

    def enter(self, membership: int, addresses: Mapping[int, int]) -> None:
        """Begins a membership: exchanges are counted from 0, and what had expired is forgotten.

        Enqueued behind all steps of the last one. Others may have begun with this one: what they put here carries its
        number, and what this rank still put into their mailboxes for the last one lies where it alone puts things.

        Args:
            membership: its number.
            addresses: of the living, by place, the own one included, as kernels of this device reach them.
        """
        mailbox = self.mailbox
        layout, device = mailbox.layout, mailbox.memory.device
        if self._side is not None:
            # What ended the last membership's waits must not come later than this.
            self._side.synchronize()
        if mailbox.rank not in addresses or not all(0 <= place < layout.ranks for place in addresses):
            raise ValueError(f"place {mailbox.rank} can not enter a membership of {sorted(addresses)}")
        table = [addresses.get(place, 0) for place in range(layout.ranks)]
        state = [0] * STATE_WORDS
        for index, word in first_words(layout, membership).items():
            state[index] = word
        state[LIMIT] = self._limit_ns
        mailbox.addresses.copy_(torch.tensor(table, device=device))
        mailbox.state.copy_(torch.tensor(state, device=device))

    def abort(self, place: int) -> None:
        """Ends the waits of what is enqueued, beside it: the host knows that a place does not go on. All of it is void
        then, until the next `enter`, which comes when it has ended."""
        self._told[0] = FAILED | place << 52
        if self._side is None:
            self.failure.copy_(self._told)
        else:
            # By a copy: kernels might find no room beside those that wait.
            with torch.cuda.stream(self._side):
                self.failure.copy_(self._told, non_blocking=True)

    def rows(
        self, count: int, config: ExchangeConfig | None = None, expert_to_place: Sequence[Tensor] | None = None
    ) -> NvlinkRows:
        """For steps of up to `count` rows on each rank. All ranks take the same one in a step.

        Args:
            count: of rows.
            config: None for the default.
            expert_to_place: per layer int32[experts], which place computes an expert for this rank's rows. Then rows go
                to the places of their experts only, which pays in wide groups, and an expert may have replicas. None:
                all rows go everywhere, and every expert must be in the table of one rank only.
        """
        return NvlinkRows(self.mailbox, count, config, expert_to_place)

    def find_expiry(self) -> Expiry | None:
        """The wait that has expired, if one has. Waits for the device."""
        return read_failure(int(self.failure.item()), self.mailbox.layout.layers)


class NvlinkRows:
    """The rows of a mixture on all ranks, for steps of one size. Enqueues, and never waits on the host.

    All ranks call `join` and `give_back` for each layer in order, in every step, also with no rows.

    Attributes:
        ids: per layer int32[ranks * count, k], what the latest step's rows chose, by rank; -1 where there is none.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        count: int,
        config: ExchangeConfig | None = None,
        expert_to_place: Sequence[Tensor] | None = None,
    ) -> None:
        """See `NvlinkExchange.rows`."""
        self._mailbox = mailbox
        self._count = count
        self._config = config
        self._expert_to_place = expert_to_place
        self._routed: tuple[Tensor, Tensor] | None = None
        self.ids = [mailbox.ids(layer, count) for layer in range(mailbox.layout.layers)]

    def own(self, layer: int, rows: int) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Where the own rows of a layer may be put so that `join` need not copy them: x, and ids with weights."""
        if self._mailbox.layout.narrow or self._expert_to_place is not None:
            return None, None
        x, ids, weights = (part[:rows] for part in self._mailbox.own_rows(layer, self._count))
        return x, (ids, weights)

    def join(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of all ranks, by rank.

        Args:
            layer: of the model.
            x: A[own, hidden], at most `count` rows; all of `own`'s places or none.
            ids: int32[own, k]; -1 in rows of padding.
            weights: float32[own, k].

        Returns:
            (A[ranks * count, hidden], int32[ranks * count, k], float32[ranks * count, k]); they may be read until the
            next layer's `join` is enqueued. Ids are those that this rank computes, where it is told which.
        """
        places = None if self._expert_to_place is None else self._expert_to_place[layer]
        self._routed = None if places is None else (ids, places)
        return dispatch_rows(self._mailbox, layer, self._count, x, ids, weights, self._config, places)

    def give_back(self, layer: int, sums: PairSums) -> Tensor:
        """The own rows' sums over the experts of all ranks.

        Args:
            layer: of the model.
            sums: of the joined rows' pairs on this rank; its base is A[own, hidden], of the own rows.

        Returns:
            A[own, hidden], the base included.
        """
        assert sums.base is not None
        out = torch.empty_like(sums.base)
        return combine_rows(
            self._mailbox, layer, self._count, sums.pairs, sums.ids, sums.base, out, sums.expert_to_slot, self._config,
            self._routed,
        )  # fmt: skip
