"""LineReader: a file descriptor's lines, numbered, within bounded memory whatever the input is.

A line ends with `\\n` alone; a byte order mark at the start is skipped; blank lines are counted and left out. A line
longer than the limit is never held: its first bytes are kept for the error record, the rest is read and thrown away.
All methods block and belong to one thread at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import os

LINE_LIMIT = 64 << 20
"""Bytes of one line, its end not counted."""
READ_BYTES = 256 << 10
RAW_BYTES = 2 << 10
"""What an error record shows of a line."""
BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True)
class RawLine:
    """One line of input.

    Attributes:
        number: counted from 1, blank lines included.
        offset: of its first byte in the input.
        data: its bytes without the line end; only the first `RAW_BYTES` of a line that is too long.
        num_bytes: its true length.
    """

    number: int
    offset: int
    data: bytes
    num_bytes: int

    @property
    def too_long(self) -> bool:
        """Whether it was longer than the limit, so that `data` is only its beginning."""
        return len(self.data) < self.num_bytes


class LineReader:
    """Reads lines from `fd`, which stays the caller's.

    Attributes:
        ended: the end of the input was reached and every line was handed out.
        offset: bytes of input up to the end of the last line handed out.
    """

    def __init__(self, fd: int, *, line_limit: int = LINE_LIMIT) -> None:
        self.ended = False
        self.offset = 0
        self._fd = fd
        self._limit = line_limit
        self._number = 0
        self._whole: collections.deque[tuple[bytes, int]] = collections.deque()
        self._partial = bytearray()
        self._partial_bytes = 0
        """True length of the line being read; more than `_partial` holds once it is too long."""
        self._eof = False

    def read(self, max_lines: int, max_bytes: int) -> list[RawLine]:
        """The next lines: at least one unless the input has ended, at most `max_lines`, and no further line once
        `max_bytes` are reached. Blocks until there is one; does not wait to fill the list.

        Raises:
            OSError: the descriptor can not be read.
        """
        lines: list[RawLine] = []
        size = 0
        while len(lines) < max_lines and size < max_bytes:
            if self._whole:
                line = self._number_line(*self._whole.popleft())
                if line is not None:
                    lines.append(line)
                    size += len(line.data)
            elif lines or self._eof:
                break
            else:
                self._fill()
        self.ended = self._eof and not self._whole
        return lines

    def _number_line(self, data: bytes, num_bytes: int) -> RawLine | None:
        start = self.offset
        self.offset += num_bytes + 1
        self._number += 1
        if self._number == 1 and data.startswith(BOM):
            data, num_bytes, start = data[len(BOM) :], num_bytes - len(BOM), start + len(BOM)
        if len(data) == num_bytes and not data.strip(b" \t\r"):
            return None
        return RawLine(self._number, start, data, num_bytes)

    def _fill(self) -> None:
        """One read; splits what came into whole lines and the beginning of the next."""
        block = os.read(self._fd, READ_BYTES)
        if not block:
            self._eof = True
            if self._partial_bytes:
                self._end_line()
            return
        first, *others = block.split(b"\n")
        self._extend(first)
        for piece in others:
            self._end_line()
            self._extend(piece)

    def _extend(self, piece: bytes) -> None:
        self._partial_bytes += len(piece)
        if self._partial_bytes > self._limit:
            self._partial += piece[:RAW_BYTES]
            del self._partial[RAW_BYTES:]
        else:
            self._partial += piece

    def _end_line(self) -> None:
        self._whole.append((bytes(self._partial), self._partial_bytes))
        self._partial = bytearray()
        self._partial_bytes = 0
