"""Groups of real ranks: the tokens of one rank, experts that move under load, ranks that are lost.

What holds in every run, bit for bit and without exceptions: all texts are those of one rank, or of an undisturbed run
of the same group; no rank skips a step of its group, and all switch placements in the same one. Figures are recorded by
`groups_table.py`; here are a minute of it, and the rest is marked slow.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from engine.actors.client import Row
from engine.faces.admin import ActRefused, open_operator
from tests.e2e.batch_process import find_left
from tests.e2e.grouped import (
    FRESH_STEPS,
    IDLE_S,
    GroupedCluster,
    Pool,
    Told,
    check_steps,
    find_flips,
    measure_idle,
    measure_pairs,
    open_grouped,
)
from tests.e2e.grouplosses import begin_move, check_loss, run_loss
from tests.e2e.prompts import cut, fresh_seed, random_ids, text_ids
from tests.e2e.requester import make_row
from tests.e2e.traffic import MAX_TOKENS, Traffic, code_ids, make_code_prompts
from transport.messages import Sampling
from transport.nixl_fabric import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")
slow = pytest.mark.slow
LONG, SHORT = 40, 2
MOST_TOKENS = 96
SLOWLY = ("experts.main.max_bytes_per_step=16KiB",)
"""A slot of the bundled model in a dozen steps."""


def make_uneven(rng: random.Random, count: int, ranks: int) -> list[Row]:
    """Requests that the head deals out in turn, so that one rank has all the long ones: of ranks with as many requests
    it takes the one with the fewest pages. Every third is sampled."""
    rows = []
    for number in range(count):
        length = rng.choice([1, 2, 40, 63, 64, 65] if number % ranks == 0 else [129, 191, 256, 300])
        prompt = cut(rng, rng.choice([code_ids(), text_ids()]), length) if number % 2 else random_ids(rng, length)
        row = make_row(prompt, LONG if number % ranks == 0 else SHORT + number % 3)
        if number % 3 == 2:
            row.sampling = Sampling(0.8, 0.95, 50, rng.randrange(1 << 30), row.sampling.max_tokens, 0, True)
        rows.append(row)
    return rows


async def answer(cluster: GroupedCluster, rows: Sequence[Row]) -> dict[int, int]:
    """Submits them all at once and waits; decode rank to tokens that it generated."""
    for row in rows:
        await cluster.book.submit(row)
    await cluster.inner.finish(list(rows), 240)
    assert not cluster.book.failures
    count: dict[int, int] = {}
    for row in rows:
        assert row.started is not None and len(row.generated) == row.sampling.max_tokens
        count[row.started.decode_rank] = count.get(row.started.decode_rank, 0) + len(row.generated)
    return count


SHAPES = [
    pytest.param(2, 2, ("prefill", "decode"), id="DEP2-prefill-and-decode"),
    pytest.param(1, 4, ("decode",), id="DEP4-decode", marks=slow),
]


@pytest.mark.parametrize(("prefill", "decode", "groups"), SHAPES)
async def test_a_group_gives_the_tokens_of_one_rank(
    prefill: int, decode: int, groups: Sequence[Pool], tmp_path: Path
) -> None:
    seed = fresh_seed()
    sets = ("num_pages=200", "limits.prefill_chunk_tokens=128")
    texts: list[list[list[int]]] = []
    for shape in ((1, 1, ()), (prefill, decode, groups)):
        rng = random.Random(seed)
        rows = make_uneven(rng, 50, decode)
        async with open_grouped(
            tmp_path / "log", prefill=shape[0], decode=shape[1], groups=shape[2], sets=sets
        ) as cluster:
            count = await answer(cluster, rows)
            # One after another, so that all other ranks are idle meanwhile.
            singles = [make_row(random_ids(rng, length), 8) for length in (1, 64, 130)]
            for row in singles:
                await answer(cluster, [row])
            if shape[2]:
                ranks = range(prefill, prefill + decode)
                await cluster.settle(ranks)
                assert check_steps({life: steps for life, steps in cluster.lives().items() if life[0] in ranks}) > LONG
                assert len(count) == decode and max(count.values()) > 8 * min(count.values()), f"even loads: {count}"
        texts.append([list(row.generated) for row in [*rows, *singles]])
    wrong = [number for number, (one, many) in enumerate(zip(*texts, strict=True)) if one != many]
    assert not wrong, f"requests {wrong} have other tokens than from one rank"


@pytest.mark.parametrize(
    ("decode", "width", "least_skew"), [pytest.param(2, 8, 1.05), pytest.param(4, 12, 1.2, marks=slow)]
)
async def test_experts_move_under_load_and_back(decode: int, width: int, least_skew: float, tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    ranks = range(1, decode + 1)
    async with open_grouped(
        tmp_path / "log", decode=decode,
        sets=("experts.main.max_bytes_per_step=1MiB", "experts.main.loads=250ms", "num_pages=96"),
    ) as cluster:  # fmt: skip
        prompts = make_code_prompts(rng, 6)
        await cluster.inner.learn(prompts, MOST_TOKENS)
        traffic = Traffic(cluster.inner, prompts, width)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run, MOST_TOKENS)
            start = await cluster.ask_ranks(ranks)
            await cluster.wait_loads(100)
            old = await cluster.ask_ranks(ranks)
            plan = (await cluster.act("plan")).report.plan
            assert plan.pays and plan.before.max_over_mean > least_skew, plan
            assert plan.after.max_over_mean < plan.before.max_over_mean
            seen = measure_pairs(start, old)
            assert abs(seen - plan.before.max_over_mean) < 0.3 * (seen - 1), f"{seen} was computed, plan says {plan}"

            await cluster.act("apply", plan=plan.plan)
            done = await cluster.wait_moved()
            assert done.result == "applied" and done.moved_slots == plan.moved_slots
            moved = await cluster.ask_ranks(ranks)
            past = await cluster.wait_measured()
            fresh = await cluster.ask_ranks(ranks)
            drop = plan.before.max_over_mean - plan.after.max_over_mean
            assert past.realised >= 0.8, past
            assert seen - measure_pairs(moved, fresh) >= 0.8 * drop, f"{measure_pairs(moved, fresh)} after {plan}"

            await cluster.act("rollback")
            assert (await cluster.wait_moved()).result == "rolled_back"
            back = await cluster.ask_ranks(ranks)
            traffic.stop()
        cluster.inner.check_texts(traffic.rows)
        check_weights([*old, *moved, *back], "main")
        assert [set(told.experts("main")) for told in back] == [set(told.experts("main")) for told in old]
        assert [set(told.experts("main")) for told in moved] != [set(told.experts("main")) for told in old]
        await cluster.settle(ranks)
        assert check_steps(cluster.lives()) > FRESH_STEPS
        flips = [find_flips(cluster.steps(rank), 0) for rank in ranks]
        assert flips[0] and all(flip == flips[0] for flip in flips), f"ranks switched in different steps: {flips}"


def check_weights(told: Sequence[Told], part: str) -> None:
    """Every copy of an expert, wherever and whenever it was seen, has the same bytes."""
    digests: dict[int, set[str]] = {}
    for one in told:
        for key, digest in one.experts(part).items():
            digests.setdefault(key, set()).add(digest)
    assert digests and all(len(found) == 1 for found in digests.values()), "copies of an expert differ"


@slow
async def test_parts_move_independently_and_at_the_same_time(tmp_path: Path) -> None:
    """Each part by its own loads: steps have drafts here, so rows go through the drafter's experts as well."""
    rng = random.Random(fresh_seed())
    ranks = range(1, 3)
    sets = (*SLOWLY, "experts.draft.max_bytes_per_step=32KiB", "num_pages=96")
    async with open_grouped(tmp_path / "log", sets=sets) as cluster:
        prompts = make_code_prompts(rng, 4)
        await cluster.inner.learn(prompts, MAX_TOKENS)
        traffic = Traffic(cluster.inner, prompts, 6)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            await cluster.wait_loads(60)
            old = await cluster.ask_ranks(ranks)
            for _ in range(2):  # there and, as nothing is left to be gained, back
                slots = [await begin_move(cluster, part) for part in ("main", "draft")]
                assert all(slots), slots
                states = [(await cluster.part(part=part)).state for part in ("main", "draft")]
                assert states == ["moving", "moving"]
                for part in ("main", "draft"):
                    assert (await cluster.wait_moved(part)).result in ("applied", "rolled_back")
            back = await cluster.ask_ranks(ranks)
            traffic.stop()
        cluster.inner.check_texts(traffic.rows)
        await cluster.settle(ranks)
        check_steps(cluster.lives())
        for part in (0, 1):
            flips = [find_flips(cluster.steps(rank), part) for rank in ranks]
            assert len(flips[0]) >= 2 and all(flip == flips[0] for flip in flips), f"part {part}: {flips}"
        for part in ("main", "draft"):
            check_weights([*old, *back], part)


@slow
async def test_an_act_on_a_part_that_moves_is_refused_in_words(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    async with open_grouped(tmp_path / "log", sets=(*SLOWLY, "num_pages=96")) as cluster:
        prompts = make_code_prompts(rng, 4)
        await cluster.inner.learn(prompts, MAX_TOKENS)
        traffic = Traffic(cluster.inner, prompts, 6)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            await cluster.wait_loads(60)
            plan = (await cluster.act("plan")).report.plan.plan
            answers: list[str] = []

            async def apply() -> None:
                try:
                    answers.append((await cluster.act("apply", plan=plan)).done)
                except ActRefused as refusal:
                    answers.append(f"refused: {refusal}")

            async with trio.open_nursery() as both:
                both.start_soon(apply)
                both.start_soon(apply)
            refused = [words for words in answers if words.startswith("refused: ")]
            # Whose it is, as the kernel knows him.
            assert len(refused) == 1 and re.search(rf"plan {plan} of \S+@", refused[0]), answers
            with pytest.raises(ActRefused, match="is being carried out"):
                await cluster.act("plan")
            with pytest.raises(ActRefused, match="is being carried out"):
                await cluster.act("rollback")
            await cluster.act("abort")
            assert (await cluster.wait_moved()).result == "failed"
            traffic.stop()
        cluster.inner.check_texts(traffic.rows)
        await cluster.settle([1, 2])
        check_steps(cluster.lives())


LOSSES = [
    pytest.param(2, 96, "kill", "load", id="DEP2-spare", marks=()),
    pytest.param(4, 16, "kill", "load", id="DEP4-spare", marks=slow),
    pytest.param(4, 0, "kill", "load", id="DEP4-no-spare", marks=slow),
    pytest.param(4, 16, "stop", "load", id="DEP4-stopped", marks=slow),
    pytest.param(4, 24, "kill", "move", id="DEP4-moving", marks=slow),
]


@pytest.mark.parametrize(("decode", "spare", "action", "moment"), LOSSES)
async def test_a_group_outlives_the_loss_of_a_rank(
    decode: int, spare: int, action: str, moment: str, tmp_path: Path
) -> None:
    rng = random.Random(fresh_seed())
    sets = (f"experts.main.spare_slots={spare}", f"experts.draft.spare_slots={spare}", "num_pages=96", *SLOWLY)
    async with open_grouped(tmp_path / "log", decode=decode, sets=sets) as cluster:
        prompts = make_code_prompts(rng, 4)
        await cluster.inner.learn(prompts, MAX_TOKENS)
        ranks = range(1, decode + 1)
        loss = await run_loss(cluster, ranks, prompts, rng, width=2 * decode, action=action, moment=moment)  # type: ignore[arg-type]
        check_loss(loss)
        if moment == "load":  # replicas that a move made may fill the spare slots
            assert loss.took_over == (spare > 0), loss
        await cluster.settle(ranks)
        check_steps(cluster.lives())
        check_weights(await cluster.ask_ranks(ranks), "main")


@slow
async def test_a_prefill_group_outlives_the_loss_of_a_rank(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    sets = ("experts.main.spare_slots=96", "experts.draft.spare_slots=96", "num_pages=96")
    async with open_grouped(tmp_path / "log", prefill=2, decode=1, groups=("prefill",), sets=sets) as cluster:
        prompts = make_code_prompts(rng, 4)
        await cluster.inner.learn(prompts, 16)
        rows: list[Row] = []
        victim = rng.randrange(2)
        pid = (await cluster.pids())[victim]
        for prompt in itertools.islice(itertools.cycle(prompts), 24):
            rows.append(await cluster.book.submit(make_row(prompt, 16)))
        await cluster.inner.wait_until(lambda: any(cluster.book.news[row] for row in rows), "prompts are computed")
        os.kill(pid, signal.SIGKILL)
        await cluster.inner.finish(rows, 120)
        cluster.inner.check_texts(rows)
        await cluster.inner.wait_free({victim: 2})
        await cluster.wait_state("idle", "prefill")
        again = [await cluster.book.submit(make_row(prompt, 16)) for prompt in prompts]
        await cluster.inner.finish(again, 60)
        cluster.inner.check_texts(again)
        await cluster.settle([0, 1])
        check_steps({life: steps for life, steps in cluster.lives().items() if life[0] < 2})


@slow
async def test_nothing_is_left_of_a_group_whose_head_is_killed_in_a_move(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    async with open_grouped(tmp_path / "log", sets=(*SLOWLY, "num_pages=96")) as cluster:
        traffic = Traffic(cluster.inner, make_code_prompts(rng, 4), 6)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            await cluster.wait_loads(60)
            await begin_move(cluster)
            assert (await cluster.part()).state == "moving"
            nursery.cancel_scope.cancel()
        os.kill(cluster.inner.head_pid, signal.SIGKILL)
        assert not await find_left(cluster.inner.mark, 10)


@slow
async def test_a_parked_group_rests_and_wakes(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    async with open_grouped(
        tmp_path / "log", prefill=2, decode=2, groups=("prefill", "decode"), sets=("num_pages=96",)
    ) as cluster:
        prompts = make_code_prompts(rng, 3)
        await cluster.inner.learn(prompts, 16)
        for prompt in prompts:
            await cluster.settle(range(4))
            steps = [len(cluster.steps(rank)) for rank in range(4)]
            used_s = await measure_idle(cluster)
            # An idle rank that has no group takes as much: snapshots, and the threads of fabric and probe.
            assert max(used_s) < 0.1, f"a parked rank takes {used_s} s of {IDLE_S} s"
            assert [len(cluster.steps(rank)) for rank in range(4)] == steps, "a parked group steps"
            row = await cluster.book.submit(make_row(prompt, 16))
            await cluster.inner.finish([row], 60)
            cluster.inner.check_texts([row])
        await cluster.settle(range(4))
        lives = cluster.lives()
        for ranks in ((0, 1), (2, 3)):
            check_steps({life: steps for life, steps in lives.items() if life[0] in ranks})


@slow
async def test_a_group_is_drained_with_all_its_answers(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    async with open_grouped(
        tmp_path / "log", prefill=2, decode=4, groups=("prefill", "decode"), sets=("num_pages=96",)
    ) as cluster:
        prompts = make_code_prompts(rng, 4)
        await cluster.inner.learn(prompts, 48)
        rows = [await cluster.book.submit(make_row(prompt, 48)) for prompt in prompts * 2]
        await cluster.inner.wait_until(lambda: all(row.generated for row in rows), "all run", 60)
        async with open_operator(str(cluster.directory / "admin.sock")) as head:
            await head.ask_shutdown(60_000, "a test")
        with trio.fail_after(90):
            while not cluster.book.done.issuperset(rows):  # noqa: ASYNC110
                await trio.sleep(0.02)
        cluster.inner.check_texts(rows)
        assert not cluster.book.failures
        assert not await find_left(cluster.inner.mark, 20)
        lives = cluster.lives()
        for ranks in ((0, 1), (2, 3, 4, 5)):
            ended = {life: steps for life, steps in lives.items() if life[0] in ranks}
            check_steps(ended)
            assert all(steps[-1].stop for steps in ended.values()), "a rank left before its group had agreed to stop"
