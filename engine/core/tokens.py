"""Emitted tokens: the rows of a step's frame, and its blob (columns of rows, then all tokens).

`pack_tokens` and `unpack_tokens` are the blob's only codec on this side of the head.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from engine.errors import RemoteProtocolError
from transport.messages import TokensEmitted

ROW_BYTES = 8 + 4 + 4 + 4


class EmittedRow(NamedTuple):
    """New tokens of one request. `first_index` is the place of the first of them in the completion."""

    request: int
    attempt: int
    first_index: int
    tokens: list[int]


class TokenBuffer:
    """New tokens since the last frame, one row per request whatever their number."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], EmittedRow] = {}

    def add(self, key: tuple[int, int], index: int, token: int) -> None:
        """`index` is the token's place in the completion; tokens of a request are added in order."""
        row = self._rows.get(key)
        if row is None:
            self._rows[key] = EmittedRow(*key, index, [token])
        else:
            row.tokens.append(token)

    def take(self, step: int) -> tuple[TokensEmitted, bytes] | None:
        """The frame, and an empty buffer after it; None when there is nothing to say."""
        if not self._rows:
            return None
        num_rows, num_tokens, blob = pack_tokens(self._rows.values())
        self._rows = {}
        return TokensEmitted(step, num_rows, num_tokens), blob


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
