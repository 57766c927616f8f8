"""Measures groups of real ranks and writes what it took as JSON:
`PYTHONPATH=. python tests/e2e/groups_table.py --output docs/measurements/2026-11-29-groups-cpu.json`.

Every text of every run is that of an undisturbed run, or there is no record. `--parts` plays some parts only, and
leaves the others of a record as they are. `--quick` plays each the least that it can be, to see that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio

from engine.actors.client import Row
from engine.bench.record import describe_machine, find_commit, percentile, spread
from engine.faces.admin import open_operator
from tests.e2e.batch_process import processes_of
from tests.e2e.grouped import GroupedCluster, check_steps, measure_idle, measure_pairs, open_grouped
from tests.e2e.grouplosses import begin_move, check_loss, run_loss
from tests.e2e.requester import make_row
from tests.e2e.traffic import MAX_TOKENS, Traffic, make_code_prompts

MACHINE = "2-core x86-64 VM"
RESAMPLES = 2000
LOSSES = (
    ("DEP4, 16 spare slots, killed", 16, "kill", "load", True),
    ("DEP4, 16 spare slots, another one killed later", 16, "kill", "load", True),
    ("DEP4, no spare slots, killed", 0, "kill", "load", False),
    ("DEP4, 64 spare slots, killed in a move", 64, "kill", "move", False),
    ("DEP4, 16 spare slots, stopped", 16, "stop", "load", True),
)
"""The last column: each run has a cluster of its own, for the experts that others took over stay where they are."""
SHAPES = (("1 rank", 1, False), ("2 ranks", 2, False), ("DEP2", 2, True))


async def measure_skew(rng: random.Random, log: Path, quick: bool) -> list[dict[str, Any]]:
    """What a plan promises to traffic of one domain, and what comes of it."""
    rows = []
    for decode, width in ((2, 8), (4, 12)):
        ranks = range(1, decode + 1)
        async with open_grouped(log, decode=decode, sets=("num_pages=96",)) as cluster:
            prompts = make_code_prompts(rng, 6)
            await cluster.inner.learn(prompts, MAX_TOKENS)
            traffic = Traffic(cluster.inner, prompts, width)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(traffic.run)
                start = await cluster.ask_ranks(ranks)
                await cluster.wait_loads(40 if quick else 200)
                seen = measure_pairs(start, await cluster.ask_ranks(ranks))
                plan = (await cluster.act("plan")).report.plan
                await cluster.act("apply", plan=plan.plan)
                await cluster.wait_moved()
                moved = await cluster.ask_ranks(ranks)
                past = await cluster.wait_measured()
                after = measure_pairs(moved, await cluster.ask_ranks(ranks))
                traffic.stop()
            cluster.inner.check_texts(traffic.rows)
            await cluster.settle(ranks)
            steps = check_steps(cluster.lives())
        drop = plan.before.max_over_mean - plan.after.max_over_mean
        rows.append(
            {
                "group": f"DEP{decode}", "sequences": width, "before": round(plan.before.max_over_mean, 4),
                "predicted": round(plan.after.max_over_mean, 4), "after": round(past.after, 4),
                "realised": round(past.realised, 3), "computed_before": round(seen, 4),
                "computed_after": round(after, 4), "computed_realised": round((seen - after) / drop, 3),
                "saved_us_per_step": round(plan.saved_us_per_step, 1), "moved_slots": past.moved_slots,
                "moved_bytes": past.moved_bytes, "took_ms": past.took_ms, "stages": plan.stages,
                "steps_compared": steps, "requests": len(traffic.rows),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def measure_windows(rng: random.Random, log: Path, quick: bool) -> list[dict[str, Any]]:
    """Time between tokens while experts move and while they do not, in turn."""
    rows = []
    for step_bytes in ("64KiB", "64MiB"):
        sets = (f"experts.main.max_bytes_per_step={step_bytes}", "num_pages=96")
        async with open_grouped(log, decode=2, sets=sets) as cluster:
            prompts = make_code_prompts(rng, 6)
            await cluster.inner.learn(prompts, MAX_TOKENS)
            traffic = Traffic(cluster.inner, prompts, 8)
            moving: list[list[float]] = []
            quiet: list[list[float]] = []
            took: list[float] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(traffic.run)
                await cluster.wait_loads(60)
                for window in range(2 if quick else 10):
                    begun = time.monotonic_ns()
                    # First a plan, then back and forth.
                    await (begin_move(cluster) if not window else cluster.act("rollback"))
                    since = time.monotonic_ns()
                    assert (await cluster.wait_moved()).moved_slots
                    until = time.monotonic_ns()
                    took.append((until - since) / 1e9)
                    # The planner has a core for itself before: that is part of neither.
                    await trio.sleep(max(2.0, (until - since) / 1e9))
                    moving.append(traffic.gaps_ms(since, until))
                    quiet.append(traffic.gaps_ms(until, time.monotonic_ns()))
                    print(f"window {window}: planned {(since - begun) / 1e9:.2f} s", file=sys.stderr, flush=True)
                traffic.stop()
            cluster.inner.check_texts(traffic.rows)
            await cluster.settle([1, 2])
            check_steps(cluster.lives())
        rows.append({"step_bytes": step_bytes, "move_s": spread(took), **compare_windows(moving, quiet)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def compare_windows(moving: Sequence[Sequence[float]], quiet: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Percentiles of pooled windows, and their ratio with a 95 % interval over windows drawn again."""
    chance = np.random.default_rng(0)

    def pool(windows: Sequence[Sequence[float]], picked: Sequence[int]) -> list[float]:
        return list(itertools.chain.from_iterable(windows[index] for index in picked))

    count = len(moving)
    figures: dict[str, Any] = {
        "windows": count, "gaps_moving": sum(map(len, moving)), "gaps_quiet": sum(map(len, quiet)),
    }  # fmt: skip
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        sides = [percentile(pool(windows, range(count)), share) for windows in (moving, quiet)]
        ratios = []
        for _ in range(RESAMPLES):
            picked = chance.integers(0, count, count).tolist()
            base = percentile(pool(quiet, picked), share)
            if base > 0:
                ratios.append(percentile(pool(moving, picked), share) / base)
        figures[f"{name}_moving_ms"], figures[f"{name}_quiet_ms"] = (round(side, 2) for side in sides)
        figures[f"{name}_ratio"] = round(sides[0] / sides[1], 3)
        figures[f"{name}_ratio_95"] = [round(percentile(ratios, 0.025), 3), round(percentile(ratios, 0.975), 3)]
    return figures


async def measure_losses(rng: random.Random, log: Path, quick: bool) -> list[dict[str, Any]]:
    """Ranks of a group of four that are killed and stopped under load."""
    rows: list[dict[str, Any]] = []
    runs = 1 if quick else 3
    for name, spare, action, moment, is_fresh in LOSSES:
        sets = (
            f"experts.main.spare_slots={spare}", f"experts.draft.spare_slots={spare}", "num_pages=96",
            "experts.main.max_bytes_per_step=16KiB",
        )  # fmt: skip
        for _ in range(runs if is_fresh else 1):
            async with open_grouped(log, decode=4, sets=sets) as cluster:
                prompts = make_code_prompts(rng, 4)
                await cluster.inner.learn(prompts, MAX_TOKENS)
                ranks = range(1, 5)
                spared: list[int] = []
                if name.endswith("later"):
                    spared.append((await run_loss(cluster, ranks, prompts, rng, width=8)).rank)
                for _ in range(1 if is_fresh else runs):
                    loss = await run_loss(
                        cluster, ranks, prompts, rng, width=8, action=action, moment=moment, spared=spared
                    )  # type: ignore[arg-type]
                    check_loss(loss)
                    rows.append({"what": name, **dataclasses.asdict(loss)})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                await cluster.settle(ranks)
                check_steps(cluster.lives())
    return rows


async def measure_parking(rng: random.Random, log: Path, quick: bool) -> dict[str, Any]:
    """A parked group's processor time, what waking costs, and how long a drain takes."""
    sets = ("num_pages=96", "limits.idle_steps=64")
    prompts = make_code_prompts(rng, 4)
    async with open_grouped(log, prefill=2, decode=2, groups=(), sets=sets, probe="none") as cluster:
        await cluster.inner.learn(prompts, 16)
        await cluster.inner.wait_free({})
        alone_s = await measure_idle(cluster)
    async with open_grouped(log, prefill=2, decode=2, groups=("prefill", "decode"), sets=sets, probe="none") as cluster:
        await cluster.inner.learn(prompts, 16)
        await cluster.settle(range(4))
        idle_s = await measure_idle(cluster)
        times: dict[str, list[tuple[float, float]]] = {"parked": [], "awake": []}
        for _ in range(3 if quick else 20):
            await cluster.settle(range(4))
            for state in ("parked", "awake"):  # the second follows at once: nobody has parked since
                row = await cluster.book.submit(make_row(rng.choice(prompts), 16))
                sent = time.monotonic_ns()
                await cluster.inner.finish([row])
                news = cluster.book.news[row]
                times[state].append(((news[0] - sent) / 1e6, (news[1] - sent) / 1e6))
        rows = [await cluster.book.submit(make_row(prompt, 16)) for prompt in prompts]
        await cluster.inner.finish(rows)
        cluster.inner.check_texts(rows)
        await cluster.settle(range(4))
        began = time.monotonic()
        async with open_operator(str(cluster.directory / "admin.sock")) as head:
            await head.ask_shutdown(60_000, "measured")
        while processes_of(cluster.inner.mark):  # noqa: ASYNC110
            await trio.sleep(0.01)
        parked_down_s = round(time.monotonic() - began, 3)
    result = {
        "ranks": "prefill DEP2, decode DEP2", "idle_cpu_s_of_2_s": idle_s, "idle_cpu_s_without_groups": alone_s,
        "drain_parked_s": parked_down_s,
        **{f"{state}_first_ms": spread([one for one, _ in times[state]]) for state in times},
        **{f"{state}_second_ms": spread([two for _, two in times[state]]) for state in times},
        "added_first_ms": added(times, 0), "added_second_ms": added(times, 1), "pairs": len(times["awake"]),
    }  # fmt: skip
    drains = []
    for _ in range(1 if quick else 3):
        drains.append(await measure_drain(rng, log))
    result["drain_loaded"] = drains
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def added(times: dict[str, list[tuple[float, float]]], index: int) -> float:
    """Median over pairs of what a parked group took longer."""
    pairs = zip(times["parked"], times["awake"], strict=True)
    return round(statistics.median(parked[index] - awake[index] for parked, awake in pairs), 2)


async def measure_drain(rng: random.Random, log: Path) -> dict[str, float]:
    """From `engine down` with requests under way until their last token, and until no process is left."""
    async with open_grouped(log, prefill=2, decode=4, groups=("prefill", "decode"), sets=("num_pages=96",)) as cluster:
        prompts = make_code_prompts(rng, 4)
        await cluster.inner.learn(prompts, 48)
        rows = [await cluster.book.submit(make_row(prompt, 48)) for prompt in prompts * 2]
        await cluster.inner.wait_until(lambda: all(row.generated for row in rows), "all run", 60)
        began = time.monotonic()
        async with open_operator(str(cluster.directory / "admin.sock")) as head:
            await head.ask_shutdown(60_000, "measured")
        while not cluster.book.done.issuperset(rows):  # noqa: ASYNC110
            await trio.sleep(0.005)
        answered = time.monotonic()
        while processes_of(cluster.inner.mark):  # noqa: ASYNC110
            await trio.sleep(0.01)
        ended = time.monotonic()
        cluster.inner.check_texts(rows)
    return {"answered_s": round(answered - began, 3), "ended_s": round(ended - answered, 3)}


async def measure_throughput(rng: random.Random, log: Path, quick: bool) -> list[dict[str, Any]]:
    """Tokens per second of three clusters that are up at once and work in turn."""
    # Short prompts, so that all rows decode together for most of the time.
    prompts = make_code_prompts(rng, 32, 24)
    rates: dict[tuple[str, int], list[float]] = {}
    sets = ("num_pages=192", "num_slabs=64")
    async with (
        open_grouped(log, decode=SHAPES[0][1], groups=(), sets=sets) as one,
        open_grouped(log, decode=SHAPES[1][1], groups=(), sets=sets) as two,
        open_grouped(log, decode=SHAPES[2][1], sets=sets) as group,
    ):
        texts: list[list[list[int]]] = []
        for _ in range(1 if quick else 3):
            for sequences in (8, 32):
                for (name, _, _), cluster in zip(SHAPES, (one, two, group), strict=True):
                    rows = [make_row(prompt, 96) for prompt in prompts[:sequences]]
                    rates.setdefault((name, sequences), []).append(await count_rate(cluster, rows))
                    texts.append([list(row.generated) for row in rows])
                assert texts[-1] == texts[-2] == texts[-3], "other tokens from another shape"
    rows = []
    for sequences in (8, 32):
        line: dict[str, Any] = {"sequences": sequences}
        for name, _, _ in SHAPES:
            line[name] = spread(rates[name, sequences])
        for name in ("1 rank", "2 ranks"):
            pairs = zip(rates["DEP2", sequences], rates[name, sequences], strict=True)
            line[f"DEP2 / {name}"] = spread([ours / theirs for ours, theirs in pairs])
        rows.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)
    return rows


async def count_rate(cluster: GroupedCluster, rows: list[Row]) -> float:
    """Tokens per second while all rows decode: from the moment when each has one to the first end of one."""
    for row in rows:
        await cluster.book.submit(row)
    await cluster.inner.finish(rows, 240)
    news = [cluster.book.news[row] for row in rows]
    since, until = max(times[0] for times in news), min(times[-1] for times in news)
    assert until > since, "the first had ended before the last began"
    return 1e9 * sum(since < at <= until for times in news for at in times) / (until - since)


PARTS = {
    "skew": measure_skew,
    "windows": measure_windows,
    "losses": measure_losses,
    "parking": measure_parking,
    "throughput": measure_throughput,
}


def summarise_losses(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median, least and most of each time over the runs of a case."""
    summary = []
    for name in dict.fromkeys(row["what"] for row in rows):
        runs = [row for row in rows if row["what"] == name]
        line: dict[str, Any] = {"what": name, "runs": len(runs), "lost": [row["lost"] for row in runs]}
        for figure in ("down_s", "named_s", "flow_s", "silence_s", "whole_s"):
            line[figure] = spread([row[figure] for row in runs])
        summary.append(line)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    record: dict[str, Any] = {"schema": 1, "bench": "groups", "parts": {}}
    if given.output and Path(given.output).exists():
        record = json.loads(Path(given.output).read_text())
    with tempfile.TemporaryDirectory() as place:
        for name in given.parts.split(","):
            record["parts"][name] = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": {"name": MACHINE, **describe_machine()},
                "commit": find_commit(),
                "command": shlex.join(["python", "tests/e2e/groups_table.py", *sys.argv[1:]]),
            }
            measured = trio.run(PARTS[name], random.Random(given.seed), Path(place) / f"{name}.log", given.quick)
            record["parts"][name]["load_1min_after"] = round(os.getloadavg()[0], 2)
            record[name] = measured
            if name == "losses":
                record["losses_summary"] = summarise_losses(measured)
            if given.output:  # each time, so that a part that fails costs only itself
                Path(given.output).write_text(json.dumps(record, indent=1) + "\n")
    if not given.output:
        print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
