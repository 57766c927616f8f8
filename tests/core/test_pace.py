"""The pace of a line: what one who comes now is told to expect."""

from __future__ import annotations

import pytest

from engine.core.backlog import Backlog
from engine.core.pace import Pace


def test_nobody_waits_where_nobody_is_before_him() -> None:
    pace = Pace()
    for at in range(100):
        pace.note_taken(float(at))
        pace.note_line(float(at), is_empty=True)
    assert pace.predict_s(0, 100.0) == pace.predict_s(5, 100.0) == 0.0


def test_the_wait_is_what_the_line_took_of_late() -> None:
    pace = Pace()
    pace.note_line(10.0, is_empty=False)
    for at in range(11, 60):
        pace.note_taken(at / 2 + 5.0)
        pace.note_line(at / 2 + 5.0, is_empty=False)
    assert pace.predict_s(3, 34.5) == pytest.approx(4 * 0.5)
    for at in range(1, 80):
        pace.note_taken(34.5 + at / 10)
    assert pace.predict_s(3, 42.4) == pytest.approx(4 * 0.1, rel=0.1), "it has become faster"
    assert pace.predict_s(1, 52.4) == pytest.approx(2 * 10.0), "it stands still"


def test_an_empty_line_forgets_how_long_nothing_was_taken_and_not_its_pace() -> None:
    pace = Pace()
    pace.note_line(0.0, is_empty=False)
    pace.note_taken(2.0)
    pace.note_line(2.0, is_empty=True)
    assert pace.predict_s(1, 50.0) == 0.0
    pace.note_line(50.0, is_empty=False)
    assert pace.predict_s(1, 50.0) == pytest.approx(4.0)


def test_only_those_of_the_same_priority_or_a_better_one_are_before() -> None:
    backlog: Backlog[str] = Backlog(max_requests=10, max_ids=100)
    for number, priority in enumerate((0, 0, 10, -5)):
        backlog.add(number, "x", priority=priority, num_ids=1)
    assert [backlog.num_before(priority) for priority in (-6, -5, 0, 10)] == [0, 1, 3, 4]
