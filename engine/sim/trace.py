"""Trace: what happened in a run, as a rolling hash that two runs of one seed must agree on, event by event."""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array

from transport.messages import MESSAGE_TO_KIND, NameGroup, RankReady
from transport.wire import HEADER

_EVENT = struct.Struct("<dI")
_PENDING_BYTES = 32 << 10


class Trace:
    """Events in order. `kind` counts them; `what` and `detail` tell them apart.

    Args:
        keep: remember each event's own mark, so that `first_difference` can name the first event that differs.
        show: keep the texts of the events whose numbers lie in this range.
    """

    def __init__(self, *, keep: bool = False, show: range = range(0)) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        # Bytes that the hash has yet to take: one call for many events.
        self._pending = bytearray()
        self._marks = array("Q") if keep else None
        self._show = show
        self.shown: list[str] = []
        self.num_events = 0
        self.kinds: dict[str, int] = {}
        """How many events there were of each kind."""

    def add(self, now: float, kind: str, what: str, detail: int = 0) -> None:
        """One event at virtual time `now`. `detail` is a checksum or a count, 32 bits of it."""
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        pending = self._pending
        pending += _EVENT.pack(now, detail & 0xFFFFFFFF)
        pending += what.encode()
        if self._marks is not None:
            self._marks.append(int.from_bytes(self._take_hash().digest(), "little"))
        elif len(pending) > _PENDING_BYTES:
            self._take_hash()
        if self._show and self.num_events in self._show:
            self.shown.append(f"#{self.num_events} {now:.9f} s {kind} {what} {detail & 0xFFFFFFFF:08x}")
        self.num_events += 1

    @property
    def digest(self) -> str:
        """Sixteen hex digits over all events so far."""
        return self._take_hash().hexdigest()

    def _take_hash(self) -> hashlib.blake2b:
        """The hash over all events."""
        self._hash.update(self._pending)
        self._pending.clear()
        return self._hash

    def first_difference(self, other: Trace) -> int | None:
        """Number of the first event that two kept traces do not share; None if they are equal."""
        assert self._marks is not None and other._marks is not None
        for at, (mine, theirs) in enumerate(zip(self._marks, other._marks, strict=False)):
            if mine != theirs:
                return at
        return None if len(self._marks) == len(other._marks) else min(len(self._marks), len(other._marks))


class StreamSum:
    """Checksums over what a process writes to another, without the blobs that carry addresses of this process's memory.

    Which no seed repeats: they are in the fabric descriptions of a group's ranks.
    """

    def __init__(self) -> None:
        self._head = b""
        self._left = self._hidden = 0

    def feed(self, data: bytes) -> int:
        """Of the next bytes, which may end anywhere in a frame."""
        if not self._head and not self._left and not self._hidden and len(data) >= HEADER.size:
            meta, blob, kind, _, _ = HEADER.unpack_from(data)
            if HEADER.size + meta + blob == len(data):  # one frame, as a rule
                if kind not in _WITH_ADDRESSES:
                    return zlib.crc32(data)
            elif _is_plain(data):
                return zlib.crc32(data)
        total, at = 0, 0
        while at < len(data):
            if not self._left and not self._hidden:
                part = data[at : at + HEADER.size - len(self._head)]
                self._head += part
                total, at = zlib.crc32(part, total), at + len(part)
                if len(self._head) == HEADER.size:
                    meta, blob, kind, _, _ = HEADER.unpack(self._head)
                    hides = kind in _WITH_ADDRESSES
                    self._left, self._hidden = (meta, blob) if hides else (meta + blob, 0)
                    self._head = b""
            elif self._left:
                part = data[at : at + self._left]
                total, at, self._left = zlib.crc32(part, total), at + len(part), self._left - len(part)
            else:
                skipped = min(self._hidden, len(data) - at)
                at, self._hidden = at + skipped, self._hidden - skipped
        return total


def _is_plain(data: bytes) -> bool:
    """Whether these are whole frames of which nothing is left out."""
    at, end = 0, len(data)
    while end - at >= HEADER.size:
        meta, blob, kind, _, _ = HEADER.unpack_from(data, at)
        if kind in _WITH_ADDRESSES:
            return False
        at += HEADER.size + meta + blob
    return at == end


_WITH_ADDRESSES = frozenset(MESSAGE_TO_KIND[kind] for kind in (RankReady, NameGroup))
