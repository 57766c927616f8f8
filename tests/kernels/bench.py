"""Bench: times kernels at real sizes on a CUDA device: `python -m tests.kernels.bench --only experts --output FILE`.

A case is one launcher call on rotating inputs, captured in a CUDA graph of `repeats` calls; reported is the time of a
call from graph replays, median over samples, beside what was predicted and the bound by bytes and by operations.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

BYTES_PER_US = 4.3e6
"""What a device copy reaches on an H200, read and write counted."""
FLOPS_PER_US = 780e6
"""What a large bf16 product reaches."""
MODULES = ("experts", "linear", "hyper", "rows", "compressor", "indexer", "attention", "gate")


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        name: what and which variant.
        run: makes call number i; inputs rotate by i. Enqueues, returns whatever `check` looks at.
        bytes: that a call must move at least.
        flops: that it must compute.
        predicted_us: said before the measurement.
        check: raises where the result of `run(0)` is wrong; None where another case has checked the variant.
    """

    name: str
    run: Callable[[int], object]
    bytes: float
    flops: float = 0.0
    predicted_us: float = 0.0
    check: Callable[[object], None] | None = None


def time_case(case: Case, *, repeats: int = 10, samples: int = 15) -> dict[str, object]:
    """Checks a case and times it."""
    result: dict[str, object] = {"name": case.name, "predicted_us": case.predicted_us}
    try:
        first = case.run(0)
        torch.cuda.synchronize()
        if case.check is not None:
            case.check(first)
            result["checked"] = True
        del first
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(repeats):
                case.run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(repeats):
                case.run(i)
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(samples):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / repeats)
        bound = max(case.bytes / BYTES_PER_US, case.flops / FLOPS_PER_US)
        median = statistics.median(times)
        result |= {"us": median, "us_min": min(times), "us_max": max(times), "bound_us": bound, "bytes": case.bytes}
        result["share_of_bound"] = bound / median
    except Exception as error:
        # One broken variant must not cost the others their device time.
        result["error"] = "".join(traceback.format_exception_only(error)).strip()[:400]
        traceback.print_exc(limit=4)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Times all cases of the chosen modules; exit code 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(MODULES))
    parser.add_argument("--match", default="", help="only cases whose name has this")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=10, help="calls in a graph")
    parser.add_argument("--samples", type=int, default=15, help="replays that are timed; 1 only fills Triton's cache")
    options = parser.parse_args(argv)
    results = []
    for name in options.only.split(","):
        module = importlib.import_module(f"tests.kernels.bench_{name}")
        for case in module.cases():
            if options.match not in case.name:
                continue
            result = time_case(case, repeats=options.repeats, samples=options.samples)
            results.append({"module": name, **result})
            shown = result.get("error") or (
                f"{result['us']:9.1f} us  bound {result['bound_us']:8.1f}  {result['share_of_bound']:5.2f}  "
                f"predicted {case.predicted_us:8.1f}  {'checked' if result.get('checked') else ''}"
            )
            print(f"{name:11s} {case.name:58s} {shown}", flush=True)
        torch.cuda.empty_cache()
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit.stdout.strip(),
            "command": " ".join(sys.argv),
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
