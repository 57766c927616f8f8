"""Doctor: looks at this machine and says what the engine will find here, and what to do about what is missing.

It changes nothing and starts nothing that stays. A finding is ok, a warning (works, but slower or smaller than it
could) or a failure (the engine will not run).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from engine.config import NANO, model_directory, read_model_facts
from engine.errors import ConfigError

MEMORY_LEAST_BYTES = 4 << 30
DESCRIPTORS_LEAST = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the verdict. `advice` is what to do, empty when there is nothing to do."""

    subject: str
    level: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Verdict lines, and the facts behind them by subject."""

    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @property
    def is_healthy(self) -> bool:
        return all(finding.level != "fail" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "healthy": self.is_healthy,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "facts": self.facts,
        }


def diagnose(model: str, directory: str) -> Diagnosis:
    """Looks at everything. Takes seconds: torch is imported, NIXL's backends are tried.

    Args:
        model: checkpoint directory, or `nano`.
        directory: runtime directory that an engine would use.
    """
    facts: dict[str, Any] = {}
    findings = [
        *_look_at_python(facts),
        *_look_at_torch(facts),
        *_look_at_nixl(facts),
        *_look_at_machine(facts),
        *_look_at_model(facts, model),
        *_look_at_directory(facts, directory),
    ]
    return Diagnosis(tuple(findings), facts)


def _look_at_python(facts: dict[str, Any]) -> list[Finding]:
    facts["python"] = {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
    supported = sys.version_info[:2] in ((3, 11), (3, 12))
    return [
        Finding("python", "ok", platform.python_version())
        if supported
        else Finding("python", "warn", platform.python_version(), "tested on 3.11 and 3.12")
    ]


def _look_at_torch(facts: dict[str, Any]) -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        facts["torch"] = None
        return [Finding("torch", "fail", str(error), "pip install torch (a CPU build is enough), then try again")]
    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"index": index, "name": properties.name, "memory_bytes": properties.total_memory})
    facts["torch"] = {"version": torch.__version__, "cuda": torch.version.cuda}
    facts["gpus"] = gpus
    findings = [Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")]
    if gpus:
        names = ", ".join(f"{gpu['name']} {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in gpus)
        findings.append(Finding("gpus", "ok", f'{names}; device = "cuda" runs models on them'))
    else:
        findings.append(Finding("gpus", "ok", "none; ranks compute on the CPU"))
    return findings


def _look_at_nixl(facts: dict[str, Any]) -> list[Finding]:
    from transport.nixl_fabric import nixl_status

    status = nixl_status()
    facts["nixl"] = status
    if not status["available"]:
        why = "; ".join(status["errors"]) or "its UCX backend does not start"
        advice = "until pip install 'counterpoise[nixl]' works here, pages go over TCP and ranks on GPUs do not start"
        return [Finding("nixl", "warn", why, advice)]
    usable = [name for name, state in status["plugins"].items() if state == "usable"]
    transports = ", ".join(status["transports"]) or "unknown"
    findings = [Finding("nixl", "ok", f"{status['module']} {status['version']}, {', '.join(usable)}: {transports}")]
    scope = _read_number("/proc/sys/kernel/yama/ptrace_scope")
    facts["ptrace_scope"] = scope
    if scope:
        findings.append(
            Finding(
                "ptrace_scope",
                "warn",
                f"{scope}: processes may not copy each other's memory (CMA)",
                "NIXL takes a slower way within this host; sysctl kernel.yama.ptrace_scope=0 if the machine is yours",
            )
        )
    return findings


def _look_at_machine(facts: dict[str, Any]) -> list[Finding]:
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available_memory()
    descriptors, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    facts["machine"] = {
        "cpus": cpus,
        "memory_bytes": memory,
        "memory_available_bytes": free,
        "memory_page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "shm_bytes": shm,
        "descriptors": descriptors,
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
    }
    few = cpus < 2
    findings = [
        Finding("cpus", "warn" if few else "ok", str(cpus), "ranks share one core; they will be slow" if few else "")
    ]
    level: Literal["ok", "fail"] = "ok" if memory >= MEMORY_LEAST_BYTES else "fail"
    advice = "" if level == "ok" else f"the engine needs {MEMORY_LEAST_BYTES >> 30} GiB"
    findings.append(Finding("memory", level, f"{free / 2**30:.1f} of {memory / 2**30:.1f} GiB available", advice))
    if descriptors < DESCRIPTORS_LEAST:
        findings.append(
            Finding("descriptors", "warn", str(descriptors), f"ulimit -n {min(hard, 65536)} before engine up")
        )
    if shm < 64 << 20:
        findings.append(
            Finding("shm", "warn", f"{shm >> 20} MiB", "UCX shares memory through /dev/shm; containers: --shm-size=1g")
        )
    return findings


def _look_at_model(facts: dict[str, Any], model: str) -> list[Finding]:
    directory = model_directory(model)
    weights = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    size = sum(path.stat().st_size for path in weights)
    facts["model"] = {"name": model, "directory": str(directory), "weights": len(weights), "weight_bytes": size}
    advice = "reinstall the package" if model == NANO else "name a folder with config.json and *.safetensors"
    try:
        model_facts = read_model_facts(model, page_tokens=256, value_bytes=4)
    except ConfigError as error:
        return [Finding("model", "fail", str(error), advice)]
    if not weights:
        return [Finding("model", "fail", f"{model}: no weights in {directory}", advice)]
    if not (directory / "tokenizer.json").is_file():
        return [Finding("model", "fail", f"{model}: no tokenizer.json in {directory}", advice)]
    found = (
        f"{model}: {size / 2**20:.1f} MiB of weights, {model_facts.vocab_size} ids, context {model_facts.max_length}"
    )
    return [Finding("model", "ok", found)]


def _look_at_directory(facts: dict[str, Any], directory: str) -> list[Finding]:
    from engine.runtime import RuntimeDirectory

    runtime = RuntimeDirectory(directory)
    facts["directory"] = {"path": directory, "head": os.path.exists(runtime.head_file)}
    if os.path.exists(directory):
        try:
            runtime.prepare()
        except ConfigError as error:
            return [Finding("directory", "fail", str(error))]
    state = "an engine left its mark here" if os.path.exists(runtime.head_file) else "free"
    return [Finding("directory", "ok", f"{directory}: {state}")]


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def engine_packages() -> dict[str, str | None]:
    """Versions of what matters for a bug report, without importing any of it."""
    versions: dict[str, str | None] = {}
    for name in ("torch", "trio", "msgpack", "msgspec", "nixl-cu13", "nixl-cu12", "tokenizers", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
