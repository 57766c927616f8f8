"""Kills and stops real ranks in every state of a hand-off, and writes what it took as JSON:
`PYTHONPATH=. python tests/e2e/handoff_chaos_table.py --output docs/measurements/2026-11-29-handoff-chaos.json`.

All assertions of tests/e2e/test_handoff_chaos.py hold in every run, or there is no record. All deadlines are the
defaults, but for the late writes (tests/e2e/latewrites.py has theirs). `--markdown FILE` prints the tables of
docs/chaos.md from a record. `--parts` plays some parts only, and leaves the others of a record as they are.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import trio

from engine.bench.record import describe_machine, find_commit
from tests.e2e.faults import (
    CHECKING,
    CHECKING_SETS,
    DOUBLES,
    KILLS,
    MAX_TOKENS,
    STOPS,
    Fault,
    check_times,
    make_prompts,
    run_fault,
)
from tests.e2e.faulty import open_cluster
from tests.e2e.latewrites import CONDEMNED_SETS, LATE_SETS, LateWrite, run_cancelled_write, run_condemned_write

TIMES = ("noticed_s", "failed_s", "again_s", "down_s", "ready_s")
FEW_STOPS = [fault for fault in STOPS if fault.point.name in ("prefill working (CHUNK)", "decode granted (PUSHED)")]
ALONE = [fault for fault in KILLS if fault.point.name in ("prefill working (PUSHED)", "decode running")]


@dataclasses.dataclass(frozen=True)
class Part:
    """Faults that are played on one cluster, each so often."""

    name: str
    faults: Sequence[Fault]
    runs: int
    ucx_tls: str = ""
    ranks: int = 2
    """Of each pool."""
    sets: tuple[str, ...] = ()


PARTS = (
    Part("kill", KILLS, 3),
    Part("kill-both", DOUBLES, 3),
    Part("kill-checking", CHECKING, 3, sets=CHECKING_SETS),
    Part("kill-tcp", [*KILLS, *DOUBLES], 1, ucx_tls="tcp"),
    Part("kill-alone", ALONE, 3, ranks=1),
    Part("stop", STOPS, 1),
    Part("stop-tcp", FEW_STOPS, 1, ucx_tls="tcp"),
)


async def play(part: Part, rng: random.Random, directory: Path) -> list[dict[str, Any]]:
    """All outcomes of a part, one row for each run."""
    rows: list[dict[str, Any]] = []
    log = directory / f"{part.name}.log"
    async with open_cluster(
        log, prefill=part.ranks, decode=part.ranks, ucx_tls=part.ucx_tls, sets=part.sets
    ) as cluster:
        prompts = make_prompts(rng)
        await cluster.learn(prompts, MAX_TOKENS)
        for run in range(part.runs):
            for fault in part.faults:
                outcome = await run_fault(cluster, fault, prompts, rng)
                check_times(outcome)
                rows.append({"part": part.name, "run": run, **dataclasses.asdict(outcome)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def play_late(rng: random.Random, directory: Path) -> list[dict[str, Any]]:
    """The writes that land after their request's end."""
    rows: list[dict[str, Any]] = []

    def note(name: str, transport: str, late: LateWrite) -> None:
        rows.append({"part": name, "transport": transport, **dataclasses.asdict(late)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    log = directory / "late.log"
    for transport in ("", "tcp"):
        async with open_cluster(log, decode=1, ucx_tls=transport, sets=LATE_SETS) as cluster:
            note("cancelled-write", transport or "default", await run_cancelled_write(cluster, rng))
    async with open_cluster(log, decode=1, sets=CONDEMNED_SETS) as cluster:
        note("condemned-write", "default", await run_condemned_write(cluster, rng))
    return rows


def summarise(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each fault: median and worst of each time over its runs."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        groups[(row["part"], row["point"], row["victim"], row["action"])].append(row)
    summary = []
    for (part, point, victim, action), members in groups.items():
        line: dict[str, Any] = {
            "part": part, "point": point, "victim": victim, "action": action, "runs": len(members)
        }  # fmt: skip
        for name in TIMES:
            values = [member[name] for member in members if member[name] is not None]
            if values:
                line[name] = {"median": round(statistics.median(values), 3), "worst": max(values), "of": len(values)}
        summary.append(line)
    return summary


def render_markdown(record: dict[str, Any]) -> str:
    """The tables of docs/chaos.md."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in record["summary"]):
        lines += ["", f"**{part}**", "", "| state | victim | noticed | running again | death confirmed | next life |"]
        lines += ["|---|---|---|---|---|---|"]
        for row in record["summary"]:
            if row["part"] == part:
                times = [_both(row.get(name)) for name in ("noticed_s", "again_s", "down_s", "ready_s")]
                lines.append(f"| {row['point']} | {row['victim']} | " + " | ".join(times) + " |")
    return "\n".join(lines) + "\n"


def _both(times: dict[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['median']:.2f} / {times['worst']:.2f}" if times["of"] > 1 else f"{times['worst']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--parts", default=",".join([*(part.name for part in PARTS), "late"]))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", help="a record to print as tables; nothing is played")
    given = parser.parse_args()
    if given.markdown:
        print(render_markdown(json.loads(Path(given.markdown).read_text())), end="")
        return
    record = read_record(given.output)
    with tempfile.TemporaryDirectory() as place:
        for name in given.parts.split(","):
            conditions = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": describe_machine(),
                "commit": find_commit(),
                "command": shlex.join(["python", "tests/e2e/handoff_chaos_table.py", *sys.argv[1:]]),
            }
            rng = random.Random(given.seed)
            if name == "late":
                record["late_writes"] = trio.run(play_late, rng, Path(place))
            else:
                part = next(part for part in PARTS if part.name == name)
                runs = trio.run(play, part, rng, Path(place))
                record["runs"] = [row for row in record["runs"] if row["part"] != name] + runs
                record["summary"] = summarise(record["runs"])
            record["parts"][name] = conditions
            save(record, given.output)  # each time, so that a part that fails costs only itself


def read_record(output: str | None) -> dict[str, Any]:
    """What is there already; its parts stay, unless they are played again."""
    if output is not None and Path(output).exists():
        record: dict[str, Any] = json.loads(Path(output).read_text())
        return record
    return {"schema": 1, "bench": "handoff-chaos", "parts": {}, "summary": [], "late_writes": [], "runs": []}


def save(record: dict[str, Any], output: str | None) -> None:
    """Writes the file, or says the record on stdout."""
    text = render(record)
    if output is None:
        print(text, end="")
    else:
        Path(output).write_text(text)


def render(record: dict[str, Any]) -> str:
    """JSON for people, with one row on one line."""
    lists = ("summary", "late_writes", "runs")
    head = json.dumps({name: value for name, value in record.items() if name not in lists}, indent=1)
    bodies = [f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in record[name]) + "\n ]" for name in lists]
    return head.removesuffix("\n}") + ",\n" + ",\n".join(bodies) + "\n}\n"


if __name__ == "__main__":
    main()
