"""The operators' commands against real heads: with ranks that compute by a rule, and with the bundled model."""

from __future__ import annotations

import json
import os
import pwd
import time

import pytest
import trio

from tests.actors.fake_rank import STUCK_SEED
from tests.actors.head_process import HeadProcess, head_process, talking_client, wait_for
from tests.cli.test_commands import engine
from transport.messages import RequestFailed, RequestFinished

ME = pwd.getpwuid(os.getuid()).pw_name


async def call(head: HeadProcess, *words: str, code: int = 0) -> str:
    """Runs a command beside this loop, in which the clients live; what it printed."""
    done = await trio.to_thread.run_sync(lambda: engine(*words, ENGINE_DIR=head.directory.path))
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


async def test_a_stuck_request_is_found_and_cancelled(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(7, [5, 6, 7], seed=STUCK_SEED)
            client.submit(8, [5, 6, 7])
            await client.end_of(8)
            data = json.loads(await call(head, "requests", "--json"))
            [row] = data["requests"]
            assert (data["total"], row["client"], row["label"], row["prompt_tokens"]) == (1, "talking", "r7", 3)
            assert row["state"] in ("queued", "prefill") and (row["prefill_rank"], row["decode_rank"]) == (0, 1)
            assert json.loads(await call(head, "requests", "--slow", "1h", "--json"))["total"] == 0
            number = str(row["request"])
            assert "cancelled 1 request" in await call(head, "cancel", number, "--yes", "--reason", "stuck since noon")
            failed = await client.end_of(7)
            assert isinstance(failed, RequestFailed) and failed.code == "cancelled"
            await wait_for(lambda: True if head.named("request.cancel") else None, 5)
            assert "no such request" in await call(head, "cancel", number, "--yes", code=5)
        events = [json.loads(line) for line in (await call(head, "events", "--json")).splitlines()]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        first, second = (event["text"] for event in events if event["name"] == "admin.cancel")
        assert f"user={ME} uid={os.getuid()}" in first and 'reason="stuck since noon"' in first
        assert "outcome=done" in first and "outcome=refused" in second
        assert any(event["name"] == "rank.ready" for event in events)
        assert not any(event["level"] == "debug" for event in events)


async def test_a_drained_rank_gets_nothing_and_the_last_one_stays(tmp_path):
    with head_process(tmp_path, decode=2) as head:
        await head.wait_ready()
        assert "rank 1 takes no new requests" in await call(head, "drain", "d1", "--yes", "--reason", "fans")
        async with talking_client(head) as client:
            for request in range(6):
                client.submit(request, [request, 1])
                assert isinstance(await client.end_of(request), RequestFinished)
            assert {start.decode_rank for start in client.starts.values()} == {2}
        shown = await call(head, "status")
        assert f"rank 1 takes no new requests: drained by {ME} (fans)" in shown and "draining drained" in shown
        ranks = json.loads(await call(head, "ranks", "--json", "--filter", "drained"))["ranks"]
        assert [(rank["rank"], rank["state"], rank["phase"]) for rank in ranks] == [(1, "draining", "drained")]
        assert "fans" in ranks[0]["reason"]
        assert "rank 2 is the last decode rank" in await call(head, "drain", "2", "--yes", code=5)
        assert "takes new requests again" in await call(head, "undrain", "decode", "--yes")
        assert (await head.wait_ready()).degraded == ()
        names = [event["event"] for event in head.events() if event["event"].startswith("admin.")]
        assert names == ["admin.drain", "admin.drain", "admin.undrain"]
        assert [one["outcome"] for one in head.named("admin.drain")] == ["done", "refused"]


async def test_whoever_stops_the_engine_is_in_its_log(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        await call(head, "down")
        assert await head.wait_end() == 0
        [event] = head.named("admin.shutdown")
        assert (event["user"], event["uid"], event["outcome"]) == (ME, os.getuid(), "done")


def ranks_with_heat(directory: str) -> list[dict]:
    """Once the loads of the last steps have come to the head."""
    deadline = time.monotonic() + 10
    while True:
        ranks: list[dict] = json.loads(engine("ranks", "--json", "--dir", directory).stdout)["ranks"]
        if any(rank["heat"] for rank in ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.1)


def test_the_commands_with_the_bundled_model(tmp_path):
    directory = str(tmp_path / "run")
    small = ("max_model_tokens=512", "num_pages=96", "experts.main.loads=100ms")
    sets = [word for one in (*small, "pools.decode.ranks=2", "pools.decode.group=2") for word in ("--set", one)]
    up = engine("up", "--detach", "--wait", "ready", "--timeout", "50s", "--dir", directory, *sets)
    try:
        assert up.returncode == 0, up.stderr
        lines = [
            {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
             "body": {"model": "nano", "prompt": f"Once upon a time {n}", "max_tokens": 24}}
            for n in range(4)
        ]  # fmt: skip
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        batch = engine("batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--connect",
                       ENGINE_DIR=directory)  # fmt: skip
        assert batch.returncode == 0, batch.stderr
        data = ranks_with_heat(directory)
        hot = [rank for rank in data if rank["group"] == "decode/0"]
        assert [rank["rank"] for rank in hot] == [1, 2] and data[0]["heat"] is None
        assert sum(rank["heat"]["skew"] for rank in hot) == pytest.approx(2, rel=1e-3), "loads over their mean"
        assert all(rank["heat"]["expert"] >= 0 and rank["heat"]["load"] >= rank["heat"]["skew"] for rank in hot)
        events = engine("events", "--dir", directory).stdout
        assert events.count(" request.finish ") == 4 and " group.joined " in events
        assert engine("requests", "--dir", directory).stderr == "no request is there\n"
    finally:
        down = engine("down", "--dir", directory)
    assert down.returncode == 0, down.stderr
