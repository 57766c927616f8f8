"""The columns of a client's rows: ids find their rows however these come and go; what is not right is left alone."""

from __future__ import annotations

import array
import random

import pytest

from engine.actors.client import Row
from engine.actors.unanswered import LINE_IDS, Unanswered
from transport.messages import Sampling, TokensEmitted
from transport.wire import Frame

Tokens = list[tuple[int, int, int, int]]
"""(request, attempt, index, id) each."""


def make_frame(tokens: Tokens, count: int = 1) -> Frame:
    columns = [[each[0] for each in tokens], *([each[field] for each in tokens] for field in (1, 2))]
    ints = [*columns[1:], [count] * len(tokens), [each[3] for each in tokens]]
    blob = array.array("q", columns[0]).tobytes() + b"".join(array.array("i", column).tobytes() for column in ints)
    return Frame(TokensEmitted(1, len(tokens), len(tokens)), memoryview(blob))


def add(table: Unanswered, request: int, attempt: int = 1) -> Row:
    row = Row(b"", Sampling(), request=request, attempt=attempt)
    table.add(row)
    table.start(row)
    return row


@pytest.mark.parametrize("seed", range(5))
def test_every_id_gets_to_its_row(seed: int) -> None:
    rng = random.Random(seed)
    table, number, wanted = Unanswered(), 0, {}
    for turn in range(300):
        while len(wanted) < 100 and rng.random() < 0.8:
            number += rng.choice((1, 1, 1, 64, 1000))
            wanted[add(table, number)] = list[int]()
        rows = rng.sample(list(wanted), rng.randint(1, len(wanted))) if wanted else []
        tokens = [(row.request, 1, len(wanted[row]), rng.randrange(1000)) for row in rows]
        cut = rng.randint(0, len(tokens))
        came = table.take([make_frame(part) for part in (tokens[:cut], tokens[cut:])], 1.0 + turn)
        if not tokens:
            assert came is None
            continue
        assert came is not None and came.ids.tolist() == [token[3] for token in tokens]
        for row, token in zip(rows, tokens, strict=True):
            wanted[row].append(token[3])
        looked = rng.randrange(len(rows))
        assert came[looked] is rows[looked] and list(rows[looked].generated) == wanted[rows[looked]]
        assert rows[looked].last_token_at == 1.0 + turn
        if rng.random() < 0.3:
            gone = rng.choice(list(wanted))
            table.remove(gone)
            assert list(gone.generated) == wanted.pop(gone)
    for row, ids in wanted.items():
        table.refresh(row)
        assert list(row.generated) == ids
    assert list(table.rows) == sorted(row.request for row in wanted)


def test_a_line_that_is_full_goes_to_its_row() -> None:
    table = Unanswered()
    row = add(table, 1)
    for index in range(LINE_IDS + 1):
        assert table.take([make_frame([(1, 1, index, index)])], 2.0) is not None
    assert len(row.generated) == LINE_IDS
    table.refresh(row)
    assert list(row.generated) == list(range(LINE_IDS + 1)) and row.first_token_at == 2.0


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([(1, 1, 0, 5), (2, 1, 0, 5)], 1),
        ([(1, 2, 0, 5)], 1),
        ([(1, 1, 1, 5)], 1),
        ([(3, 1, 0, 5)], 1),
        ([(1, 1, 0, 5), (1, 1, 0, 6)], 1),
        ([(1, 1, 0, 5)], 2),
        ([(-1, 1, 0, 5)], 1),
        ([(0, 0, 0, 5)], 1),
    ],
    ids=["unknown", "attempt", "index", "no start", "twice", "count", "negative", "zero"],
)
def test_what_is_not_right_is_left_alone(tokens: Tokens, count: int) -> None:
    table = Unanswered()
    row = add(table, 1)
    table.add(Row(b"", Sampling(), request=3, attempt=1))
    table.remove(add(table, 4, attempt=0))
    assert table.take([make_frame(tokens, count)], 1.0) is None
    assert table.take([make_frame([(1, 1, 0, 7)])], 1.0) is not None
    table.refresh(row)
    assert list(row.generated) == [7]


def test_more_rows_at_once_than_there_are_places_are_left_alone() -> None:
    """Several frames that came together may say more of few requests than the table has places."""
    table = Unanswered()
    rows = [add(table, number) for number in range(1, 60)]
    frames = [make_frame([(row.request, 1, index, index) for row in rows]) for index in range(3)]
    assert table.take(frames, 1.0) is None
    for frame in frames:
        assert table.take([frame], 1.0) is not None
    for row in rows:
        table.refresh(row)
        assert list(row.generated) == [0, 1, 2]
