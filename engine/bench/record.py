"""Record: what a bench run leaves behind, as one JSON object: figures, and all that is needed to judge and repeat them.

`"schema": 1` grows by new keys only. Units are in the keys' names. `runs` holds every single run; a summary is made of
medians over runs and of the spread, because a machine that others use gives no two equal runs.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import ClusterConfig
from engine.version import VERSION

SCHEMA = 1
GIT_S = 10.0
PACKAGES = ("torch", "numpy", "trio", "nixl-cu13", "nixl-cu12")


def begin_record(
    bench: str, config: ClusterConfig, arguments: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """The head of a record; the caller adds `runs` and `summary`.

    Args:
        bench: which measurement.
        arguments: of the command line, for `command`.
        settings: the measurement's own options.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "engine": VERSION,
        "commit": find_commit(),
        "command": shlex.join(["engine", *arguments]),
        "config_digest": config.digest,
        "model": os.path.basename(config.model),
        "device": config.device,
        "fabric": config.fabric,
        "threads": config.threads,
        "page_tokens": config.page_tokens,
        "kv_dtype": config.kv_dtype,
        "settings": settings,
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores for this process, load before the run, and versions of what computes and moves bytes."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _read_cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
    }


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def find_commit() -> str | None:
    """The checkout's commit, `-dirty` behind it if files differ; None where the engine is not run from a checkout."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=GIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def write_record(record: dict[str, Any], path: str) -> None:
    """Writes it as one indented JSON object; `-` is stdout."""
    text = json.dumps(record, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile, `share` in (0, 1]; 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest over runs."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }
