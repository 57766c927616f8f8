"""What the light commands load: they must answer at once, and a head must not carry a device's libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

HEAVY = {"torch", "nixl", "nixl_cu13", "nixl_cu12", "textual", "safetensors", "tokenizers"}
_RUN = """
import json, sys
from engine.cli import main
told = []
for arguments in json.loads(sys.argv[1]):
    code = main(arguments)
    told.append([code, sorted({name.split(".")[0] for name in sys.modules})])
print("\\n" + json.dumps(told))
"""
"""One process for all: what one of them loads is still there behind the others."""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False,
        env={**environment, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


LIGHT = [
    (["--help"], 0),
    (["version"], 0),
    (["config", "schema"], 0),
    (["config", "check", "--model", "tests/oracle/v41-tiny"], 0),
    (["status", "--dir", "/nowhere/at/all"], 4),
    (["up", "--help"], 0),
    (["bench", "serve", "--help"], 0),
    (["bench", "forward", "--help"], 0),
    (["down", "--dir", "/nowhere/at/all"], 4),
    (["rebalance", "--help"], 0),
    (["rebalance", "apply", "--help"], 0),
    (["rebalance", "plan", "--dir", "/nowhere/at/all"], 4),
    (["metrics", "--help"], 0),
    (["ranks", "--dir", "/nowhere/at/all"], 4),
    (["requests", "--dir", "/nowhere/at/all"], 4),
    (["events", "--dir", "/nowhere/at/all"], 4),
    (["drain", "1", "--yes", "--dir", "/nowhere/at/all"], 4),
    (["cancel", "1", "--yes", "--dir", "/nowhere/at/all"], 4),
    (["relay", "--dir", "/nowhere/at/all"], 4),
    (["metrics", "--dir", "/nowhere/at/all"], 4),
    (["up", "--device", "cuda"], 2),
]


def test_light_commands_load_nothing_heavy():
    done = run_python(_RUN, json.dumps([arguments for arguments, _ in LIGHT]))
    told = json.loads(done.stdout.splitlines()[-1])
    for (arguments, wanted), (code, modules) in zip(LIGHT, told, strict=True):
        assert code == wanted, (arguments, done.stderr)
        assert not HEAVY & set(modules), arguments


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("engine.actors.head", set()),
        ("engine.compose", set()),
        ("engine.cli", {"trio", "numpy", "rich", "msgspec", "prometheus_client"}),
    ],
)
def test_modules_of_the_head_load_no_device_library(module, more):
    done = run_python(f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))")
    assert done.returncode == 0, done.stderr
    assert not (HEAVY | more) & set(done.stdout.split())


def test_the_command_line_is_imported_in_no_time():
    """Measured against a bare interpreter, the best of five: the machine may be busy, the code may not be slow."""

    def best(code: str) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            assert run_python(code).returncode == 0
            times.append(time.perf_counter() - began)
        return min(times)

    assert best("import engine.cli") - best("pass") < 0.25


def test_the_version_is_that_of_the_package():
    import tomllib

    from engine.version import VERSION

    with open("pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == VERSION
