"""Fields of a line that say how it is treated: they go to the head, and no answer or digest depends on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.batch.fake_head import FakeHead
from tests.batch.rig import prompt_ids, run

PROMPT = "The sea was"


def line(name: str, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "prompt": PROMPT, "max_tokens": 9, "seed": 3, **more}


async def test_salt_and_priority_go_to_the_head_and_change_no_digest(tmp_path: Path) -> None:
    head = FakeHead()
    lines = [line("plain"), line("salted", cache_salt="team 7", priority=-3), line("last", priority=100)]
    outcome = await run(tmp_path, lines, head)
    assert outcome.code == 0 and not head.breaches
    digests = {outcome.answers[name]["engine"]["digest"] for name in ("plain", "salted", "last")}
    assert len(digests) == 1
    assert sorted((submit.cache_salt, submit.priority) for submit in head.submissions) == [
        ("", 0),
        ("", 100),
        ("team 7", -3),
    ]


async def test_ids_are_in_the_record_where_they_are_asked_for(tmp_path: Path) -> None:
    head = FakeHead()
    chat = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True}
    lines = [
        line("plain", return_token_ids=False), line("ids", return_token_ids=True, n=2),
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
    ]  # fmt: skip
    outcome = await run(tmp_path, lines, head)
    assert outcome.code == 0 and not head.breaches
    plain, ids, talk = (outcome.answers[name]["response"]["body"] for name in ("plain", "ids", "chat"))
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain["choices"][0]
    assert [choice["prompt_token_ids"] for choice in ids["choices"]] == [
        memoryview(prompt_ids(PROMPT)).cast("i").tolist()
    ] * 2
    assert sum(len(choice["token_ids"]) for choice in ids["choices"]) == ids["usage"]["completion_tokens"]
    assert len(talk["prompt_token_ids"]) == talk["usage"]["prompt_tokens"]
    assert len(talk["choices"][0]["token_ids"]) == talk["usage"]["completion_tokens"]


async def test_a_salt_that_is_none_is_a_bad_line(tmp_path: Path) -> None:
    outcome = await run(tmp_path, [line("empty", cache_salt=""), line("far", priority=1000)], FakeHead())
    errors = {name: record["error"] for name, record in outcome.errors.items()}
    assert {error["code"] for error in errors.values()} == {"invalid_field"}
    assert errors["empty"]["message"].startswith("cache_salt:") and errors["far"]["message"].startswith("priority:")
