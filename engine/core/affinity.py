"""Affinities: which prefill ranks have computed the beginning of a prompt, and how many ids of it that may spare.

The head keeps no ids, so it can not know what a rank's cache holds. It knows which prompts of a conversation a rank has
computed, how long they were, and what became of its earlier guesses. A conversation is what its client calls one; else
what begins with the same ids.
"""

from __future__ import annotations

import dataclasses
import hashlib

FIRST_IDS = 256
"""Of a prompt whose client names no conversation, so many ids say which one it is."""
MOST_KEYS = 32_768
"""Conversations; the one that nobody asked for longest is forgotten."""
MOST_RANKS = 4
"""Ranks of each."""


def affinity_key(affinity: str, salt: str, ids: bytes | memoryview) -> bytes:
    """What prompts of one conversation have in common. At most `FIRST_IDS` ids are looked at.

    Args:
        affinity: the client's name for it; empty for none.
        salt: as `Submit.cache_salt`; prompts with other salts share nothing.
        ids: int32[num_ids].
    """
    name = affinity.encode()
    digest = hashlib.blake2b(salt.encode(), digest_size=16, person=b"name" if name else b"ids")
    digest.update(name or ids[: 4 * FIRST_IDS])
    return digest.digest()


@dataclasses.dataclass(slots=True)
class _Known:
    """Of one key: by rank the rank's life and the ids of its last prompt; how much of such guesses came true lately."""

    rank_to_ids: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    trust: float = 1.0


class Affinities:
    """See the module. Every method takes the same time, whatever is known."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._key_to_known: dict[bytes, _Known] = {}
        self._lives: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._key_to_known)

    def find(self, key: bytes) -> tuple[dict[int, int], float]:
        """Ranks that have computed a prompt of the key, with its ids; and which share of such ids was there lately."""
        known = self._key_to_known.pop(key, None)
        if known is None:
            return {}, 1.0
        self._key_to_known[key] = known
        lives = self._lives
        return {rank: ids for rank, (life, ids) in known.rank_to_ids.items() if life == lives.get(rank, 0)}, known.trust

    def note(self, key: bytes, rank: int, *, num_ids: int, guessed: int, cached: int) -> None:
        """A rank has computed a prompt.

        Args:
            num_ids: of the prompt, which are there now.
            guessed: ids of it that `find` said were there before; 0 for none.
            cached: those that were.
        """
        known = self._key_to_known.pop(key, None) or _Known()
        self._key_to_known[key] = known
        if guessed:
            known.trust += (min(1.0, cached / guessed) - known.trust) / 2
        known.rank_to_ids.pop(rank, None)
        known.rank_to_ids[rank] = (self._lives.get(rank, 0), num_ids)
        if len(known.rank_to_ids) > MOST_RANKS:
            del known.rank_to_ids[next(iter(known.rank_to_ids))]
        if len(self._key_to_known) > self._most_keys:
            del self._key_to_known[next(iter(self._key_to_known))]

    def forget(self, rank: int) -> None:
        """What the rank had computed is gone, or nobody is to be sent there for it."""
        self._lives[rank] = self._lives.get(rank, 0) + 1
