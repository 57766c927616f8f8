"""Emitted tokens: the rows of a step's frame, and its blob (columns of rows, then all tokens).

`pack_tokens` and `unpack_tokens` are the blob's only codec on this side of the head.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import RemoteProtocolError
from transport.messages import TokensEmitted

ROW_BYTES = 8 + 4 + 4 + 4
_ONE = (1).to_bytes(4, "little")


class EmittedRow(NamedTuple):
    """New tokens of one request. `first_index` is the place of the first of them in the completion."""

    request: int
    attempt: int
    first_index: int
    tokens: list[int]


Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Columns = tuple[Longs, Ints, Ints, Ints | None, Ints]
"""requests, attempts, indices (place of the first token in the completion), counts, tokens; counts None: one each."""


class TokenBuffer:
    """New tokens since the last frame, one row per request whatever their number."""

    def __init__(self) -> None:
        self._columns: list[Columns] = []
        self._singles: list[tuple[int, int, int, int]] = []
        # Of the last plain frame, which the next one has too as long as the same requests have tokens.
        self._requests, self._attempts = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._head = self._ones = b""

    def add(self, key: tuple[int, int], index: int, token: int) -> None:
        """`index` is the token's place in the completion; tokens of a request are added in order."""
        self._singles.append((*key, index, token))

    def extend(self, requests: Longs, attempts: Ints, indices: Ints, tokens: Ints, counts: Ints | None = None) -> None:
        """The same for tokens of each of many requests: `counts` of each, at least one, one request after the other;
        None: one each. The arrays must not change any more."""
        self._join_singles()
        self._columns.append((requests, attempts, indices, counts, tokens))

    def take(self, step: int) -> tuple[TokensEmitted, bytes] | None:
        """The frame, and an empty buffer after it; None when there is nothing to say."""
        is_plain = not self._singles and len(self._columns) == 1
        if is_plain and self._columns[0][3] is None and sys.byteorder == "little":
            return self._take_plain(step)
        if not self._columns and len({single[0] for single in self._singles}) == len(self._singles):
            return self._take_singles(step)
        self._join_singles()
        columns = self._columns[0] if len(self._columns) == 1 else _join(self._columns)
        self._columns = []
        requests = columns[0]
        num_rows = len(requests)
        if num_rows == 0:
            return None
        if not is_plain and len(set(requests.tolist())) < num_rows:
            num_rows, num_tokens, blob = pack_tokens(_gather_rows(columns))
            return TokensEmitted(step, num_rows, num_tokens), blob
        _, attempts, indices, counts, tokens = columns
        if sys.byteorder == "big":
            requests, attempts, indices = requests.byteswap(), attempts.byteswap(), indices.byteswap()
            counts, tokens = None if counts is None else counts.byteswap(), tokens.byteswap()
        blob = b"".join(
            (
                requests.tobytes(),
                attempts.tobytes(),
                indices.tobytes(),
                _ONE * num_rows if counts is None else counts.tobytes(),
                tokens.tobytes(),
            )
        )
        return TokensEmitted(step, num_rows, len(tokens)), blob

    def _take_plain(self, step: int) -> tuple[TokensEmitted, bytes] | None:
        """Where there is one token for each of different requests."""
        requests, attempts, indices, _, tokens = self._columns.pop()
        if requests is not self._requests or attempts is not self._attempts:
            self._requests, self._attempts = requests, attempts
            self._head, self._ones = requests.tobytes() + attempts.tobytes(), _ONE * len(requests)
        num_rows = len(requests)
        if num_rows == 0:
            return None
        blob = b"".join((self._head, indices.tobytes(), self._ones, tokens.tobytes()))
        return TokensEmitted(step, num_rows, num_rows), blob

    def _take_singles(self, step: int) -> tuple[TokensEmitted, bytes] | None:
        """Where no step has ended, and each is another request's: columns would cost more than they hold."""
        if not self._singles:
            return None
        requests, attempts, indices, tokens = zip(*self._singles, strict=True)
        num_rows = len(self._singles)
        self._singles.clear()
        form = f"<{num_rows}q{4 * num_rows}i"
        blob = struct.pack(form, *requests, *attempts, *indices, *(1,) * num_rows, *tokens)
        return TokensEmitted(step, num_rows, num_rows), blob

    def _join_singles(self) -> None:
        if self._singles:
            requests, attempts, indices, tokens = zip(*self._singles, strict=True)
            attempt, index, token = (np.array(column, np.int32) for column in (attempts, indices, tokens))
            self._columns.append((np.array(requests, np.int64), attempt, index, None, token))
            self._singles.clear()


def _join(parts: list[Columns]) -> Columns:
    requests, attempts, indices, counts, tokens = zip(*parts, strict=True)
    joined = None
    if any(count is not None for count in counts):
        joined = np.concatenate([_count(part) for part in parts])
    return np.concatenate(requests), np.concatenate(attempts), np.concatenate(indices), joined, np.concatenate(tokens)


def _count(columns: Columns) -> Ints:
    return np.ones(len(columns[0]), np.int32) if columns[3] is None else columns[3]


def _gather_rows(columns: Columns) -> Iterable[EmittedRow]:
    """One row per request where some have several tokens: two steps ended between two frames."""
    rows: dict[tuple[int, int], EmittedRow] = {}
    tokens, at = columns[4].tolist(), 0
    heads = (columns[0], columns[1], columns[2], _count(columns))
    for request, attempt, index, count in zip(*(column.tolist() for column in heads), strict=True):
        row = rows.setdefault((request, attempt), EmittedRow(request, attempt, index, []))
        row.tokens.extend(tokens[at : at + count])
        at += count
    return rows.values()


def pack_tokens(rows: Iterable[EmittedRow]) -> tuple[int, int, bytes]:
    """(num_rows, num_tokens, blob) for TokensEmitted."""
    requests, attempts, indices, counts, tokens = array("q"), array("i"), array("i"), array("i"), array("i")
    for request, attempt, index, new in rows:
        requests.append(request)
        attempts.append(attempt)
        indices.append(index)
        counts.append(len(new))
        tokens.extend(new)
    columns = (requests, attempts, indices, counts, tokens)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    return len(requests), len(tokens), b"".join(column.tobytes() for column in columns)


def unpack_tokens(num_rows: int, num_tokens: int, blob: bytes | memoryview) -> list[EmittedRow]:
    """The rows of a received blob.

    Raises:
        RemoteProtocolError: the blob's length or counts do not fit the frame's numbers.
    """
    if len(blob) != num_rows * ROW_BYTES + 4 * num_tokens:
        raise RemoteProtocolError(f"TokensEmitted: {len(blob)} bytes for {num_rows} rows and {num_tokens} tokens")
    columns: list[array[int]] = []
    at = 0
    for code, length in (("q", num_rows), ("i", num_rows), ("i", num_rows), ("i", num_rows), ("i", num_tokens)):
        column = array(code)
        end = at + length * column.itemsize
        column.frombytes(bytes(blob[at:end]))
        if sys.byteorder == "big":
            column.byteswap()
        columns.append(column)
        at = end
    requests, attempts, indices, counts, tokens = columns
    if any(count < 0 for count in counts) or sum(counts) != num_tokens:
        raise RemoteProtocolError(f"TokensEmitted: row counts do not sum to {num_tokens}")
    rows: list[EmittedRow] = []
    at = 0
    for request, attempt, index, count in zip(requests, attempts, indices, counts, strict=True):
        rows.append(EmittedRow(request, attempt, index, tokens[at : at + count].tolist()))
        at += count
    return rows
