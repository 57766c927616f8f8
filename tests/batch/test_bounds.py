"""Memory and back-pressure: what is kept is bounded by options, not by the input."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.batch.fake_head import FakeHead, Fault
from tests.batch.process import batch_process, wait_until
from tests.batch.rig import run


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("most", [300, pytest.param(150, marks=pytest.mark.slow)])
async def test_memory_does_not_grow_with_an_endless_input(most: int, tmp_path: Path) -> None:
    """3 MiB of lines behind the first 5,000, each of which may leak `most` bytes."""
    first = 5000
    last = first + (3 << 20) // most
    head = FakeHead(slots=256)
    line = json.dumps({"prompt": "the sea " * 8, "max_tokens": 1, "ignore_eos": True}).encode() + b"\n"
    arguments = ("--inflight", "256", "--window", "256", "--progress", "none")
    async with (
        batch_process(tmp_path, head, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        trio.open_nursery() as nursery,
    ):
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        answers = 0

        async def feed() -> None:
            block = line * 500
            while True:
                await stdin.send_all(block)

        async def drain() -> None:
            nonlocal answers
            while True:
                data = await stdout.receive_some(1 << 20)
                answers += data.count(b"\n")

        nursery.start_soon(feed)
        nursery.start_soon(drain)
        await wait_until(lambda: answers >= first, f"{first} answers")
        before = rss_bytes(process.pid)
        await wait_until(lambda: answers >= last, f"{last} answers")
        grown = rss_bytes(process.pid) - before
        nursery.cancel_scope.cancel()
    head.submissions.clear()
    assert grown < 3 << 20, f"{grown} bytes in {last - first} lines"


async def test_a_stuck_engine_stops_the_producer(tmp_path: Path) -> None:
    head = FakeHead()
    head.paused = True
    line = json.dumps({"prompt": "x" * 1000, "max_tokens": 1}).encode() + b"\n"
    sent = 0
    arguments = ("--inflight", "8", "--window", "64", "-o", str(tmp_path / "out.jsonl"))
    async with batch_process(tmp_path, head, *arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        await wait_until(lambda: head.connections == 1, "a connection")
        with trio.move_on_after(2.0):
            while True:
                await process.stdin.send_all(line)
                sent += 1
        assert len(head.submissions) == 8
        # 8 at the head, 16 read ahead, a read block of 256 KiB, and what the pipe holds.
        assert sent < 8 + 16 + 64 + (256 + 128) * 1024 // len(line)


async def test_order_input_holds_no_more_than_the_window(tmp_path: Path) -> None:
    """The first request is slow; the others may finish before it only as far as the window goes."""
    head = FakeHead(step_s=0.001)
    head.faults["r0"] = [Fault("hang", 1)]
    lines: list[Any] = [{"custom_id": f"r{place}", "prompt": f"p {place}", "max_tokens": 2} for place in range(50)]
    lines[20:24] = [b"bad"] * 4
    outcome = await run(tmp_path, lines, head, order="input", window=10, stall=0.4, inflight=100)
    assert outcome.code == 1
    numbers = [record["engine"]["line"] for record in outcome.records]
    assert numbers == [number for number in range(1, 51) if not 21 <= number <= 24]
    again = next(place for place, submit in enumerate(head.submissions) if submit.attempt == 2)
    assert again == 11, "ten lines beyond the first, then nothing until it ended"


async def test_a_window_of_zero_is_one_at_a_time(tmp_path: Path) -> None:
    head = FakeHead()
    lines = [{"prompt": f"p {place}", "max_tokens": 2} for place in range(10)]
    outcome = await run(tmp_path, lines, head, order="input", window=0)
    assert outcome.code == 0
    assert head.most_unfinished == 1
