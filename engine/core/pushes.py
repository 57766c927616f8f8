"""What prefill ranks have pushed to whom: a rank's counters by decode rank, and the head's newest of all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from engine.core.telemetry import Histogram
from engine.errors import RemoteProtocolError
from transport.messages import LinksReport, PairCounts

LAST_PUSHES = 128
"""So many last pushes to a peer are in its percentile."""
INT32_MAX = 2**31 - 1

COLUMNS = ("<i4", "<i8", "<i8", "<i4", "<i4", "<i4")
"""Of PairCounts, in order: decode rank, bytes, pushes, in flight, failed, p99."""

Columns = tuple[npt.NDArray[np.int64], ...]


class _Peer:
    """Pushes to one rank, over all its lives."""

    __slots__ = ("failed", "inflight", "num_bytes", "p99_us", "pushes", "transfer_us")

    def __init__(self) -> None:
        self.num_bytes = self.pushes = self.inflight = self.failed = 0
        self.transfer_us = Histogram(LAST_PUSHES)
        self.p99_us: int | None = 0

    def read_p99_us(self) -> int:
        """Sorts only if there was a push since the last time."""
        if self.p99_us is None:
            (self.p99_us,) = self.transfer_us.percentiles(0.99)
        return self.p99_us


class PushMeter:
    """A prefill rank's pushes by decode rank. A peer's new life goes on counting where the one before ended.

    The bytes and pushes of all peers add up to `RankSnapshot.pushed_bytes` and `pushes` once their words were taken.
    """

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}

    def start(self, rank: int) -> None:
        """A push is in flight; `end` must follow."""
        self._find(rank).inflight += 1

    def end(self, rank: int) -> None:
        """It is not any more, whatever came of it."""
        self._find(rank).inflight -= 1

    def land(self, rank: int, num_bytes: int, transfer_us: int) -> None:
        """A push is done; also one that was given up as overdue before."""
        peer = self._find(rank)
        peer.num_bytes += num_bytes
        peer.pushes += 1
        peer.transfer_us.add(transfer_us)
        peer.p99_us = None

    def fail(self, rank: int) -> None:
        """A push could not be started, failed, or is overdue: once for each."""
        self._find(rank).failed += 1

    def _find(self, rank: int) -> _Peer:
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = _Peer()
        return peer

    def build(self, rank: int, generation: int, linked: Iterable[int]) -> tuple[PairCounts, bytes]:
        """As a message of this rank with its blob, ascending by decode rank.

        Args:
            linked: ranks that have a stream with this one; they are named even if nothing was pushed to them yet.
        """
        for other in linked:
            self._find(other)
        peers = sorted(self._peers.items())
        columns = (
            [other for other, _ in peers],
            [peer.num_bytes for _, peer in peers],
            [peer.pushes for _, peer in peers],
            [peer.inflight for _, peer in peers],
            [min(peer.failed, INT32_MAX) for _, peer in peers],
            [min(peer.read_p99_us(), INT32_MAX) for _, peer in peers],
        )
        count = len(peers)
        # As COLUMNS has it, in one call.
        blob = struct.pack(f"<{count}i{count}q{count}q{count}i{count}i{count}i", *itertools.chain(*columns))
        return PairCounts(rank, generation, count), blob


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PairRows:
    """One rank's newest counts, as its life `generation` told them: columns as in COLUMNS, ascending by decode rank."""

    generation: int
    columns: Columns


def read_pairs(message: PairCounts, blob: bytes | memoryview, decode_ranks: Collection[int]) -> PairRows:
    """The reverse of `PushMeter.build`. The frame's reader has compared the blob's length with `count`.

    Raises:
        RemoteProtocolError: a peer that is no decode rank or is named twice, or a negative number.
    """
    columns, at = [], 0
    for kind in COLUMNS:
        dtype = np.dtype(kind)
        columns.append(np.frombuffer(blob, dtype, message.count, at).astype(np.int64))
        at += dtype.itemsize * message.count
    peers = columns[0].tolist()
    for peer in peers:
        if peer not in decode_ranks:
            raise RemoteProtocolError(f"counts pushes to rank {peer}, which is no decode rank")
    if len(set(peers)) != len(peers):
        twice = next(peer for peer in peers if peers.count(peer) > 1)
        raise RemoteProtocolError(f"counts pushes to rank {twice} twice")
    if any(np.count_nonzero(column < 0) for column in columns):
        raise RemoteProtocolError("counts less than no pushes to a rank")
    if peers != sorted(peers):
        order = np.argsort(columns[0])
        columns = [column[order] for column in columns]
    return PairRows(message.generation, tuple(columns))


def build_links(rank_to_rows: Mapping[int, PairRows]) -> tuple[LinksReport, bytes]:
    """All of them as one report with its blob, ascending by prefill rank and then by decode rank."""
    ranks = sorted(rank_to_rows)
    rows = [rank_to_rows[rank] for rank in ranks]
    sizes = [one.columns[0].size for one in rows]
    parts = [
        np.repeat(np.array(ranks, "<i4"), sizes).tobytes(),
        np.repeat(np.array([one.generation for one in rows], "<i4"), sizes).tobytes(),
    ]
    for index, kind in enumerate(COLUMNS):
        parts += [one.columns[index].astype(kind).tobytes() for one in rows]
    return LinksReport(sum(sizes)), b"".join(parts)
