"""How seldom steps of any length are looked at, and how late their ends are seen."""

from __future__ import annotations

import numpy as np
import pytest

from engine.model.look_times import LAST, LOOK_S, LookTimes

NO_LIMIT = 1.0


def watch(looks: LookTimes, length_s: float, *, rows: int = 16, late_s: float = 0.0) -> tuple[int, float]:
    """A step that began `late_s` before that was known: looks at it, and how late its end was seen."""
    now, count = late_s, 0
    while True:
        count += 1
        if now >= length_s:
            looks.note(rows, length_s)
            return count, now - length_s
        now += looks.find_wait(rows, now - late_s, NO_LIMIT)


@pytest.mark.parametrize("length_s", [0.0004, 0.0017, 0.003, 0.011, 0.015, 0.05])
def test_steps_are_looked_at_seldom_and_their_ends_are_seen_at_once(length_s: float) -> None:
    looks = LookTimes()
    first, _ = watch(looks, length_s)
    assert first >= length_s / LOOK_S
    generator = np.random.default_rng(1)
    counts = []
    for _ in range(200):
        late_s = float(generator.uniform(0, LOOK_S))
        count, seen_s = watch(looks, length_s * float(generator.uniform(0.99, 1.01)), late_s=late_s)
        assert seen_s <= LOOK_S + 1e-9
        counts.append(count)
    assert np.mean(counts) < min(length_s / LOOK_S + 2, 6 + 400 * length_s)


@pytest.mark.parametrize("share", [0.95, 0.7, 0.4, 0.1])
def test_a_step_suddenly_shorter_is_seen_before_it_would_have_ended_and_the_next_at_once(share: float) -> None:
    looks = LookTimes()
    watch(looks, 0.015)
    _, seen_s = watch(looks, 0.015 * share)
    assert 0.015 * share + seen_s < 0.015 and seen_s <= (1 - share) * 0.015
    assert watch(looks, 0.015 * share)[1] <= LOOK_S + 1e-9


def test_steps_that_become_longer_are_expected_later_after_a_while() -> None:
    looks = LookTimes()
    watch(looks, 0.003)
    counts = [watch(looks, 0.012)[0] for _ in range(LAST + 1)]
    assert counts[0] > 90 and counts[-1] < 10


def test_sizes_do_not_mix_and_an_unknown_one_is_looked_at_often() -> None:
    looks = LookTimes()
    looks.note(16, 0.01)
    assert looks.find_wait(17, 0.0, NO_LIMIT) == LOOK_S
    assert looks.find_wait(9, 0.0, NO_LIMIT) > 0.009
    assert looks.find_wait(9, 0.0, 0.002) == 0.002
