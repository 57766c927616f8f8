"""Finds and imports NIXL, and says what it can do on this machine. The only file that imports it.

The wheel is called `nixl_cu13` or `nixl_cu12`; the name `nixl` exists only with the meta package. Everything works
without CUDA and without RDMA: then the UCX backend moves host memory over process_vm_writev (CMA) or TCP.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

MODULES = ("nixl_cu13", "nixl", "nixl_cu12")
PROBED_PLUGINS = ("UCX", "POSIX")
STATUS_LIMIT_S = 30.0
"""What `nixl_status` gives its child process: importing and one backend take under a second on an idle machine."""

_ENVIRONMENT = {
    # Read when the library is loaded or the backend is made, so these must come first. UCX logs to stdout by default,
    # which belongs to data here.
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "ERROR",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Nixl:
    """The imported library.

    Attributes:
        module: name of the package that was found.
        api: its `_api` module.
        errors: all exception classes that its calls raise; they have no common base but Exception.
    """

    module: str
    api: Any
    errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Imports the first NIXL package that works; sets its environment defaults first.

    Raises:
        ImportError: none is there, or none can be loaded; the message has each one's reason.
    """
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    reasons = []
    for name in MODULES:
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            reasons.append(f"{name}: {error}")
            continue
        return Nixl(name, api, _error_classes(api.nixlBind))
    raise ImportError("; ".join(reasons))


def _error_classes(bindings: ModuleType) -> tuple[type[Exception], ...]:
    own = [value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception)]
    # pybind11 turns what it can not name into these.
    return (*own, RuntimeError, ValueError, TypeError, IndexError, MemoryError)


def is_available() -> bool:
    """Whether NIXL can be imported here. A backend may still fail to start; opening the fabric says so."""
    try:
        load_nixl()
    except ImportError:
        return False
    return True


def nixl_status() -> dict[str, Any]:
    """What `engine doctor` shows: never raises, and survives a crash of the library (it asks a child process).

    Returns:
        `available` (bool), `module` and `version` (text or None), `plugins` (name to "usable" or the reason why not),
        `transports` (what UCX would use within this host, such as `cma/memory`, `tcp/lo`), `errors` (list of text).
    """
    status: dict[str, Any] = {
        "available": False,
        "module": None,
        "version": None,
        "plugins": {},
        "transports": [],
        "errors": [],
    }
    environment = dict(os.environ, UCX_LOG_LEVEL="info", UCX_LOG_FILE="stderr", PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", "from transport.nixl_load import probe; probe()"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=STATUS_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        status["errors"].append(f"probe: {error}")
        return status
    log = done.stderr.decode(errors="replace")
    try:
        # Other libraries may print too; ours is the last line.
        status.update(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        tail = log.strip().splitlines()[-1:] or ["no output"]
        status["errors"].append(f"probe ended with code {done.returncode}: {tail[0]}")
        return status
    lanes = re.findall(r"self cfg#\d+ (.*)", log)
    status["transports"] = sorted(set(re.findall(r"[a-z_0-9]+/[a-z_0-9]+", " ".join(lanes))))
    return status


def probe() -> None:
    """The child of `nixl_status`: makes an agent and each plugin's backend, prints one line of JSON."""
    found: dict[str, Any] = {"plugins": {}, "errors": []}
    try:
        nixl = load_nixl()
    except ImportError as error:
        found["errors"].append(str(error))
        print(json.dumps(found))
        return
    found["module"] = nixl.module
    try:
        found["version"] = importlib.metadata.version(nixl.module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError as error:
        found["errors"].append(f"version: {error}")
    try:
        agent = nixl.api.nixl_agent("probe", nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    except nixl.errors as error:
        found["errors"].append(f"agent: {type(error).__name__}: {error}")
        print(json.dumps(found))
        return
    for plugin in PROBED_PLUGINS:
        try:
            agent.create_backend(plugin, {"engine_config": "NET_DEVICES=lo"} if plugin == "UCX" else {})
        except nixl.errors as error:
            found["plugins"][plugin] = f"{type(error).__name__}: {error}"
        else:
            found["plugins"][plugin] = "usable"
    found["available"] = found["plugins"].get("UCX") == "usable"
    print(json.dumps(found))
