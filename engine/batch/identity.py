"""What makes a line the same line again: its id, and a digest of all that decides its answer.

`IdTable` remembers ids by 128-bit fingerprints in flat arrays, at most 72 bytes an id, because a batch may have more
lines than memory has room for strings. `AutoIds` remembers the lines without an id in one bit each.
"""

from __future__ import annotations

import array
import hashlib
import re
import secrets

_AUTO = re.compile(r"line-(\d{6,15})")
_FIRST_CAPACITY = 1024
DIGEST_BYTES = 8
"""Of a body's digest. It guards against mistakes (an input that was edited), not against attacks."""


def auto_id(line: int) -> str:
    """The id of a line that has none."""
    return f"line-{line:06d}"


def auto_line(custom_id: str) -> int | None:
    """The line whose automatic id this is, or None."""
    match = _AUTO.fullmatch(custom_id)
    if match is None:
        return None
    line = int(match[1])
    return line if auto_id(line) == custom_id else None


def digest(*parts: bytes) -> str:
    """Hex digest over parts, lengths included."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


class IdTable:
    """Ids and a digest for each, by open addressing over fingerprints. Ids are never removed."""

    __slots__ = ("_count", "_digests", "_high", "_key", "_low", "_mask")

    def __init__(self) -> None:
        # A fresh key, so that nobody can make ids that collide.
        self._key = secrets.token_bytes(16)
        self._count = 0
        self._allocate(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return self._count

    @property
    def num_bytes(self) -> int:
        """Memory that the table takes."""
        return 24 * (self._mask + 1)

    def add(self, custom_id: str, digest: str = "00" * DIGEST_BYTES) -> bool:
        """Puts an id in. False if it is there already; its digest then stays as it was."""
        low, high = self._fingerprint(custom_id)
        place = self._find(low, high)
        if self._low[place]:
            return False
        self._low[place], self._high[place], self._digests[place] = low, high, int(digest, 16)
        self._count += 1
        if self._count * 3 > (self._mask + 1) * 2:
            self._grow()
        return True

    def get(self, custom_id: str) -> str | None:
        """The digest that came with the id, or None if the id is not there."""
        place = self._find(*self._fingerprint(custom_id))
        return f"{self._digests[place]:0{2 * DIGEST_BYTES}x}" if self._low[place] else None

    def _fingerprint(self, custom_id: str) -> tuple[int, int]:
        raw = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key).digest()
        return int.from_bytes(raw[:8], "little") | 1, int.from_bytes(raw[8:], "little")  # 0 marks a free place

    def _find(self, low: int, high: int) -> int:
        place = (low >> 1) & self._mask
        while self._low[place] and (self._low[place] != low or self._high[place] != high):
            place = (place + 1) & self._mask
        return place

    def _allocate(self, capacity: int) -> None:
        self._mask = capacity - 1
        self._low, self._high, self._digests = (array.array("Q", bytes(8 * capacity)) for _ in range(3))

    def _grow(self) -> None:
        old = zip(self._low, self._high, self._digests, strict=True)
        self._allocate(2 * (self._mask + 1))
        for low, high, value in old:
            if low:
                place = self._find(low, high)
                self._low[place], self._high[place], self._digests[place] = low, high, value


class SeenIds:
    """The ids of one run's input, to find the second line with an id. Lines come in ascending order."""

    def __init__(self) -> None:
        self._explicit = IdTable()
        self._auto = bytearray()

    def add_auto(self, line: int) -> bool:
        """Notes that `line` had no id. False if an earlier line carries the automatic id explicitly."""
        byte = line >> 3
        if byte >= len(self._auto):
            self._auto.extend(bytes(byte + 1 - len(self._auto)))
        self._auto[byte] |= 1 << (line & 7)
        return not len(self._explicit) or self._explicit.get(auto_id(line)) is None

    def add(self, custom_id: str) -> bool:
        """Notes an explicit id. False if an earlier line has it, automatically or not."""
        line = auto_line(custom_id)
        if line is not None and (line >> 3) < len(self._auto) and self._auto[line >> 3] >> (line & 7) & 1:
            return False
        return self._explicit.add(custom_id)
