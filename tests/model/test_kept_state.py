"""State that was kept at any position goes on as its prompt would have: bit for bit, through all that follows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from engine.core.plan import Base, StepPlan
from engine.errors import DeviceError
from tests.e2e.prompts import text_ids
from tests.e2e.truth import load_nano
from tests.model.conftest import Golden
from tests.model.kept_cases import SETTINGS, Bench, Cut, Told, same_logits
from tests.model.paged_cases import Source, random_ids, random_model, small_config, smallest_page
from tests.model.speculation_cases import read_scores
from tests.model.test_paged_drafts import small_v4_block_config, source_of

EOS = 7
SIZES = [[1], [3], [8], [9], [16], [40], [1, 9, 8, 33]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its page, and text of it."""

    source: Source
    page: int
    ids: np.ndarray


@pytest.fixture(scope="module", params=["v4.1", "v4 blocks", "nano", "v4 golden"])
def case(request: pytest.FixtureRequest, golden: Callable[[str], Golden]) -> Case:
    if request.param == "nano":
        return Case(Source(*load_nano()), 64, np.array(text_ids()[:600], np.int64))
    if request.param == "v4 golden":
        # Entries of 4 and of 128 tokens, and the layer that predicts ahead.
        source = source_of(golden("v4-tiny"))
    else:
        source = random_model(seed=3, config=small_config() if request.param == "v4.1" else small_v4_block_config())
    return Case(source, smallest_page(source.shape), random_ids(600, source.shape.vocab_size, seed=1))


def tail(case: Case, length: int, seed: int) -> np.ndarray:
    return random_ids(length, case.source.shape.vocab_size, seed=1000 + seed)


async def check_answer(bench: Bench, ids: np.ndarray, turn: int, cut: Cut, new_tokens: int = 4) -> None:
    """One prompt on a cut, and from its first id in other memory."""
    sampling, marks = SETTINGS[turn % len(SETTINGS)], bench.marks
    found: list[Told] = []
    logits = []
    for base, sizes in ((cut, SIZES[turn % len(SIZES)]), (None, [320])):
        bench.logits.clear()
        found.append(await bench.answer(ids, sampling, sizes, new_tokens, base))
        # The last chunk's, and those of all later passes.
        logits.append([part for part in bench.logits if len(part)])
    assert found[0] == found[1], f"cut at {cut.at}"
    assert any(found[0].drafts), "nothing was drafted"
    assert same_logits(*logits), f"cut at {cut.at}"
    bench.recycle(*marks)


async def test_every_offset_in_a_page(case: Case) -> None:
    """A prompt computed id by id, its state kept behind each; another one goes on from there with other ids."""
    most = case.page + 6
    bench = Bench(case.source, page_tokens=case.page, pages=4 * (2 * most // case.page + 8), slabs=5, eos=EOS)
    prompt = case.ids[: most + 1]
    slab, pages = bench.place(len(prompt), None)
    keep = bench.new_slab()
    for at in range(1, most + 1):
        await bench.run([bench.chunk(prompt, slab, pages, at - 1, at, None, keep=keep)])
        # All lengths from one id on, some of them past the end of the next page.
        own = 1 + at % 7 if at % 5 else case.page // 2 + at % 11
        own = min(own, 90)
        ids = np.concatenate((prompt[:at], tail(case, own, at)))
        await check_answer(bench, ids, at, Cut(prompt, at, keep, pages))
    await bench.device.aclose()


@pytest.mark.parametrize("size", [9, 64, 200])
async def test_a_prompts_end_is_a_base_whatever_chunk_it_ended_with(case: Case, size: int) -> None:
    """Kept behind the sampled first token, as prompts do it; a prompt goes on with that token, or with another."""
    bench = Bench(case.source, page_tokens=case.page, pages=4 * (260 // case.page + 2), slabs=5, eos=EOS)
    for turn, length in enumerate((3, 4, 40, 127, 128, 129, 200)):
        marks = bench.marks
        prompt = case.ids[:length]
        slab, pages = bench.place(length, None)
        keep = bench.new_slab()
        for start in range(0, length, size):
            end = min(start + size, length)
            last = end == length
            result = await bench.run(
                [bench.chunk(prompt, slab, pages, start, end, SETTINGS[0], keep=keep if last else -1)]
            )
        (token,) = result.chunk_tokens
        assert token is not None
        arena = bench.device.model.arena
        kept = arena.slab_bytes_of(keep).clone()
        # What the prompt's own slab becomes later is nothing to the kept one.
        arena.slab_bytes_of(slab).fill_(0xFF)
        for first in (token, (token + 1) % 250):
            ids = np.concatenate((prompt, [first], tail(case, 20 + turn, turn)))
            await check_answer(bench, ids, turn, Cut(prompt, length, keep, pages), 3)
        assert bool((arena.slab_bytes_of(keep) == kept).all())
        bench.recycle(*marks)
    await bench.device.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_trees_of_prompts_many_in_a_step(case: Case, seed: int) -> None:
    """Prompts on bases that went on from bases themselves, several on one base in one step, others beside them."""
    rng = random.Random(seed)
    bench = Bench(case.source, page_tokens=case.page, pages=60 + 1800 // case.page, slabs=120, eos=EOS)
    cuts = [Cut(case.ids[:0], 0, -1, ())]
    asked: list[tuple[np.ndarray, Told, int]] = []
    for turn in range(5):
        waiting = []
        favourite = rng.choice(cuts)
        for number in range(3):
            cut = favourite if rng.random() < 0.6 else rng.choice(cuts)
            own = rng.choice([1, 2, 7, 8, 9, 31, 40])
            ids = np.concatenate((cut.ids[: cut.at], tail(case, own, 100 * seed + 10 * turn + number)))
            slab, pages = bench.place(len(ids) + 12, cut)
            waiting.append((ids, cut, slab, pages, rng.choice(SIZES), 3 * turn + number))
        at = [cut.at for _, cut, *_ in waiting]
        tokens: dict[int, Told] = {}
        while any(at[n] < len(waiting[n][0]) for n in range(3)):
            chunks, who = [], []
            for n, (ids, cut, slab, pages, sizes, mode) in enumerate(waiting):
                if at[n] == len(ids):
                    continue
                start, at[n] = at[n], min(at[n] + rng.choice(sizes), len(ids))
                base = cut.base(case.page) if start == cut.at and start else None
                keep = bench.new_slab() if at[n] == len(ids) or rng.random() < 0.3 else -1
                sampling = SETTINGS[mode % len(SETTINGS)]
                chunks.append(bench.chunk(ids, slab, pages, start, at[n], sampling, base=base, keep=keep))
                who.append((n, keep))
            result = await bench.run(chunks)
            for place, (n, keep) in enumerate(who):
                ids, _, slab, pages, _, mode = waiting[n]
                if keep >= 0:
                    cuts.append(Cut(ids, at[n], keep, pages))
                token = result.chunk_tokens[place]
                if token is not None:
                    tokens[n] = Told(token, [{0: read_scores(result.chunk_scores).get(place)}])
        for n, (ids, _, slab, pages, _, mode) in enumerate(waiting):
            if rng.random() < 0.5:
                # Its answer, too: of cuts nothing may change with it, of its pages only those past its prompt.
                await bench.decode(tokens[n], SETTINGS[mode % len(SETTINGS)], slab, pages, len(ids), 4)
            asked.append((ids, tokens[n], mode))
    await bench.device.aclose()
    assert sum(cut.at % case.page > 0 for cut in cuts) > 5
    cold = Bench(case.source, page_tokens=case.page, pages=240 // case.page + 4, slabs=2, eos=EOS)
    for ids, told, mode in asked:
        marks = cold.marks
        wanted = await cold.answer(ids, SETTINGS[mode % len(SETTINGS)], [64], 4 if told.tokens else 0)
        wanted.chunk_scores = [{0: read_first(wanted)}]
        assert told == wanted
        cold.recycle(*marks)
    await cold.device.aclose()


def read_first(told: Told) -> object:
    """What was told of the first token."""
    (scores,) = told.chunk_scores
    assert isinstance(scores, dict)
    return scores.get(0)


async def test_what_can_not_be_a_base_is_refused(case: Case) -> None:
    page = case.page
    bench = Bench(case.source, page_tokens=page, pages=8, slabs=4, eos=EOS)
    ids = case.ids[: page + 9]
    inside, full = (0, 1), (2, 3)

    def chunk(start: int, base: Base | None = None, keep: int = -1, slab: int = 0) -> StepPlan:
        one = bench.chunk(ids, slab, inside, start, start + 2, None, base=base, keep=keep)
        other = bench.chunk(ids, 1, full, 0, 3, None)
        return StepPlan(1, (one, other), ())

    wrong = [
        (chunk(5, Base(4, 7)), "outside the slabs 0..3: 4"),
        (chunk(5, Base(-1, 7)), "outside the slabs 0..3: -1"),
        (chunk(5, Base(0, 7)), "slab 0 is the base of a chunk, and written in the same step"),
        (chunk(5, Base(1, 7)), "slab 1 is the base of a chunk, and written"),
        (chunk(5, Base(2, 7), 2), "slab 2 is the base of a chunk, and written"),
        (chunk(5, None, 1), "slab 1 is to keep state, and something else"),
        (chunk(0, Base(2)), "begins at position 0 has nothing to go on from"),
        (chunk(5, Base(2)), r"begins inside a page \(5\) and its base has page -1"),
        (chunk(page, Base(2, 7)), rf"begins at a page's start \({page}\) and its base has page 7"),
        (chunk(5, Base(2, 8)), "a base's page is outside 0..7: 8"),
        (chunk(5, Base(2, 1)), "page 1 is a base, and the chunk's own"),
    ]
    for plan, words in wrong:
        with pytest.raises(DeviceError, match=words):
            bench.device._runner.begin(copy(plan))
    await bench.device.aclose()


def copy(plan: StepPlan):  # type: ignore[no-untyped-def]
    from engine.model.passes import copy_plan

    return copy_plan(plan)
