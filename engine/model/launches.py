"""Launches: which graphs a group's step consists of: said by each rank, agreed by all, and gone through by a rank.

Exchanges inside graphs need two things of the ranks of a step: the same number of layers in the same order, and the
same number of places for rows. So all ranks launch as many graphs, each of the size that the rank with most rows needs;
who has no rows for one launches it with padding. Rows of prompts come before those that decode, on every rank.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.errors import RemoteProtocolError

MOST_PIECES = 4096
"""Pieces of prompts in a step."""
_HEAD = struct.Struct("<2i")


class Launches(NamedTuple):
    """The graphs of a step.

    Attributes:
        pieces: rows of each piece of a prompt, in order.
        decode: rows of the step that decodes; 0 for none.
    """

    pieces: tuple[int, ...]
    decode: int

    @property
    def passes(self) -> int:
        """How many graphs."""
        return len(self.pieces) + (self.decode > 0)

    @property
    def rows(self) -> int:
        """Of all of them."""
        return sum(self.pieces) + self.decode

    def pack(self) -> bytes:
        """For the other ranks."""
        return _HEAD.pack(self.decode, len(self.pieces)) + struct.pack(f"<{len(self.pieces)}i", *self.pieces)


NOTHING = Launches((), 0)


def unpack_launches(data: memoryview, rank: int) -> Launches:
    """The reverse of `pack`. Raises RemoteProtocolError if it is none of `rank`'s."""
    decode, count = _HEAD.unpack(data[: _HEAD.size]) if data.nbytes >= _HEAD.size else (-1, -1)
    if decode < 0 or not 0 <= count <= MOST_PIECES or data.nbytes != _HEAD.size + 4 * count:
        raise RemoteProtocolError(f"rank {rank} says {decode} rows and {count} pieces in {data.nbytes} bytes")
    pieces = struct.unpack(f"<{count}i", data[_HEAD.size :])
    if min(pieces, default=1) < 1:
        raise RemoteProtocolError(f"rank {rank} says a piece of {min(pieces)} rows")
    return Launches(pieces, decode)


def merge_launches(said: Sequence[Launches]) -> Launches:
    """What all ranks launch: of each graph the most rows that one of them has."""
    count = max(len(each.pieces) for each in said)
    pieces = [max(each.pieces[at] for each in said if at < len(each.pieces)) for at in range(count)]
    return Launches(tuple(pieces), max(each.decode for each in said))


class Turns:
    """A rank's way through the agreed graphs of a step, its own rows in the first of each kind."""

    def __init__(self, own: Launches, agreed: Launches, check: Callable[[], None]) -> None:
        """Args: `check`: waits for what was launched, and raises if rows of others have not come."""
        self._own = collections.deque(own.pieces)
        self._pieces = collections.deque(agreed.pieces)
        self._decode = agreed.decode
        self.check = check

    @property
    def reads_prompts(self) -> bool:
        """What comes next of the own rows is a piece of a prompt."""
        return bool(self._own)

    @property
    def has_pieces(self) -> bool:
        """Pieces of prompts have not been launched."""
        return bool(self._pieces)

    def take_piece(self) -> int:
        """The agreed rows of the next piece, own or not."""
        if self._own:
            self._own.popleft()
        return self._pieces.popleft()

    def take_decode(self) -> int:
        """The agreed rows of the step that decodes, 0 if there is none left; no piece is left before it."""
        rows, self._decode = self._decode, 0
        return rows
