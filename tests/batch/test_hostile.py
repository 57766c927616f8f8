"""Two thousand lines, a third of them hostile: each meets its fate, none is lost, none is doubled."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from tests.batch.fake_head import FakeHead, Fault
from tests.batch.hostile import BAD_BODIES, BAD_FIELDS, BAD_LINES, make_lines
from tests.batch.rig import run


def test_equal_seeds_make_equal_lines_and_others_differ() -> None:
    assert make_lines(50, 0.5, 1) == make_lines(50, 0.5, 1)
    assert make_lines(50, 0.5, 1) != make_lines(50, 0.5, 2)


@pytest.mark.parametrize(("seed", "order"), [(1, "completion"), (2, "input")])
async def test_every_hostile_line_meets_its_fate(tmp_path: Path, seed: int, order: str) -> None:
    lines = make_lines(2000, 0.35, seed, max_model_tokens=512)
    head = FakeHead(max_model_tokens=512, slots=64)
    for line in lines[::37]:
        head.faults[line.custom_id] = [Fault("rank_lost", 2)]
    outcome = await run(tmp_path, [line.data for line in lines], head, order=order, defaults={"max_tokens": b"8"})
    assert not head.breaches
    assert outcome.code == 1, outcome.said
    wanted = collections.Counter((line.custom_id, line.fate) for line in lines if line.fate != "blank")
    got = collections.Counter((record["custom_id"], "answer") for record in outcome.records)
    got += collections.Counter((record["custom_id"], record["error"]["type"]) for record in outcome.failures)
    assert got == wanted
    line_to_why = {place + 1: line.why for place, line in enumerate(lines)}
    for record in outcome.failures:
        assert record["error"]["message"], line_to_why[record["line"]]
        assert record["response"] is None
    if order == "input":
        numbers = [record["engine"]["line"] for record in outcome.records]
        assert numbers == sorted(numbers)


async def test_each_kind_of_bad_line_is_refused_by_name(tmp_path: Path) -> None:
    """The tables' entries one by one, so that none hides behind chance."""
    bodies = [{"prompt": "a", **body} for body in BAD_FIELDS] + list(BAD_BODIES)
    lines = [*BAD_LINES, *({"custom_id": f"b{place}", "body": body} for place, body in enumerate(bodies))]
    head = FakeHead()
    outcome = await run(tmp_path, lines, head)
    assert not outcome.records and not head.submissions
    by_line = {record["line"]: record for record in outcome.failures}
    assert sorted(by_line) == list(range(1, len(lines) + 1))
    for number, record in by_line.items():
        kind = "bad_line" if number <= len(BAD_LINES) else "bad_request"
        assert record["error"]["type"] == kind, lines[number - 1]
        assert record["error"]["retryable"] is False
    for place, body in enumerate(BAD_FIELDS):
        message = by_line[len(BAD_LINES) + place + 1]["error"]["message"]
        assert any(message.startswith(name) for name in body), (body, message)
