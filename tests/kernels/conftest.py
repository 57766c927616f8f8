"""What all kernel tests share: where they run, and memory that shows what was never written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, and the largest integer: an element that no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def loops_to_a_loaded_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter turns a loop's bound into an int as numpy no longer allows: it is an array of one."""
    # Here, since the variable that `tests/conftest.py` sets has to be set before.
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patch_further(tensor: object, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_further)
