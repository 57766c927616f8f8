"""tests/thinned.py names tests that there are, with more cases than it keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.thinned import CASES, choose

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CASES)
def test_a_thinned_test_is_there(name: str) -> None:
    path, function = name.split("::")
    assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(("count", "wanted"), [(1, 2), (4, 4), (12, 4), (80, 25), (9, 1)])
def test_cases_are_spread_over_all(count: int, wanted: int) -> None:
    chosen = choose(count, wanted)
    assert len(chosen) == min(count, wanted)
    assert 0 in chosen and (wanted == 1 or count - 1 in chosen)
