"""Said: what the ranks of a group say of a step, as frames, and what follows from them.

Ranks whose rows go on say the same in each step, and the same follows. So words are packed, read and agreed on where
somebody says something else than in the step before: that takes as long as it takes to send and to receive them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.pact import WORDS_BYTES, Agreement, Words, agree, unpack_words
from engine.model.launches import Launches, merge_launches, unpack_launches


class Said:
    """See the module. Remembers one step."""

    def __init__(self, idle_limit: int) -> None:
        """Args: `idle_limit`: as `pact.agree` takes it."""
        self._idle_limit = idle_limit
        self._own: tuple[Words, Launches] | None = None
        self._frame = b""
        self._all: object = None
        self._agreed: tuple[Launches, Agreement] | None = None

    def pack(self, words: Words, own: Launches) -> bytes:
        """The frame for each other rank."""
        if self._own != (words, own):
            self._own, self._frame = (words, own), words.pack() + own.pack()
        return self._frame

    def read(
        self, heard: Mapping[int, memoryview], ranks: Sequence[int], active: tuple[int, ...], membership: int
    ) -> tuple[Launches, Agreement]:
        """What all launch and what they have agreed on.

        Args:
            heard: by place what the others have said, to be seen beside what was packed last.
            ranks: by place, for errors.
            active, membership: as `pact.agree` takes them.

        Raises:
            RemoteProtocolError: a frame that is none.
        """
        assert self._own is not None
        frames = {place: bytes(view) for place, view in heard.items()}
        said = (self._own, frames, active, membership)
        if self._agreed is None or self._all != said:
            words, own = self._own
            all_words = [words, *(unpack_words(frame[:WORDS_BYTES]) for frame in frames.values())]
            launches = [own]
            launches += [unpack_launches(memoryview(frame)[WORDS_BYTES:], ranks[at]) for at, frame in frames.items()]
            agreed = agree(all_words, active, membership, self._idle_limit)
            self._all, self._agreed = said, (merge_launches(launches), agreed)
        return self._agreed
