"""Ranks of a group whose prompts go on from kept state: the bits of a single rank, also where steps break off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from engine.core.plan import IDLE_STEP, Base, DecodeRow, PrefillChunk, StepPlan
from engine.errors import GroupBroken
from engine.model.device import open_torch_device
from engine.model.exchange import Key
from tests.model.group_cases import (
    PAGE_TOKENS,
    PAGES_EACH,
    Hub,
    Outcome,
    group_config,
    ignore,
    open_group,
    random_placement,
    run_alone,
    run_group,
    run_schedule,
)
from tests.model.paged_cases import write_checkpoint
from transport.messages import Sampling

KEEPS = (11, 12, 13)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


def make_schedule(seed: int, *, warm: bool) -> list[StepPlan]:
    """A prompt that is kept inside a page, at a page's end and at its own end; then prompts on each of these, several
    in a step, short and longer than a ring, cut once more, and rows of all of them.

    Args:
        warm: whether those go on from kept state; else they are computed from their first id, in the same steps.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 310, 60).astype("<i4")
    cuts = dict(zip(KEEPS, (int(rng.integers(9, 16)), 32, 45), strict=True))
    plans: list[StepPlan] = []

    def pages(slab: int) -> tuple[int, ...]:
        return tuple(range(slab * PAGES_EACH, (slab + 1) * PAGES_EACH))

    def pack(part: np.ndarray) -> memoryview:
        return memoryview(part.tobytes())

    def add(*chunks: PrefillChunk, rows: tuple[DecodeRow, ...] = ()) -> None:
        plans.append(StepPlan(len(plans) + 1 if chunks or rows else IDLE_STEP, chunks, rows))

    if seed % 2:
        add()
    at = 0
    for keep, end in cuts.items():
        last = Sampling() if end == 45 else None
        add(PrefillChunk(1, 0, at, pack(ids[at:end]), pages(0), last, keep=keep))
        at = end
    ends: dict[int, int] = {}
    for step in range(3):
        firsts, rests = [], []
        for place in range(3):
            slab = 1 + 3 * step + place
            keep = KEEPS[int(rng.integers(3))]
            cut, own = cuts[keep], int(rng.choice([3, 8, 9, 30]))
            text = np.concatenate((ids[:cut], rng.integers(3, 310, own).astype("<i4")))
            shared = pages(0)[: cut // PAGE_TOKENS] if warm else ()
            held = (*shared, *pages(slab)[len(shared) :])
            base = Base(keep, pages(0)[cut // PAGE_TOKENS] if cut % PAGE_TOKENS else -1) if warm else None
            is_cut = own == 30 and place == 0
            middle = cut + 12 if is_cut else len(text)
            drawn = Sampling(temperature=0.9, seed=slab)
            start = cut if warm else 0
            firsts.append(
                PrefillChunk(
                    slab, slab, start, pack(text[start:middle]), held, None if is_cut else drawn, base=base
                )
            )  # fmt: skip
            if is_cut:
                rests.append(PrefillChunk(slab, slab, middle, pack(text[middle:]), held, drawn))
            ends[slab] = len(text)
        rows = tuple(DecodeRow(slab, slab, end, None, held_by(firsts, rests, plans, slab), Sampling())
                     for slab, end in ends.items() if slab < 1 + 3 * step)  # fmt: skip
        for row in rows:
            ends[row.slab] += 1
        add(*firsts, rows=rows)
        if rests:
            add(*rests)
    return plans


def held_by(firsts: list[PrefillChunk], rests: list[PrefillChunk], plans: list[StepPlan], slab: int) -> tuple[int, ...]:
    """Pages of the sequence of a slab."""
    chunks = [*firsts, *rests, *(chunk for plan in plans for chunk in plan.chunks)]
    return tuple(next(chunk.pages for chunk in chunks if chunk.slab == slab))


async def run_cold(directory: Path, seed: int) -> list[Outcome]:
    device = await open_torch_device(group_config(directory, 1, prefill_chunk_tokens=96), ignore, poison=True)
    outcomes = await run_schedule(device, make_schedule(seed, warm=False))
    await device.aclose()
    return outcomes


@pytest.mark.parametrize("seed", [2, 5, 8])
async def test_a_step_on_kept_state_breaks_and_runs_again(checkpoint: Path, seed: int) -> None:
    """Broken in each of the steps, before the last layer and in it, found by either member; then again, at once."""
    size, hub = 2, Hub()
    seeds = [seed, seed + 1]
    schedules = [make_schedule(each, warm=True) for each in seeds]
    longest = max(map(len, schedules))
    for plans in schedules:
        plans += [StepPlan(IDLE_STEP, (), ())] * (longest - len(plans))
    wanted = [await run_alone(checkpoint, plans) for plans in schedules]
    cold = [await run_cold(checkpoint, each) for each in seeds]
    told = [0] * size
    outcomes: list[list[Outcome]] = [[] for _ in range(size)]
    breaks_left = [(layer, phase) for layer in (3, 7) for phase in (1, 2)] * 4
    planned = len(breaks_left)
    hit: list[int] = []
    async with open_group(checkpoint, size, hub) as group:
        main = random_placement(group.lay_out()[0], size, replicas=10)

        def breaks(number: int, key: Key, place: int) -> bool:
            if number > planned or place != number % size or key[1:] != (0, *breaks_left[number - 1]):
                return False
            # Every third time the same step runs into it again.
            if key[0] < (number % 3 != 0):
                return False
            hit.append(number)
            return True

        hub.breaks = breaks
        await group.join(group.name(main))
        async with trio.open_nursery() as nursery:

            def on_broken(place: int, broken: GroupBroken) -> None:
                told[place] += 1
                if told == [group.number] * size:
                    nursery.start_soon(group.join, group.name(main))

            found = await run_group(
                group,
                schedules,
                on_result=lambda place, result: outcomes[place].append((result.chunk_tokens, result.row_tokens)),
                on_broken=on_broken,
            )
        assert len(hit) >= longest // 2 and told == [len(hit)] * size
    assert found == [digest for digest, _ in wanted]
    for place in range(size):
        assert outcomes[place][: len(cold[place])] == cold[place]
