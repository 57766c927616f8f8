"""--resume: by id and digest, on any subset or superset of the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.batch.fake_head import FakeHead, Fault
from tests.batch.rig import read_records, run


def prompts(*places: int, **body: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{place}", "prompt": f"prompt number {place}", "max_tokens": 4, **body} for place in places]


async def test_a_superset_in_another_order_runs_only_what_is_new(tmp_path: Path) -> None:
    await run(tmp_path, prompts(0, 1, 2), FakeHead())
    head = FakeHead()
    outcome = await run(tmp_path, prompts(5, 2, 0, 4), head, resume=True)
    assert outcome.code == 0
    assert sorted(submit.label for submit in head.submissions) == ["r4", "r5"]
    assert sorted(outcome.answers) == ["r0", "r1", "r2", "r4", "r5"] and len(outcome.records) == 5


async def test_white_space_and_key_order_change_nothing(tmp_path: Path) -> None:
    await run(tmp_path, [{"custom_id": "a", "prompt": "x", "max_tokens": 3, "temperature": 1}], FakeHead())
    head = FakeHead()
    other = b'{ "temperature": 1.0,\t"max_tokens":3, "label": 5, "prompt":"\\u0078", "custom_id":"a"}'
    assert (await run(tmp_path, [other], head, resume=True)).code == 0
    assert not head.submissions


@pytest.mark.parametrize(
    "change", [{"prompt": "other"}, {"max_tokens": 5}, {"temperature": 0.5}, {"seed": 3}, {"stop": "x"}]
)
async def test_an_input_that_changed_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    await run(tmp_path, prompts(0, 1), FakeHead())
    before = (tmp_path / "out.jsonl").read_bytes()
    outcome = await run(tmp_path, prompts(0, **change), FakeHead(), resume=True)
    assert outcome.code == 2
    assert "input changed" in outcome.said and "r0" in outcome.said
    assert (tmp_path / "out.jsonl").read_bytes() == before


async def test_changed_defaults_or_model_are_a_changed_input(tmp_path: Path) -> None:
    lines = [{"custom_id": "a", "prompt": "x"}]
    await run(tmp_path, lines, FakeHead(), defaults={"max_tokens": b"3"})
    assert (await run(tmp_path, lines, FakeHead(), defaults={"max_tokens": b"4"}, resume=True)).code == 2
    assert (await run(tmp_path, lines, FakeHead(model="/m/b"), defaults={"max_tokens": b"3"}, resume=True)).code == 2
    assert (await run(tmp_path, lines, FakeHead(), defaults={"max_tokens": b"3"}, resume=True)).code == 0


async def test_errors_are_tried_again_unless_kept(tmp_path: Path) -> None:
    lines: list[Any] = [*prompts(0, 1), b"bad line", {"custom_id": "c", "prompt": []}]
    head = FakeHead()
    head.faults["r1"] = [Fault("device_failed", 0, retryable=False)]
    first = await run(tmp_path, lines, head)
    assert set(first.errors) == {"r1", "line-000003", "c"}
    kept = await run(tmp_path, lines, head, resume=True, keep_errors=True)
    assert kept.code == 0 and len(head.submissions) == 2
    assert set(kept.errors) == {"r1", "line-000003", "c"}
    again = await run(tmp_path, lines, head, resume=True)
    assert again.code == 1
    assert set(again.errors) == {"line-000003", "c"} and set(again.answers) == {"r0", "r1"}
    repaired: list[Any] = [*prompts(0, 1), {"custom_id": "c", "prompt": "now good", "max_tokens": 2}]
    assert (await run(tmp_path, repaired, head, resume=True)).code == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


async def test_a_line_that_failed_and_was_edited_is_tried_even_if_errors_are_kept(tmp_path: Path) -> None:
    await run(tmp_path, [{"custom_id": "c", "prompt": []}], FakeHead())
    lines = [{"custom_id": "c", "prompt": "good", "max_tokens": 2}]
    outcome = await run(tmp_path, lines, FakeHead(), resume=True, keep_errors=True)
    assert set(outcome.answers) == {"c"}


async def test_repeated_ids_stay_errors_on_resume(tmp_path: Path) -> None:
    lines = [*prompts(0), *prompts(0)]
    first = await run(tmp_path, lines, FakeHead())
    assert (first.code, first.errors["r0"]["error"]["code"], first.errors["r0"]["line"]) == (1, "duplicate_id", 2)
    second = await run(tmp_path, lines, FakeHead(), resume=True)
    assert (second.code, len(second.records), len(second.failures)) == (1, 1, 1)


async def test_a_file_that_is_no_output_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(json.dumps({"custom_id": "a", "response": {}}) + "\n")
    outcome = await run(tmp_path, prompts(0), FakeHead(), resume=True)
    assert outcome.code == 2
    assert "out.jsonl:1: not a record of engine batch" in outcome.said


async def test_an_output_that_exists_is_not_written_over(tmp_path: Path) -> None:
    await run(tmp_path, prompts(0), FakeHead())
    outcome = await run(tmp_path, prompts(1), FakeHead())
    assert outcome.code == 2
    assert [record["custom_id"] for record in read_records(tmp_path / "out.jsonl")] == ["r0"]


async def test_output_errors_and_input_must_be_different_files(tmp_path: Path) -> None:
    out = str(tmp_path / "out.jsonl")
    assert (await run(tmp_path, prompts(0), FakeHead(), errors=out)).code in (2, 5)
    assert (await run(tmp_path, prompts(0), FakeHead(), output=str(tmp_path / "in.jsonl"), resume=True)).code == 2
    assert len((tmp_path / "in.jsonl").read_bytes()) > 0
