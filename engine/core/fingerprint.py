"""Digests of a prompt's ids at the ends of its pages, remembered by conversation; and which pages were ever seen."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

DIGEST_BYTES = 16
MOST_TEXTS = 1024
MOST_BYTES = 64 << 20
MOST_SEEN = 1 << 18


class Fingerprints:
    """Makes digests: each is over the one before and the ids of one page, so it stands for all ids up to that page's
    end. The first is over the salt: where salts differ, nothing is alike.

    The last prompt of each conversation is remembered with its digests, as long as there are at most `most_texts` of
    `most_bytes` bytes together. A prompt that begins with it has only its new pages hashed.
    """

    def __init__(self, page_tokens: int, *, most_texts: int = MOST_TEXTS, most_bytes: int = MOST_BYTES) -> None:
        self._page_bytes = 4 * page_tokens
        self._most_texts, self._most_bytes = most_texts, most_bytes
        self._texts: collections.OrderedDict[tuple[str, str], tuple[bytes, list[bytes]]] = collections.OrderedDict()
        self.num_bytes = 0
        """Of all texts that are remembered."""

    def __len__(self) -> int:
        """Texts that are remembered."""
        return len(self._texts)

    def digest(self, ids: memoryview, salt: str, conversation: str = "") -> list[bytes]:
        """Of nothing, and then at the end of each whole page of `ids`. The list is not to be changed.

        Args:
            ids: little-endian int32, as bytes.
            conversation: its name, as the caller has it; "" for none.
        """
        size = self._page_bytes
        whole = len(ids) // size * size
        digests: list[bytes] = []
        if conversation:
            digests = self._recall((salt, conversation), ids)
        if not digests:
            digests = [hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()]
        digests = self.extend(digests, ids)
        if conversation:
            self._remember((salt, conversation), bytes(ids[:whole]), digests)
        return digests

    def extend(self, digests: Sequence[bytes], ids: memoryview) -> list[bytes]:
        """Those of `ids`, of which the first ones have `digests`. Nothing is remembered."""
        size, longer = self._page_bytes, [*digests]
        for at in range(size * (len(longer) - 1), len(ids) // size * size, size):
            running = hashlib.blake2b(longer[-1], digest_size=DIGEST_BYTES)
            running.update(ids[at : at + size])
            longer.append(running.digest())
        return longer

    def _recall(self, key: tuple[str, str], ids: memoryview) -> list[bytes]:
        """A copy of the digests that are remembered, if `ids` begins with their text. It is remembered no longer."""
        text, digests = self._texts.pop(key, (b"", []))
        self.num_bytes -= len(text)
        # Bytes are compared in one go, views item by item.
        return digests.copy() if bytes(ids[: len(text)]) == text else []

    def _remember(self, key: tuple[str, str], text: bytes, digests: list[bytes]) -> None:
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
        for digest in reversed(digests[1:]):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def count(self, digests: Sequence[bytes]) -> int:
        """Pages up to the deepest one that was seen."""
        for index in range(len(digests) - 1, 0, -1):
            if digests[index] in self._seen:
                return index
        return 0
