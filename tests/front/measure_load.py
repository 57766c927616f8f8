"""Measures HTTP under load: `python -m tests.front.measure_load --output FILE`; `--quick` is the same in small.

Streams, hang-ups and overload go against `engine up --http --device sim`: real fronts and a real head, behind them
ranks whose steps only wait. So figures are those of what stands before the ranks; the head's process computes the
pretended ranks as well, and its share is that of both. What HTTP costs a rank is measured on real ranks of the bundled
model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from engine.bench.processor import read_thread_times
from engine.bench.record import describe_machine, find_commit, percentile
from tests.front.load_client import Outcome, arrive, ask, completion
from tests.front.measure_ranks import measure_admission, measure_ranks

ROOT = Path(__file__).parents[2]
STEP_S = 0.05
QUEUE_WAIT_S = 0.2
"""Of overload: less than two ends of requests, more than one."""
PREDICTIONS = {
    "largest_gap_s": "below 0.5: a step is 0.05 s, and nothing in fronts or head waits for anything",
    "frames_per_s": "512 streams x 20 steps/s = 10,240, if the cores suffice; else fewer and longer chunks",
    "hang_up": "all pages and slabs are free again, no request is left in the head",
    "overload": "with limits.queue_wait_s nobody is before a request in the head: it waits for one end, some 0.15 s",
    "refusals": "p99 below 50 ms: refused in the turn of the loop in which they come",
    "rank_loop": "the same through fronts and through one client, within 10 %: ranks talk to the head only",
    "admission": "grows with pages (16 to 2,048), never with ids; below 1 ms for 128 K",
}

SCENARIO = """
[cluster]
prefill = 1
decode = 1
page_tokens = 64
num_pages = {pages}
num_slabs = {slabs}
vocab_size = 8192
max_model_tokens = 8192
is_thorough = false
page_bytes = 1000
start_s = 0.5
[limits]
decode_rows = {rows}
rank_waiting = {rank_waiting}
queue_requests = {queue}
queue_wait_s = {queue_wait_s}
prefill_chunk_tokens = 1024
prefill_prompts = 16
heartbeat_s = 30
step_s = 60
grant_s = 120
transfer_s = 60
abort_s = 30
link_stall_s = 30
[prefill_costs]
base_s = {prefill_s}
token_s = 0
[decode_costs]
base_s = {step_s}
token_s = 0
[load]
requests = 1
arrive_s = 1e9
"""


class Rack:
    """A running engine: its port, its processes."""

    def __init__(self, place: str, arguments: list[str]) -> None:
        self.directory = f"{place}/run"
        self._log = Path(place) / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine", "up", "--http", "127.0.0.1:0", "--dir", self.directory, *arguments],
                stderr=log, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._wait(r"head\.ready")
        self.port = int(self._wait(r"http\.listen url=http://[\d.]+:(\d+)"))
        started = len(re.findall(r"front\.start", self._log.read_text()))
        self._wait(r"front\.linked", started)  # a front without a link answers 503
        self.head = int(self.say("status")["head_pid"])
        self.fronts = [int(pid) for pid in re.findall(r"front\.start front=\d+ pid=(\d+)", self._log.read_text())]

    def _wait(self, pattern: str, count: int = 1) -> str:
        deadline = time.monotonic() + 120
        while len(found := re.findall(pattern, self._log.read_text())) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(self._log.read_text()[-4000:])
            time.sleep(0.05)
        return str(found[-1])

    def say(self, *words: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "engine", *words, "--json", "--dir", self.directory],
            capture_output=True, cwd=ROOT, check=True, timeout=60,
        )  # fmt: skip
        return json.loads(done.stdout)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def cpu_s(self) -> dict[str, float]:
        """Seconds on a core so far."""
        pids = {"head_and_ranks": [self.head], "fronts": self.fronts}
        return {who: sum(sum(t[0] for t in read_thread_times(p).thread_to_ns.values()) for p in some) / 1e9
                for who, some in pids.items()} | {"client": time.process_time()}  # fmt: skip

    def end(self) -> int:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(60)
        self.process.kill()
        return self.process.wait()


@contextlib.contextmanager
def running(arguments: list[str]) -> Iterator[Rack]:
    with tempfile.TemporaryDirectory(prefix="load-") as place:
        rack = Rack(place, arguments)
        try:
            yield rack
        finally:
            if rack.process.poll() is None:
                rack.end()


@contextlib.contextmanager
def simulated(fronts: int, **shape: object) -> Iterator[Rack]:
    with tempfile.TemporaryDirectory(prefix="rack-") as place:
        path = Path(place) / "rack.toml"
        path.write_text(SCENARIO.format(**{"step_s": STEP_S, "queue_wait_s": 0, **shape}))
        arguments = ["--device", "sim", "--scenario", str(path), "--set", f"http.fronts={fronts}"]
        with running(arguments) as rack:
            yield rack


async def measure_streams(streams: int, seconds: float) -> dict[str, Any]:
    """All streams at once, at 20 tokens/s each."""
    tokens = int(20 * seconds)
    pages = streams * (-(-(16 + tokens) // 64) + 1)
    shape = {"pages": pages, "slabs": streams, "rows": streams, "rank_waiting": 1024, "queue": 4096, "prefill_s": 0.02}
    rng = random.Random(1)
    with simulated(2, **shape) as rack:
        tasks = []
        for _ in range(streams):
            tasks.append(asyncio.create_task(ask(rack.port, completion(16, tokens, rng))))
            await asyncio.sleep(2 / streams)
        await asyncio.sleep(3)
        frames = await asyncio.to_thread(rack.metric, "engine:http_frames_total")
        before, at = rack.cpu_s(), time.monotonic()
        await asyncio.sleep(max(1.0, seconds - 8))
        frames = await asyncio.to_thread(rack.metric, "engine:http_frames_total") - frames
        after, took = rack.cpu_s(), time.monotonic() - at
        outcomes = await asyncio.gather(*tasks)
    gaps = [max(outcome.gaps_s, default=0.0) for outcome in outcomes]
    return {
        "streams": streams, "ends": count_ends(outcomes), "statuses": sorted({one.status for one in outcomes}),
        "last_words": [one.last_words for one in outcomes if one.end != "whole"][:4],
        "largest_gap_s": round(max(gaps), 3), "largest_gap_s_p50": round(percentile(gaps, 0.5), 3),
        "gap_ms_p50": round(1e3 * percentile([gap for one in outcomes for gap in one.gaps_s], 0.5), 1),
        "gap_ms_p99": round(1e3 * percentile([gap for one in outcomes for gap in one.gaps_s], 0.99), 1),
        "frames_per_s": round(frames / took, 1),
        "core_share": {who: round((after[who] - before[who]) / took, 3) for who in after},
    }  # fmt: skip


async def measure_hang_ups(streams: int, within_s: float) -> dict[str, Any]:
    """Half of the streams leave at random moments; prompts take so long that some leave in the queue and during it."""
    shape = {"pages": streams * 6, "slabs": streams // 2, "rows": streams // 2, "rank_waiting": streams, "queue": 4096}
    rng = random.Random(2)
    with simulated(2, **shape, prefill_s=0.05) as rack:
        asks = [
            ask(rack.port, completion(200, int(10 * within_s), rng),
                leave_after_s=rng.random() * within_s if number % 2 else None)
            for number in range(streams)
        ]  # fmt: skip
        outcomes = await asyncio.gather(*asks)
        deadline = time.monotonic() + 30
        while True:
            status = await asyncio.to_thread(rack.say, "status")
            ranks = [rank["snapshot"] for rank in status["ranks"]]
            # The prefix cache's pages are there for prompts as free ones are.
            lacking = sum(one["pages_total"] - one["pages_free"] - one.get("pages_cached", 0) for one in ranks)
            slabs = [one["slabs_free"] + one.get("slabs_cached", 0) for one in ranks]
            left = status["waiting"] + status["running"]
            if (not (lacking or left) and min(slabs) == streams // 2) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.3)
        gone = {stage: await asyncio.to_thread(_gone, rack, stage) for stage in ("queued", "decode", "flush")}
        code = await asyncio.to_thread(rack.end)  # the simulator's own checks end it with another code
    return {
        "streams": streams, "ends": count_ends(outcomes), "gone_at": gone,
        "pages_lacking": lacking, "slabs_free": min(slabs), "slabs": streams // 2, "left_in_head": left,
        "exit_code": code,
    }  # fmt: skip


def count_ends(outcomes: list[Outcome]) -> dict[str, int]:
    ends = [outcome.end for outcome in outcomes]
    return {end: ends.count(end) for end in sorted(set(ends))}


def _gone(rack: Rack, stage: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{rack.port}/metrics", timeout=30) as answer:
        found = re.findall(rf'engine:client_gone_total{{stage="{stage}"}} (\S+)', answer.read().decode())
    return int(float(found[0])) if found else 0


async def measure_overload(runs: int, seconds: float) -> dict[str, Any]:
    """Half of the capacity, and four times of it, in turns; the same engine."""
    rows, tokens = 16, 40
    capacity = rows / (0.5 + tokens * STEP_S)
    shape = {"pages": 400, "slabs": rows, "rows": rows, "rank_waiting": rows, "queue": 4096}
    rng = random.Random(3)
    calm: list[Outcome] = []
    loaded: list[Outcome] = []
    with simulated(1, **shape, prefill_s=0.35, queue_wait_s=QUEUE_WAIT_S) as rack:
        def make() -> bytes:
            return completion(64, tokens, rng, counted=True)

        for _ in range(runs):
            calm += await arrive(rack.port, capacity / 2, seconds, rng, make)
            loaded += await arrive(rack.port, 4 * capacity, seconds, rng, make)
    figures: dict[str, Any] = {"runs": runs, "seconds": seconds, "capacity_per_s": round(capacity, 2)}
    for name, some in (("calm", calm), ("loaded", loaded)):
        served = [outcome for outcome in some if outcome.end == "whole"]
        refused = [outcome for outcome in some if outcome.end == "refused"]
        ttft, gaps = [one.ttft_s for one in served], [gap for one in served for gap in one.gaps_s]
        answer = [one.ended_at - one.sent_at for one in refused]
        figures[name] = {
            "sent": len(some), "served": len(served), "refused": len(refused),
            "lost": len(some) - len(served) - len(refused),
            "ends": count_ends(some), "statuses": sorted({outcome.status for outcome in some}),
            **{f"ttft_ms_p{p}": round(1e3 * percentile(ttft, p / 100), 1) for p in (50, 90)},
            **{f"itl_ms_p{p}": round(1e3 * percentile(gaps, p / 100), 1) for p in (50, 90)},
            "refusal_ms_p50": round(1e3 * percentile(answer, 0.5), 2),
            "refusal_ms_p99": round(1e3 * percentile(answer, 0.99), 2),
        }  # fmt: skip
    for name in ("ttft_ms_p50", "ttft_ms_p90", "itl_ms_p50", "itl_ms_p90"):
        figures[f"ratio_{name}"] = round(figures["loaded"][name] / max(1e-9, figures["calm"][name]), 3)
    return figures


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    small = options.quick
    record: dict[str, Any] = {}
    parts = options.only.split(",") if options.only else ["streams", "hang_ups", "overload", "ranks", "admission"]
    for part in parts:
        print(f"{part} ...", file=sys.stderr)
        match part:
            case "streams":
                record[part] = await measure_streams(options.streams or (16 if small else 512), 10 if small else 60)
            case "hang_ups":
                record[part] = await measure_hang_ups(16 if small else 512, 2 if small else 12)
            case "overload":
                record[part] = await measure_overload(1 if small else options.runs, 5 if small else 60)
            case "ranks":
                with running(["--set", "num_pages=1200", "--set", "log.level=info"]) as rack:
                    record[part] = await measure_ranks(rack, 16 if small else 512, 1 if small else 3)
            case "admission":
                record[part] = measure_admission(50 if small else 2000)
    return record


def tell(record: dict[str, Any]) -> None:
    """A line for each figure, beside what was predicted."""
    for part, figures in record["figures"].items():
        for name, value in figures.items():
            print(f"{part:<10} {name:<20} {json.dumps(value)}")
    for name, words in PREDICTIONS.items():
        print(f"predicted  {name:<20} {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; for trying the script")
    parser.add_argument("--runs", type=int, default=5, help="of overload: each is a minute calm and a minute loaded")
    parser.add_argument("--streams", type=int, help="of the first measurement; else 512")
    parser.add_argument("--only", help="streams,hang_ups,overload,ranks,admission")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "schema": 1, "bench": "http-load", "machine": describe_machine(), "commit": find_commit(),
        "predictions": PREDICTIONS, "load_before": os.getloadavg(),
    }  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        record["figures"] = runner.run(measure(options))
    record["load_after"] = os.getloadavg()
    tell(record)
    if options.output:
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
