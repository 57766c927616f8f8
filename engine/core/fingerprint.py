"""Digests of a prompt's ids at the ends of its pages, remembered by conversation; and which pages were ever seen.

They are made as far as somebody asks for them. That a prompt is new shows at its first page, and the others can wait
until there is time: so what it costs to take a prompt in does not grow with its length.
"""

from __future__ import annotations

import bisect
import collections
import hashlib
from collections.abc import Callable, Sequence
from typing import overload

DIGEST_BYTES = 16
MOST_TEXTS = 1024
MOST_BYTES = 64 << 20
MOST_SEEN = 1 << 18


class Digests(Sequence[bytes]):
    """Of nothing, and then at the end of each whole page of some ids. Each is over the one before and the ids of one
    page, so it stands for all ids up to that page's end."""

    __slots__ = ("_count", "_ids", "_made", "_page_bytes")

    def __init__(self, made: list[bytes], ids: memoryview, page_bytes: int) -> None:
        """Borrows the ids until all are made. `made`: the first ones, at least that of nothing; taken."""
        self._made = made
        self._ids = ids
        self._page_bytes = page_bytes
        self._count = 1 + len(ids) // page_bytes

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            places = range(*index.indices(self._count))
            self.reach(max(places, default=0))
            return [self._made[at] for at in places]
        at = index if index >= 0 else index + self._count
        if at >= len(self._made):
            self.reach(at)
        return self._made[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def reach(self, pages: int) -> None:
        """Makes those of so many pages."""
        made, ids, size = self._made, self._ids, self._page_bytes
        for at in range(size * (len(made) - 1), size * min(pages, self._count - 1), size):
            made.append(_hash(made[-1] + ids[at : at + size]))
        if len(made) == self._count:
            self._ids = _NO_IDS

    def follow(self, ids: memoryview) -> Digests:
        """Those of other ids that begin with these, as far as these go in whole pages; borrows them."""
        return Digests(self._made.copy(), ids, self._page_bytes)


_NO_IDS = memoryview(b"")


def _hash(said: bytes) -> bytes:
    # Processors have instructions for this one.
    return hashlib.sha256(said).digest()[:DIGEST_BYTES]


class Fingerprints:
    """Makes digests. The first is over the salt: where salts differ, nothing is alike.

    The last prompt of each conversation is remembered with its digests, as long as there are at most `most_texts` of
    `most_bytes` bytes together. A prompt that begins with it has only its new pages hashed.
    """

    def __init__(self, page_tokens: int, *, most_texts: int = MOST_TEXTS, most_bytes: int = MOST_BYTES) -> None:
        self._page_bytes = 4 * page_tokens
        self._most_texts, self._most_bytes = most_texts, most_bytes
        self._texts: collections.OrderedDict[tuple[str, str], tuple[bytes, Digests]] = collections.OrderedDict()
        self.num_bytes = 0
        """Of all texts that are remembered."""

    def __len__(self) -> int:
        """Texts that are remembered."""
        return len(self._texts)

    def digest(self, ids: memoryview, salt: str, conversation: str = "") -> Digests:
        """Of `ids`, which are borrowed.

        Args:
            ids: little-endian int32, as bytes.
            conversation: its name, as the caller has it; "" for none.
        """
        if not conversation:
            return self._begin(ids, salt)
        size = self._page_bytes
        text = bytes(ids[: len(ids) // size * size])
        before = self._recall((salt, conversation), ids)
        digests = self._begin(memoryview(text), salt) if before is None else before.follow(memoryview(text))
        self._remember((salt, conversation), text, digests)
        return digests

    def _begin(self, ids: memoryview, salt: str) -> Digests:
        return Digests([_hash(salt.encode())], ids, self._page_bytes)

    def _recall(self, key: tuple[str, str], ids: memoryview) -> Digests | None:
        """Those that are remembered, if `ids` begins with their text. It is remembered no longer."""
        found = self._texts.pop(key, None)
        if found is None:
            return None
        text, digests = found
        self.num_bytes -= len(text)
        # Bytes are compared in one go, views item by item.
        return digests if bytes(ids[: len(text)]) == text else None

    def _remember(self, key: tuple[str, str], text: bytes, digests: Digests) -> None:
        self._texts[key] = text, digests
        self.num_bytes += len(text)
        while len(self._texts) > self._most_texts or self.num_bytes > self._most_bytes:
            _, (old, _) = self._texts.popitem(last=False)
            self.num_bytes -= len(old)


class SeenPages:
    """Pages of all prompts that were computed here, the last `most` of them, by their digests."""

    def __init__(self, most: int = MOST_SEEN) -> None:
        self._most = most
        self._seen: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, digests: Sequence[bytes]) -> None:
        """`digests` as `Fingerprints.digest` makes them."""
        # The first page last: it is in most prompts, and the others are of no use without it.
        count = self.count(digests)
        self._seen.update(dict.fromkeys(reversed(digests[1 + count :])))
        for digest in reversed(digests[1 : 1 + count]):
            self._seen.move_to_end(digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def count(self, digests: Sequence[bytes]) -> int:
        """Pages up to the deepest one that was seen. Those before it are remembered as long."""
        return count_leading(len(digests) - 1, lambda page: digests[page] in self._seen)


def count_leading(most: int, has: Callable[[int], bool]) -> int:
    """How many of the pages 1 to `most` have what all before one have that has it. Looks at few of them, and at none
    far behind the last one."""
    low, high = 0, 1
    while high <= most and has(high):
        low, high = high, 2 * high
    return low + bisect.bisect_left(range(low + 1, min(high, most + 1)), True, key=lambda page: not has(page))
