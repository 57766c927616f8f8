"""Whatever all tests share."""

import gc
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.order import rank
from tests.thinned import CASES, choose

# Before workers of a parallel run start: what they are parametrised with has to be the same in all of them.
os.environ.setdefault("FRESH_SEED", str(random.SystemRandom().randrange(1 << 30)))
# Where there is no GPU, kernels run in Triton's interpreter. Triton reads this when a kernel is declared, so it is set
# before any test's file, of whatever folder, imports one.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays. Nobody looks for garbage meanwhile, which saves each worker a fifth of the time, or
    among all that later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup() -> None:
    """Interpreted kernels run some three times as fast. A process that has loaded no Triton goes on without it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
        from tests.model.quick_interpreter import hurry

        hurry()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files in the order of `tests/order.py`, and marks what `tests/thinned.py` leaves to `make test-all`."""
    items.sort(key=lambda item: rank(item.nodeid.split("::")[0]))
    cases: dict[str, list[pytest.Item]] = {name: [] for name in CASES}
    for item in items:
        name = item.nodeid.split("[")[0]
        if name in cases:
            cases[name].append(item)
    for name, found in cases.items():
        kept = choose(len(found), CASES[name])
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
