"""Drafting with the bundled model and real processes: the texts are those without it, also where ranks die; with
rejection those that are not drawn."""

from __future__ import annotations

import os
import random
import re
import signal
from array import array
from pathlib import Path

import pytest
from llguidance import LLMatcher

from engine.actors.client import Row
from tests.batch.rig import codec
from tests.e2e.faulty import FaultyCluster, open_cluster
from tests.e2e.prompts import fresh_seed, random_ids, text_ids
from transport.messages import Sampling

NUM, MOST_TOKENS = 32, 24
SETS = ("draft.max_rows=4", "limits.decode_rows=4")
FORM = r"[a-z]{4,8}(, [a-z]{4,8}){9,14}\."
GROUP = ("pools.decode.ranks=2", "pools.decode.group=2")


def make_rows(seed: int) -> list[Row]:
    """Greedy and sampled ones of text and of chance, some with ends of their own and minima."""
    rng, text = random.Random(seed), text_ids()
    rows = []
    for number in range(NUM):
        length = rng.choice((1, 5, 63, 64, 65, 130))
        first = rng.randrange(len(text) - length)
        prompt = random_ids(rng, length) if number % 5 == 0 else list(text[first : first + length])
        sampling = Sampling(
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            seed=number,
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            max_tokens=rng.randrange(8, MOST_TOKENS + 1),
            min_tokens=rng.choice((0, 0, 6)),
            stop_ids=tuple(rng.sample(text, 2)) if rng.random() < 0.3 else (),
            ignore_eos=rng.random() < 0.5,
        )
        rows.append(Row(array("i", prompt).tobytes(), sampling))
    return rows


async def answer(cluster: FaultyCluster, seed: int) -> list[Row]:
    rows = [await cluster.book.submit(row) for row in make_rows(seed)]
    await cluster.finish(rows, within_s=120)
    return rows


def texts_of(rows: list[Row]) -> list[list[int]]:
    return [list(row.generated) for row in rows]


@pytest.fixture(scope="module")
def seed() -> int:
    return fresh_seed()


@pytest.fixture(scope="module")
def without() -> dict[int, list[list[int]]]:
    """Seed to texts without drafts, kept from test to test."""
    return {}


async def learn(without: dict[int, list[list[int]]], seed: int, log: Path) -> list[list[int]]:
    if seed not in without:
        async with open_cluster(log, prefill=1, decode=1, sets=("draft.tokens=0", *SETS)) as cluster:
            without[seed] = texts_of(await answer(cluster, seed))
            assert (await cluster.status()).drafted.proposed == 0
    return without[seed]


@pytest.mark.parametrize("layout", [(), GROUP], ids=["alone", "group"])
async def test_texts_are_those_without_drafts(
    layout: tuple[str, ...], seed: int, without: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    wanted = await learn(without, seed, tmp_path / "plain.log")
    async with open_cluster(tmp_path / "log", prefill=1, decode=1, sets=("draft.tokens=3", *SETS, *layout)) as cluster:
        assert texts_of(await answer(cluster, seed)) == wanted
        report = await cluster.wait_free({})
        assert report.drafted.accepted > NUM and report.drafted.accepted_at[3:] == (0, 0, 0, 0)

        # The same again; some are given up in the middle, and then a decode rank dies.
        rows = [await cluster.book.submit(row) for row in make_rows(seed)]
        await cluster.wait_until(lambda: sum(len(row.generated) > 2 for row in rows) > 8, "some have begun")
        for row in rows[1::6]:
            cluster.book.give_up(row)
        victim = next(rank for rank in report.ranks if rank.role == "decode")
        os.kill(victim.pid, signal.SIGKILL)
        await cluster.finish(rows, within_s=120)
        for row, text in zip(rows, wanted, strict=True):
            got = list(row.generated)
            assert got == (text[: len(got)] if row in cluster.book.given_up else text)
        assert sum(row not in cluster.book.given_up for row in rows) >= NUM - 10
        report = await cluster.wait_free({victim.rank: victim.generation + 1})
        # Figures of the life that is over count on.
        assert report.drafted.proposed > sum(r.snapshot.drafted.proposed for r in report.ranks if r.snapshot)


async def test_rejected_drafts_leave_greedy_texts_and_forms_as_they_are(
    seed: int, without: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    """Drawn texts depend on what was drafted, so of them only their limits are known. Among all these are requests with
    a grammar, some of which are given up in the middle: their guides go, and their memory comes back."""
    wanted = await learn(without, seed, tmp_path / "plain.log")
    form = LLMatcher.grammar_from_regex(FORM)
    sets = ("draft.tokens=3", "draft.acceptance=rejection", *SETS)
    async with open_cluster(tmp_path / "log", prefill=1, decode=1, sets=sets) as cluster:
        book = cluster.book
        plain = list(zip(make_rows(seed), wanted, strict=True))[:14]
        prompts = [array("i", text_ids()[40 * number :][:30]).tobytes() for number in range(4)]
        formed = [
            Row(prompt, Sampling(1.0, seed=number, max_tokens=200, grammar=form))
            for number, prompt in enumerate(prompts)
        ]
        rows = [row for row, _ in plain]
        for row in (*rows[:4], *formed, *rows[4:]):
            await book.submit(row)
        await cluster.wait_until(lambda: any(len(row.generated) > 4 for row in formed[:2]), "a form has begun")
        left = formed[::2]
        for row in left:
            book.give_up(row)
        await cluster.finish([*rows, *formed], within_s=60)
        for row, text in plain:
            got, sampling = list(row.generated), row.sampling
            if not sampling.temperature:
                assert got == text
            assert sampling.min_tokens <= len(got) <= sampling.max_tokens
        for row in formed:
            if row not in left:
                assert re.fullmatch(FORM, codec().decode(list(row.generated[:-1])))
        assert any(len(row.generated) < 20 for row in left), "none was given up in time"
        report = await cluster.wait_free({})
        assert report.drafted.accepted > 20 and report.drafted.rows > 50
