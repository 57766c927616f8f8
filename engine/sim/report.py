"""What a run did, in words for people and as one JSON object; and the exit code that tells kinds of failure apart."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine.sim.checks import LIVENESS
from engine.sim.costs import FlatCosts, RooflineCosts
from engine.sim.play import Outcome
from engine.sim.scenario import Scenario

EXIT_CRASH: Final = 10
EXIT_CORRECTNESS: Final = 11
EXIT_LIVENESS: Final = 12
EXIT_TWO_RUNS: Final = 13


def exit_code(outcome: Outcome) -> int:
    """0, or which kind of failure it was."""
    if outcome.violation is not None:
        checker = outcome.violation.checker
        if checker == "one-run":
            return EXIT_TWO_RUNS
        return EXIT_LIVENESS if checker in LIVENESS else EXIT_CORRECTNESS
    return EXIT_CRASH if outcome.crash is not None else 0


def describe_options(scenario: Scenario) -> list[str]:
    """What the run was drawn or told to be."""
    shape, load, swarm, limits = scenario.shape, scenario.load, scenario.swarm, scenario.shape.limits
    groups = shape.prefill_group, shape.decode_group
    group = f", in groups of {groups[0]} and {groups[1]}" if max(groups) > 1 else ""
    lines = [
        f"{shape.prefill}P{shape.decode}D{group}; arenas of {shape.num_pages} pages of {shape.page_tokens} tokens and"
        f" {shape.num_slabs} slabs; steps of {limits.prefill_chunk_tokens} ids or {limits.decode_rows} rows",
        f"{f'{load.inflight} in flight, at most ' if load.inflight else ''}{load.requests} requests of"
        f" {load.clients} clients within {load.arrive_s:g} s; prompts of {load.prompt[0]}-"
        f"{load.prompt[1]}, outputs of {load.output[0]}-{load.output[1]} tokens; {load.cancel_share:.0%} cancelled",
        f"links {shape.link_latency_s * 1e6:g} us {shape.link_bytes_per_s / 1e9:g} GB/s, pushes"
        f" {shape.fabric_latency_s * 1e6:g} us {shape.fabric_bytes_per_s / 1e9:g} GB/s",
    ]
    if swarm.kinds and swarm.per_s:
        lines.append(
            f"faults, {swarm.per_s:g} a second from {swarm.from_s:g} to {swarm.until_s:g} s: {', '.join(swarm.kinds)}"
        )
    else:
        lines.append("no faults")
    extra = scenario.extra
    if extra.kinds and extra.per_s:
        lines.append(f"besides, {extra.per_s:g} a second: {', '.join(extra.kinds)}")
    if shape.checksums:
        lines.append("pushes have checksums")
    if scenario.signals:
        lines.append(f"told to stop at {', '.join(f'{at:.3f}' for at in scenario.signals)} s")
    return lines


def summarise(outcome: Outcome) -> dict[str, Any]:
    """All numbers, as JSON."""
    answers, kinds = outcome.answers, outcome.trace.kinds
    seconds = max(outcome.virtual_s, 1e-9)
    scenario = outcome.scenario
    shape = dataclasses.asdict(scenario.shape)
    for role in ("prefill", "decode"):
        costs = getattr(scenario.shape, f"{role}_costs")
        known = isinstance(costs, FlatCosts | RooflineCosts)
        shape[f"{role}_costs"] = {"kind": type(costs).__name__, **(dataclasses.asdict(costs) if known else {})}
    return {
        "schema": 1,
        "scenario": scenario.name,
        "seed": scenario.seed,
        "replay": scenario.replay_line(),
        "failure": _describe_failure(outcome),
        "exit_code": exit_code(outcome),
        "hash": outcome.trace.digest,
        "virtual_s": outcome.virtual_s,
        "wall_s": outcome.wall_s,
        "cpu_s": outcome.cpu_s,
        "events": dict(sorted(kinds.items())),
        "steps": outcome.steps,
        "skew": {role: _skew(outcome, role) for role in ("prefill", "decode")},
        "lives": outcome.lives,
        "writers_ended_for_their_epochs": outcome.purged,
        "writes_landed": outcome.landings,
        "commits": outcome.commits,
        "outcomes": dict(sorted(answers.outcomes.items())),
        "failed_attempts": dict(sorted(answers.failures.items())),
        "attempts": answers.num_attempts,
        "most_attempts": answers.most_attempts,
        "connections": answers.num_connections,
        "tokens": answers.num_tokens,
        "tokens_per_s": answers.num_tokens / seconds,
        "ttft_s": _percentiles(answers.first_token_s),
        "inter_token_s": _percentiles(answers.between_tokens_s),
        "handoff_s": _percentiles(answers.handoff_s),
        "acts": dict(sorted(outcome.acts.items())),
        "groups": _describe_groups(outcome),
        "experts": [] if outcome.experts is None else msgspec.to_builtins(outcome.experts.parts),
        "shape": shape,
        "load": dataclasses.asdict(scenario.load),
        "swarm": dataclasses.asdict(scenario.swarm),
        "extra": dataclasses.asdict(scenario.extra),
    }


def _describe_groups(outcome: Outcome) -> dict[str, Any]:
    """What became of each group and of the experts in it."""
    groups = {}
    for name, meters in outcome.groups.items():
        groups[name] = {
            "steps": meters.num_steps,
            "idle_steps": meters.idle_steps,
            "step_s": _percentiles(meters.step_s),
            "copying_steps": meters.copying_s.count,
            "copying_step_s": _percentiles(meters.copying_s),
            "lost_us_per_step": meters.lost_us / max(meters.num_steps, 1),
            "lost_us_per_step_by_second": {
                second: lost_us / count for second, (count, lost_us) in sorted(meters.lost_by_second.items())
            },
            "flips": meters.flips,
            "breaks": meters.breaks,
        }
    return groups


def _skew(outcome: Outcome, role: str) -> float:
    """Device time of the busiest rank of a role over their mean; 1 is even, 0 where none had a step."""
    roles = outcome.scenario.shape.cluster_config().roles
    times = [busy_s for rank, busy_s in outcome.busy_s.items() if roles[rank] == role]
    return max(times) * len(times) / sum(times) if any(times) else 0.0


def _percentiles(histogram: Any) -> dict[str, float]:
    return {name: histogram.percentile(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _describe_failure(outcome: Outcome) -> str | None:
    if outcome.violation is not None:
        return str(outcome.violation)
    if outcome.crash is not None:
        return "".join(traceback.format_exception(outcome.crash))
    return None


def describe(outcome: Outcome) -> Iterator[str]:
    """The run on one screen."""
    told = summarise(outcome)
    faults = {kind[6:]: n for kind, n in told["events"].items() if kind.startswith("fault.")}
    events = {kind: n for kind, n in told["events"].items() if not kind.startswith("fault.")}
    yield f"seed {told['seed']}, hash {told['hash']}: {told['virtual_s']:.3f} virtual s in {told['wall_s']:.2f} s"
    yield (
        f"  speed       {told['virtual_s'] / max(told['cpu_s'], 1e-9):.2f} virtual s per s of CPU time"
        f" ({told['cpu_s']:.2f} s)"
    )
    yield f"  events      {_counts(events)}; {told['steps']} device steps"
    yield f"  faults      {_counts(faults) or 'none'}; {told['lives']} lives of ranks"
    yield f"  answers     {_counts(told['outcomes'])}; {told['attempts']} attempts, at most {told['most_attempts']}"
    yield f"  lost tries  {_counts(told['failed_attempts']) or 'none'}"
    yield f"  throughput  {told['tokens']} tokens, {told['tokens_per_s']:.1f} a second"
    skew = ", ".join(f"{role} {value:.2f}" for role, value in told["skew"].items())
    yield f"  skew        {skew} (device time of the busiest rank over the mean)"
    for name, key in (("first token", "ttft_s"), ("inter-token", "inter_token_s"), ("hand-off", "handoff_s")):
        times = ", ".join(f"{share} {seconds * 1e3:.2f} ms" for share, seconds in told[key].items())
        yield f"  {name:<11} {times}"
    yield from _tell_groups(outcome)


def _tell_groups(outcome: Outcome) -> Iterator[str]:
    for name, told in _describe_groups(outcome).items():
        yield (
            f"  {name}: {told['steps']} steps with rows, p50 {told['step_s']['p50'] * 1e3:.2f} ms, p99"
            f" {told['step_s']['p99'] * 1e3:.2f} ms; {told['lost_us_per_step']:.1f} us of each lost to skew;"
            f" {told['flips']} flips, {told['breaks']} breakages"
        )
    for part in () if outcome.experts is None else outcome.experts.parts:
        yield (
            f"  {part.pool} group {part.group}, {part.part}: {part.applied} re-placements, {part.rolled_back} back,"
            f" {part.failed} failed, {part.skipped} not worth it; {part.moved_slots_total} slots moved"
        )
    if outcome.acts:
        yield f"  operators   {_counts(outcome.acts)}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
