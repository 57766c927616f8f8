"""Step: the device time of decode and verify steps of a model at full size, with dummy weights and made-up contexts.

Runs on a CUDA device, alone (`python -m engine.bench.step`, which needs no event loop and no configuration) or as
`engine bench forward --device cuda`. A step is the target's forward, captured as one graph; sampling beyond the
likeliest token, drafting, the exchange between ranks and all work of the host are left out. What is said beside each
time makes it comparable: experts touched, bytes touched, kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.bench.cases import DeviceCase, gather_cases
from engine.bench.check import Finding, check_ops, describe_findings
from engine.bench.profile import profile_step
from engine.bench.record import SCHEMA, describe_machine, find_commit, write_record
from engine.bench.rig import FORMATS, StepBench, StepOptions
from engine.bench.routing import ROUTINGS
from engine.errors import ConfigError
from engine.model.graph import StepGraph
from engine.model.step_drafts import Drafted
from engine.model.step_forward import StepOutputs
from engine.version import VERSION

Served = Callable[[DeviceCase, float], dict[str, Any] | None]
COPY_BYTES_PER_S = 4.3e12
"""Read and write of a large copy on an H200. Steps are compared with what their bytes take at that rate; products of
many rows may take longer, which is not in it."""


def measure_case(bench: StepBench, case: DeviceCase) -> dict[str, Any]:
    """Captures and times one case; the entry of a record."""
    options = bench.options
    step = bench.open(case)
    drafting = bench.drafting if case.drafts else None
    whole = step if drafting is None else drafting.wrap(case, step)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    graph = StepGraph[StepOutputs | Drafted](whole)
    torch.cuda.synchronize()
    capture_s = time.perf_counter() - began
    outputs = graph.replay()
    logits, touched = outputs.logits.clone(), bench.touched(step, outputs)
    samples = [time_replays(graph, options.iters) for _ in range(options.samples)]
    eager = whole.run().logits
    median_us = statistics.median(samples)
    moved = bench.count_bytes(case, touched)
    rounds: list[int] = []
    if drafting is not None and isinstance(outputs, Drafted):
        rounds = drafting.touched(outputs, case)
        moved = drafting.add_bytes(moved, rounds)
    bound_us = moved["total"] / COPY_BYTES_PER_S * 1e6
    run: dict[str, Any] = {
        "case": case.name,
        "requests": case.requests,
        "rows": case.rows,
        "length": case.length,
        "median_us": median_us,
        "spread_pct": (max(samples) - min(samples)) / median_us * 100,
        "samples_us": samples,
        "bound_us": bound_us,
        "share_of_bound": bound_us / median_us,
        "bytes": moved,
        "experts_touched": {"mean": statistics.fmean(touched), "per_layer": touched},
        "drafts": {"asked": case.drafts, "rounds": len(rounds), "experts_touched": rounds},
        "graph_equals_eager": bool(torch.equal(logits, eager)),
        "graph_vs_eager": float((logits - eager).norm() / eager.norm()),
        "finite": bool(logits.isfinite().all()),
        "distinct_tokens": len(outputs.greedy.unique()),
        "capture_s": capture_s,
        "memory_bytes": {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "arena": bench.records.num_bytes,
            "slots": bench.weights.slots.slot_bytes * len(bench.weights.slots.up),
        },
    }
    try:
        run["nodes"] = dataclasses.asdict(graph.count_nodes())
        if options.profile and (not options.profiled or case.name in options.profiled):
            run["profile"] = dataclasses.asdict(profile_step(whole.run, graph.replay))
    except Exception as error:
        # What the time is made of; without it, the time still counts.
        traceback.print_exc()
        run["profile_error"] = "".join(traceback.format_exception_only(error)).strip()[:400]
    return run


def time_replays(graph: StepGraph, iters: int) -> float:
    """Microseconds of a step, over so many one after another."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(iters):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / iters


def measure_steps(options: StepOptions, arguments: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """All cases; one that fails leaves its error and the others' figures.

    Args:
        arguments: of the command line, for the record.
        tell: gets lines of progress.

    Returns:
        A record, see `record.py`.

    Raises:
        ConfigError: there is no CUDA device, or the model can not be had.
    """
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device; without one, engine bench forward measures the CPU")
    began = time.perf_counter()
    bench = StepBench(options, torch.device("cuda"))
    torch.cuda.synchronize()
    tell(
        f"{options.model}: {len(bench.weights.slots.up)} experts, {torch.cuda.memory_allocated() / 1e9:.1f} GB on"
        f" {torch.cuda.get_device_name()}, filled in {time.perf_counter() - began:.1f} s"
    )
    record = open_record(options, arguments)
    measure_served: Served | None = None
    if options.served:
        # A rank's loop, which needs more than torch.
        from engine.bench.admission import measure_admissions
        from engine.bench.served_cuda import ServedBench

        measure_served = ServedBench(bench).measure
        rows = max(case.requests for case in options.cases)
        record["admissions"] = measure_admissions(rows - 1, tell)
    runs = []
    for run in measure_runs(bench, measure_served):
        runs.append(run)
        tell(describe_run(run))
    return record | {"runs": runs}


def measure_runs(bench: StepBench, measure_served: Served | None = None) -> Iterator[dict[str, Any]]:
    """The entries of a record, one case after another; `measure_served`: what is added to them, if they can have it."""
    for case in bench.options.cases:
        try:
            run = measure_case(bench, case)
            served = None if measure_served is None else measure_served(case, run["median_us"])
            yield run if served is None else run | {"served": served}
        except Exception as error:
            # A broken case must not cost the others their device time.
            traceback.print_exc()
            text = "".join(traceback.format_exception_only(error)).strip()
            yield {"case": case.name, "error": text[:400]}


def open_record(options: StepOptions, arguments: Sequence[str]) -> dict[str, Any]:
    """A record without its runs."""
    return {
        "schema": SCHEMA,
        "bench": "step",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**describe_machine(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda},
        "engine": VERSION,
        "commit": find_commit(),
        "command": shlex.join(arguments),
        "device": "cuda",
        "settings": dataclasses.asdict(options),
        "bound_bytes_per_s": COPY_BYTES_PER_S,
    }


def measure_asked(
    options: StepOptions, arguments: Sequence[str], tell: Callable[[str], None], *, is_group: bool
) -> dict[str, Any]:
    """One rank's steps, or those of a group.

    Raises:
        ConfigError: there is no such device, or something asked for can not be had.
    """
    if options.served and options.ranks > 1 and not is_group:
        raise ConfigError(
            "--served runs whole ranks: for --as-rank-of give --dep, which has all ranks of the group, or none of both"
            " and --layers so many that all experts fit"
        )
    if not is_group:
        return measure_steps(options, arguments, tell)
    # Its processes import this module.
    from engine.bench.group import measure_group

    record = measure_group(options, arguments, tell)
    if options.served:
        from engine.bench.served_group import add_served

        add_served(record, options, tell)
    return record


def check_steps(options: StepOptions, tell: Callable[[str], None], device: torch.device) -> bool:
    """Runs each case once with operations that compare themselves; whether all are right."""
    bench = StepBench(options, device)
    fine = True
    for case in options.cases:
        findings: dict[str, Finding] = {}
        step = bench.open(case)
        outputs = step.run_with(check_ops(bench.ops, bench.arena, findings))
        tell(f"{case.name}: logits {'finite' if bool(outputs.logits.isfinite().all()) else 'WRONG, not finite'}")
        for line in describe_findings(findings):
            tell("  " + line)
        fine = fine and all(finding.is_fine(name) for name, finding in findings.items())
    return fine


def is_sound(run: dict[str, Any]) -> bool:
    """It was measured, and what was measured is right."""
    return "error" not in run and run["finite"] and run["graph_equals_eager"]


def describe_run(run: dict[str, Any]) -> str:
    """A run for people, in a few lines."""
    if "error" in run:
        return f"{run['case']}: {run['error']}"
    nodes, moved = run.get("nodes", dict.fromkeys(("kernels", "copies", "fills", "others"), "?")), run["bytes"]
    lines = [
        f"{run['case']}: {run['requests']} x {run['rows']} rows at {run['length']}: {run['median_us'] / 1e3:.3f} ms"
        f" (spread {run['spread_pct']:.1f} %), {run['share_of_bound']:.2f} of {run['bound_us'] / 1e3:.3f} ms of bytes",
        f"  {run['experts_touched']['mean']:.1f} experts a layer; {moved['total'] / 1e9:.2f} GB: experts"
        f" {moved['experts'] / 1e9:.2f}, dense {moved['dense'] / 1e9:.2f}, records {moved['records'] / 1e9:.2f}",
        f"  {nodes['kernels']} kernels, {nodes['copies']} copies, {nodes['fills']} fills, {nodes['others']} others;"
        f" {describe_drafts(run)}; {run['distinct_tokens']} distinct tokens;"
        f" {run['memory_bytes']['peak'] / 1e9:.1f} GB at most",
    ]
    if not run["finite"]:
        lines.append("  WRONG: logits are not finite")
    if not run["graph_equals_eager"]:
        lines.append(f"  WRONG: graph and eager run differ, {run['graph_vs_eager']:.1e} relative")
    if "served" in run:
        lines.append(describe_served(run["served"]))
    if "profile_error" in run:
        lines.append(f"  no profile: {run['profile_error']}")
    if "profile" in run:
        profile = run["profile"]
        parts = [f"{name} {us:.0f} us ({count})" for name, (us, count) in profile["groups"].items() if count]
        lines.append("  " + ", ".join(parts))
        idle = run["median_us"] - profile["busy_us"]
        word = f"{idle:.0f} us between them" if idle >= 0 else f"{-idle:.0f} us of them beside others"
        lines.append(f"  kernels {profile['busy_us']:.0f} us in all, {word}")
        if not profile["matched"]:
            differing = ", ".join(f"{name} {eager} and {each:g}" for name, eager, each in profile["others"][:5])
            lines.append(f"  groups follow kernels' names: eager run and replay differ ({differing or 'in order'})")
    return "\n".join(lines)


def describe_drafts(run: dict[str, Any]) -> str:
    """How many drafts the step makes; of a model without a layer that predicts ahead it has no more than their rows."""
    drafts = run.get("drafts", {})
    asked, rounds = drafts.get("asked", 0), drafts.get("rounds", 0)
    if asked and not rounds:
        return f"rows of {asked} drafts, none judged or made, as no layer of the model predicts ahead"
    return f"{rounds} drafts made"


def describe_served(served: dict[str, Any]) -> str:
    """The loop's step for people, in two lines."""
    parts = ", ".join(f"{name} {us:.0f}" for name, us in served["parts_us"].items())
    return (
        f"  served {served['median_us'] / 1e3:.3f} ms (spread {served['spread_pct']:.1f} %), gap"
        f" {served['gap_us'] / 1e3:.3f} ms; device {served['device_us'] / 1e3:.3f} ms, idle between steps"
        f" {served['idle_us'] / 1e3:.3f} ms\n"
        f"  processor, us a step: loop {served['loop_us']:.0f}, worker {served['worker_us']:.0f}; in another run"
        f" {served['split']['loop_us']:.0f} and {served['split']['worker_us']:.0f}, of which {parts}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The measurement without the engine's command line. Exit code 1 if a case failed, 2 for what can not be had."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.step", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="v4-flash", help="v4-flash, a config.json, or a folder with one")
    parser.add_argument("--case", action="append", default=[], help="NAME=[N*]Q[@K][:D]; may be repeated")
    parser.add_argument("--shapes", type=Path, help="JSON file of cases")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--routing", choices=ROUTINGS, default="real")
    parser.add_argument("--as-rank-of", type=int, default=1, dest="ranks")
    parser.add_argument("--dep", type=int, help="really so many ranks, a GPU each, with their exchange")
    parser.add_argument("--records", choices=FORMATS, default="fp8")
    parser.add_argument("--no-branches", dest="branches", action="store_false", help="all of a layer one after another")
    parser.add_argument("--layers", type=int, help="only the first ones")
    parser.add_argument("--served", action="store_true", help="also as a decode rank's loop runs it")
    parser.add_argument("--check", action="store_true", help="compare each operation with its plain form; no timing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profiled", action="append", default=[], help="trace this case and no other; may be repeated")
    parser.add_argument("--no-profile", action="store_false", dest="profile")
    parser.add_argument("--output-json", type=Path)
    given = vars(parser.parse_args(argv))
    output, is_check, dep = given.pop("output_json"), given.pop("check"), given.pop("dep")
    if dep is not None:
        given["ranks"] = dep
    try:
        cases = gather_cases(given.pop("case"), given.pop("shapes"))
        given["profiled"] = tuple(given["profiled"])
        for name in set(given["profiled"]) - {case.name for case in cases}:
            raise ConfigError(f"--profiled {name} is none of the cases")
        asked = StepOptions(cases=tuple(cases), **given)
        if is_check:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            return int(not check_steps(asked, lambda line: print(line, flush=True), device))
        command = ["python", "-m", "engine.bench.step", *(sys.argv[1:] if argv is None else argv)]
        record = measure_asked(asked, command, lambda line: print(line, flush=True), is_group=dep is not None)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if output is not None:
        write_record(record, str(output))
    return int(not all(map(is_sound, record["runs"])))


if __name__ == "__main__":
    sys.exit(main())
