"""Profile: where the device time of a step goes, by groups of operations.

Two traces are taken with torch's profiler. In that of an eager run every launch lies within the mark of its operation,
and a launch and its kernel share a correlation number: so each kernel has a group. In that of graph replays there are
no launches, but the same kernels, with the durations that count; those of one name are in the same order, while others
may overtake them, where branches run side by side.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.model.ops import Ops, wrap_ops
from engine.model.step_weights import StepWeights
from kernels.forms import Weight

MARK = "step:"
REST = "rest"
GROUPS = (
    "experts", "dense", "attention", "indexer", "compressor", "memory", "rows", "hyper", "gate", "head", REST,
)  # fmt: skip
"""In the order in which they are printed; `compressor` has norms and window records too."""
_GROUP_OF = {
    "mix_experts": "experts",
    "multiply_pairs": "experts",
    "linear": "dense",
    "paired_linear": "dense",
    "grouped_linear": "dense",
    "gated_linear": "dense",
    "attend": "attention",
    "prepare_and_select": "indexer",
    "select_and_rank": "indexer",
    "select_among": "indexer",
    "compress": "compressor",
    "enter_attention": "compressor",
    "compress_latents": "compressor",
    "read_memory": "memory",
    "add_memory": "memory",
    "connect": "hyper",
    "collapse_head": "hyper",
    "route": "gate",
    "likeliest": "head",
}
REPLAYS = 5
TOP = 25


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel, or a copy or fill of memory, on the device.

    Attributes:
        name: the symbol.
        began_us, took_us: on the trace's clock.
        group: of the operation that launched it; None where the trace does not say.
    """

    name: str
    began_us: float
    took_us: float
    group: str | None


@dataclasses.dataclass(frozen=True)
class Profile:
    """Of one replay, on average.

    Attributes:
        groups: microseconds and kernels by group.
        busy_us: sum over all kernels.
        top: the names that took most, with microseconds and numbers of runs.
        matched: whether the replays ran the eager run's kernels, in whatever order; otherwise groups follow names.
        others: of kernels that one of both ran more often: (name, runs in the eager run, runs in a replay).
    """

    groups: dict[str, tuple[float, int]]
    busy_us: float
    top: list[tuple[str, float, int]]
    matched: bool
    others: list[tuple[str, int, float]]


def mark_ops(ops: Ops, weights: StepWeights) -> Ops:
    """Operations that leave marks in a trace."""

    def group_of(name: str, arguments: Sequence[Any]) -> str:
        group = _GROUP_OF.get(name, "rows")
        weight = arguments[1] if group == "dense" and isinstance(arguments[1], Weight) else None
        return "head" if weight is weights.head else group

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any, **more: Any) -> Any:
            with torch.profiler.record_function(MARK + group_of(name, arguments)):
                return call(*arguments, **more)

        return marked

    return wrap_ops(ops, around)


def profile_step(run_eagerly: Callable[[], object], replay: Callable[[], object]) -> Profile:
    """Traces one eager run of marked operations, and some replays of the same step. For a CUDA device."""
    eager = read_trace(_trace(run_eagerly, 1))
    return attribute(eager, read_trace(_trace(replay, REPLAYS)), REPLAYS)


def _trace(call: Callable[[], object], times: int) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return trace


def read_trace(trace: dict[str, Any]) -> list[Kernel]:
    """What ran on the device, in order."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(MARK))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    )
    launches = sorted(
        (event["ts"], event["args"]["correlation"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    )
    group_of: dict[int, str] = {}
    place = 0
    for began, correlation in launches:
        while place < len(marks) and marks[place][1] < began:
            place += 1
        if place < len(marks) and marks[place][0] <= began:
            group_of[correlation] = marks[place][2]
    kernels = [
        Kernel(event["name"], event["ts"], event["dur"], group_of.get(event["args"].get("correlation")))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(kernels, key=lambda kernel: kernel.began_us)


def attribute(eager: Sequence[Kernel], replayed: Sequence[Kernel], replays: int) -> Profile:
    """Durations of replays, with the groups of the eager run."""
    size = len(replayed) // replays
    known, found = (collections.Counter(kernel.name for kernel in kernels) for kernels in (eager, replayed))
    others = [
        (name, known[name], found[name] / replays) for name in known | found if known[name] * replays != found[name]
    ]
    matched = not others and all(
        collections.Counter(kernel.name for kernel in replayed[at : at + size]) == known
        for at in range(0, len(replayed), max(size, 1))
    )
    group_of: dict[str, list[str]] = collections.defaultdict(list)
    for kernel in eager:
        group_of[kernel.name].append(kernel.group or REST)
    runs: collections.Counter[str] = collections.Counter()
    groups: dict[str, list[float]] = {group: [0.0, 0.0] for group in GROUPS}
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for kernel in replayed:
        own = group_of.get(kernel.name, [REST])
        group = own[runs[kernel.name] % len(own)] if matched else collections.Counter(own).most_common(1)[0][0]
        runs[kernel.name] += 1
        for total in (groups[group], by_name[kernel.name]):
            total[0] += kernel.took_us / replays
            total[1] += 1 / replays
    top = sorted(by_name.items(), key=lambda item: -item[1][0])[:TOP]
    return Profile(
        groups={group: (us, round(count)) for group, (us, count) in groups.items()},
        busy_us=sum(kernel.took_us for kernel in replayed) / replays,
        top=[(name, us, round(count)) for name, (us, count) in top],
        matched=matched,
        others=others,
    )
