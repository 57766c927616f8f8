"""The columns that renumber a step's tokens, against the same thing done row by row."""

from __future__ import annotations

import random

import pytest

from engine.actors.rows import RowTable
from tests.actors.head_rig import emitted, rows_of
from transport.errors import RemoteProtocolError
from transport.wire import Frame


@pytest.mark.parametrize("seed", range(40))
def test_a_split_equals_the_split_row_by_row(seed):
    rng = random.Random(seed)
    table = RowTable(capacity=4)
    open_rows: dict[int, tuple[int, int, int]] = {}  # number -> client, request, attempt
    dead: list[int] = []
    for round_ in range(60):
        for _ in range(rng.randrange(4)):
            row = (rng.randrange(1, 4), rng.randrange(1000), rng.randrange(1, 3))
            number = table.open(*row)
            assert number not in open_rows and number not in dead
            open_rows[number] = row
        if open_rows and rng.random() < 0.4:
            number = rng.choice(sorted(open_rows))
            if rng.random() < 0.5:
                table.mute(number)
            table.close(number)
            del open_rows[number]
            dead.append(number)
        names = [*open_rows, *dead[-3:]]
        rng.shuffle(names)
        rows = [
            (
                number,
                open_rows.get(number, (0, 0, 1))[2] + (rng.random() < 0.1),
                rng.randrange(50),
                [rng.randrange(1000) for _ in range(rng.randrange(1, 4))],
            )
            for number in names
        ]
        split = table.split(*emitted(rows, step=round_))
        expected: dict[int, list] = {}
        for number, attempt, index, tokens in rows:
            if number in open_rows and open_rows[number][2] == attempt:
                client, request, _ = open_rows[number]
                expected.setdefault(client, []).append((request, attempt, index, tokens))
        got = {client: rows_of(Frame(message, memoryview(blob))) for client, message, blob in split.parts}
        assert got == expected
        live = [number for number, attempt, _, _ in rows if number in open_rows and open_rows[number][2] == attempt]
        assert split.dropped_rows == len(rows) - len(live)


def test_the_table_grows_and_keeps_what_is_open():
    table = RowTable(capacity=2)
    numbers = [table.open(1, request, 1) for request in range(100)]
    split = table.split(*emitted([(number, 1, 0, [5]) for number in numbers]))
    [(_, message, blob)] = split.parts
    assert [row[0] for row in rows_of(Frame(message, memoryview(blob)))] == list(range(100))


def test_a_number_beyond_the_table_is_a_protocol_error():
    table = RowTable(capacity=2)
    with pytest.raises(RemoteProtocolError, match="never numbered"):
        table.split(*emitted([(1 << 20 | 500, 1, 0, [1])]))
