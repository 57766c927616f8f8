"""RowTable: request numbers of the cluster to requests of clients, as columns, for the frame that comes every step.

A number is `life << SLOT_BITS | slot`: the slot finds the row without a search, the life tells a row from those that
used the slot before. So splitting a step's frame is a handful of numpy operations, whatever the number of requests.
Invariant: a slot is live from `open` until `mute` or `close`, and reserved until `close`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from transport.errors import RemoteProtocolError
from transport.messages import LogprobsEmitted, TokensEmitted

SLOT_BITS = 20
_SLOT_MASK = (1 << SLOT_BITS) - 1
_ONE = (1).to_bytes(4, "little")
_ROW_BYTES = 8 + 4 + 4 + 4
"""request, attempt, index, count: see TokensEmitted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A step's frame taken apart.

    Attributes:
        parts: per client (its key), the message and blob to send.
        dropped_rows: rows of requests that ended before.
    """

    parts: list[tuple[int, TokensEmitted, bytes]]
    dropped_rows: int


class RowTable:
    """See the module. `client` keys are small ints that the caller gives out."""

    def __init__(self, capacity: int = 1024) -> None:
        self._number = np.zeros(capacity, np.int64)
        self._attempt = np.zeros(capacity, np.int32)
        self._request = np.zeros(capacity, np.int64)
        self._client = np.zeros(capacity, np.int64)
        self._generated = np.zeros(capacity, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._life = 0

    def open(self, client: int, request: int, attempt: int, generated: int = 0) -> int:
        """Reserves a row; returns the cluster's number for it. `generated`: tokens that the client has already."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._life += 1
        number = self._life << SLOT_BITS | slot
        self._number[slot] = number
        self._attempt[slot] = attempt
        self._request[slot] = request
        self._client[slot] = client
        self._generated[slot] = generated
        return number

    def generated(self, number: int) -> int:
        """Tokens of its completion that have come; the number must be reserved."""
        return int(self._generated[number & _SLOT_MASK])

    def mute(self, number: int) -> None:
        """Its rows are dropped from now on; the number stays reserved."""
        self._number[number & _SLOT_MASK] = 0

    def close(self, number: int) -> None:
        """Gives the slot back."""
        slot = number & _SLOT_MASK
        self._number[slot] = 0
        self._free.append(slot)

    def split(self, message: TokensEmitted, blob: bytes | memoryview) -> Split:
        """Sorts the rows by client and renumbers them.

        Raises:
            RemoteProtocolError: the blob does not have the layout that the message states.
        """
        rows, tokens = message.num_rows, message.num_tokens
        if len(blob) != rows * _ROW_BYTES + 4 * tokens:
            raise RemoteProtocolError(f"TokensEmitted of {rows} rows and {tokens} tokens has {len(blob)} bytes")
        numbers = np.frombuffer(blob, "<i8", rows)
        attempt = np.frombuffer(blob, "<i4", rows, 8 * rows)
        index = np.frombuffer(blob, "<i4", rows, 12 * rows)
        count = np.frombuffer(blob, "<i4", rows, 16 * rows)
        if rows == 0:
            return Split([], 0)
        is_plain = rows == tokens and bytes(blob[16 * rows : 20 * rows]) == _ONE * rows
        is_sound = is_plain or (int(count.min()) >= 1 and int(count.sum(dtype=np.int64)) == tokens)
        if not is_sound or int(np.minimum.reduce(numbers)) < 0:
            raise RemoteProtocolError(f"TokensEmitted of {rows} rows: counts do not add up to {tokens} tokens")
        slots = numbers & _SLOT_MASK
        if int(np.maximum.reduce(slots)) >= len(self._number):
            raise RemoteProtocolError("TokensEmitted names a request that the head never numbered")
        live = (self._number[slots] == numbers) & (self._attempt[slots] == attempt)
        clients = self._client[slots]
        parts: list[tuple[int, TokensEmitted, bytes]] = []
        if b"\x00" not in (live & (clients == clients[0])).tobytes():
            self._generated[slots] = index + count
            renumbered = self._request[slots].astype("<i8", copy=False).tobytes()
            parts.append((int(clients[0]), message, b"".join((renumbered, blob[8 * rows :]))))
        else:
            token = np.frombuffer(blob, "<i4", tokens, _ROW_BYTES * rows)
            token_row = np.repeat(np.arange(rows), count)
            self._generated[slots[live]] = (index + count)[live]
            for owner in np.unique(clients[live]).tolist():
                mine = live & (clients == owner)
                columns: tuple[npt.NDArray[np.generic], ...] = (
                    self._request[slots[mine]].astype("<i8"),
                    attempt[mine],
                    index[mine],
                    count[mine],
                    token[mine[token_row]],
                )
                part = TokensEmitted(step=message.step, num_rows=int(mine.sum()), num_tokens=len(columns[4]))
                parts.append((owner, part, b"".join(column.tobytes() for column in columns)))
        return Split(parts, rows - int(np.count_nonzero(live)))

    def split_scores(
        self, message: LogprobsEmitted, blob: bytes | memoryview
    ) -> list[tuple[int, LogprobsEmitted, bytes]]:
        """Sorts what is told of tokens by client, as `split` does with the tokens themselves.

        Raises:
            RemoteProtocolError: the blob does not have the layout that the message states.
        """
        rows, tops = message.num_rows, message.num_tops
        if len(blob) != 28 * rows + 8 * tops:
            raise RemoteProtocolError(f"LogprobsEmitted of {rows} rows and {tops} likeliest has {len(blob)} bytes")
        numbers = np.frombuffer(blob, "<i8", rows)
        ints = np.frombuffer(blob, "<i4", 5 * rows, 8 * rows).reshape(5, rows)  # two of them floats, only moved
        below = np.frombuffer(blob, "<i4", 2 * tops, 28 * rows).reshape(2, tops)
        counts = ints[2]
        if (rows and (int(counts.min()) < 0 or int(numbers.min()) < 0)) or int(counts.sum(dtype=np.int64)) != tops:
            raise RemoteProtocolError(f"LogprobsEmitted of {rows} rows: counts do not add up to {tops} likeliest")
        slots = numbers & _SLOT_MASK
        if rows and int(slots.max()) >= len(self._number):
            raise RemoteProtocolError("LogprobsEmitted names a request that the head never numbered")
        live = (self._number[slots] == numbers) & (self._attempt[slots] == ints[0])
        clients = self._client[slots]
        row_of_top = np.repeat(np.arange(rows), counts)
        parts = []
        for owner in np.unique(clients[live]).tolist():
            mine = live & (clients == owner)
            kept = below[:, mine[row_of_top]]
            part = LogprobsEmitted(step=message.step, num_rows=int(mine.sum()), num_tops=kept.shape[1])
            columns = (self._request[slots[mine]].astype("<i8"), ints[:, mine], kept)
            parts.append((owner, part, b"".join(column.tobytes() for column in columns)))
        return parts

    def _grow(self) -> None:
        old = len(self._number)
        if old > _SLOT_MASK:
            raise AssertionError(f"more than {_SLOT_MASK + 1} requests at once: the queue's limits are not kept")
        for name in ("_number", "_attempt", "_request", "_client", "_generated"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(old, column.dtype)]))
        self._free.extend(range(2 * old - 1, old - 1, -1))
