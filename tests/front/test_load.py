"""What measures load counts right: outcomes of streams, and the memory that admission gives back."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from engine.config import HttpConfig
from tests.front.load_client import ask, completion
from tests.front.measure_ranks import LENGTHS, give_up, measure_admission, open_side, run_one
from tests.front.rig import ids_of, run, running_front


def test_outcomes_are_told_apart() -> None:
    rng = random.Random(1)

    async def main() -> None:
        async with running_front(http=HttpConfig(body_bytes=4096)) as rig:
            rig.head.auto = ids_of("the answer is long enough")
            whole = await ask(rig.port, completion(16, 64, rng))
            refused = await ask(rig.port, completion(2000, 64, rng))
            rig.head.auto = None
            left = await ask(rig.port, completion(16, 64, rng), leave_after_s=0.05)
        assert (whole.end, whole.status) == ("whole", 200) and whole.news and whole.ttft_s > 0
        assert (refused.end, refused.status, refused.news) == ("refused", 413, [])
        assert left.end == "hung_up"

    run(main)


def test_admission_gives_everything_back_at_every_length() -> None:
    found = measure_admission(2)
    names = {f"{name}_{length >> 10}k" for name in ("us", "run_us") for length in LENGTHS}
    assert set(found) == names | {"pages_128k"}


def count_lines(act: Callable[[], object]) -> int:
    """Lines of the engine's own code that are run: what it costs, without a clock."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if event == "call" and "/engine/core/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("way", ["given_up", "run"])
def test_a_decode_rank_does_as_much_for_a_long_prompt_as_for_a_short_one(way: str) -> None:
    side, act = open_side(), {"given_up": give_up, "run": run_one}[way]
    act(side, 1, LENGTHS[-1])  # tables have their width
    counts = [count_lines(functools.partial(act, side, number, length)) for number, length in enumerate(LENGTHS, 2)]
    assert counts[0] > 100 and max(counts) == min(counts), counts
