"""What measures load counts right: outcomes of streams, and the memory that admission gives back."""

from __future__ import annotations

import random

from engine.config import HttpConfig
from tests.front.load_client import ask, completion
from tests.front.measure_ranks import LENGTHS, measure_admission
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
    assert set(found) == {*(f"us_{length >> 10}k" for length in LENGTHS), "pages_128k"}
