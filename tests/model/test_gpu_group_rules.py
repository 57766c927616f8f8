"""Rules of the pact that ranks with steps of a GPU keep on their hosts, and that they are found broken where they are.

As `test_gpu_group.py`, with flips that come to each rank at another time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.model.gpu_rank_cases import RankProcess
from tests.model.paged_cases import small_v4_config, write_checkpoint

STEPS = 14
SEEDS = (3, 4)
NUMBERS = itertools.count(2)
"""Of memberships."""


class Rules(RankProcess):
    module = "tests.model.gpu_rules_process"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RankProcess]]:
    """Two, for all tests."""
    model = tmp_path_factory.mktemp("model")
    write_checkpoint(model, config=small_v4_config())
    with ExitStack() as stack:
        meeting = Path(stack.enter_context(TemporaryDirectory()))
        found: list[RankProcess] = [stack.enter_context(Rules(model, place, 2, meeting=meeting)) for place in range(2)]
        for rank in found:
            rank.await_word("ready")
        yield found


@pytest.fixture(scope="module")
def unmoved(ranks: list[RankProcess]) -> list[Any]:
    """What they tell where experts stay where they are."""
    call_all(ranks, "join", number=1, lives=[1, 1])
    return [each["outcomes"] for each in run(ranks)]


@pytest.fixture
def old(ranks: list[RankProcess], unmoved: list[Any]) -> int:
    """The epoch with which their next membership, in which they are, begins."""
    number = next(NUMBERS)
    call_all(ranks, "plant", bug="none")
    call_all(ranks, "join", number=number, lives=[1, 1])
    # They leave the one before behind a step of it.
    call_all(ranks, "run", seed=0, steps=2, idle=True)
    return 10 * number


def call_all(ranks: list[RankProcess], action: str, **options: Any) -> list[Any]:
    for rank in ranks:
        rank.post(action, **options)
    return [rank.await_word(action) for rank in ranks]


def run(ranks: list[RankProcess]) -> list[dict[str, Any]]:
    for rank, seed in zip(ranks, SEEDS, strict=True):
        rank.post("run", seed=seed, steps=STEPS)
    return [rank.await_word("run") for rank in ranks]


def epochs(of: dict[str, Any]) -> list[int]:
    return [group[2] for group in of["groups"]]


def test_all_flip_at_the_step_behind_the_last_word_and_old_slots_are_free_two_steps_later(
    ranks: list[RankProcess], unmoved: list[Any], old: int
) -> None:
    ready = (2, 6)
    for rank, results in zip(ranks, ready, strict=True):
        rank.call("flip_after", results=results, epoch=old + 1, target=1, reclaim=2)
    runs = run(ranks)
    assert [each["outcomes"] for each in runs] == unmoved
    assert epochs(runs[0]) == epochs(runs[1]) and set(epochs(runs[0])) == {old, old + 1}
    # Two steps are queued, whose words were said before.
    assert ready[1] <= epochs(runs[0]).index(old + 1) <= ready[1] + 3
    # What the others held is empty, and was overwritten while steps ran.
    assert ranks[0].await_word("freed") and ranks[1].await_word("freed") == []


def test_a_flip_while_parked_is_in_force_behind_the_first_step_of_both(
    ranks: list[RankProcess], unmoved: list[Any], old: int
) -> None:
    idle = call_all(ranks, "run", seed=0, steps=6, idle=True)
    assert idle[0]["groups"][-1][3], "they have not parked"
    call_all(ranks, "flip", epoch=old + 1, target=1)
    runs = run(ranks)
    assert [each["outcomes"] for each in runs] == unmoved
    assert epochs(runs[0]) == epochs(runs[1]) == [old] + [old + 1] * (STEPS - 1)


@pytest.mark.parametrize("bug", ["flips by its own word", "flips a step late"])
def test_a_rank_that_flips_alone_is_found(ranks: list[RankProcess], unmoved: list[Any], old: int, bug: str) -> None:
    ranks[0].call("plant", bug=bug)
    for rank, results in zip(ranks, (2, 6), strict=True):
        rank.call("flip_after", results=results, epoch=old + 1, target=1, reclaim=0)
    runs = run(ranks)
    assert set(epochs(runs[0])) == {old, old + 1}
    assert [each["outcomes"] for each in runs] != unmoved
