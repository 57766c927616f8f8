"""tests/thinned.py and tests/order.py name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.order import FIRST, rank
from tests.thinned import CASES, choose

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CASES)
def test_a_thinned_test_is_there(name: str) -> None:
    path, function = name.split("::")
    assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_files_that_begin_first_are_there() -> None:
    assert not [path for path in FIRST if not (ROOT / path).exists()]
    assert rank(FIRST[0]) < rank(FIRST[-1]) < rank("tests/style/test_thinned.py")


@pytest.mark.parametrize(("count", "wanted"), [(1, 2), (4, 4), (12, 4), (80, 25), (9, 1)])
def test_cases_are_spread_over_all(count: int, wanted: int) -> None:
    chosen = choose(count, wanted)
    assert len(chosen) == min(count, wanted)
    assert 0 in chosen and (wanted == 1 or count - 1 in chosen)
