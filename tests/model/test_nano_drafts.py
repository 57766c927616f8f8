"""The bundled model with its own drafter, and how well its drafts hold by either rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import engine.nano
from engine.errors import ConfigError
from engine.nano.acceptance import DRAWN, Bench, Tally, main
from tests.e2e.prompts import text_ids
from tests.e2e.truth import load_nano
from tests.model.paged_cases import Source, small_v4_config, write_checkpoint
from tests.model.speculation_cases import Host, Request, open_device, run_host
from transport.messages import Sampling

PAGE = 64
NANO = Path(engine.nano.__file__).parent


def make_requests(eos: int) -> list[Request]:
    """Text that goes on; ends at and around a page, and at the window's."""
    ids = text_ids()
    settings = [
        Sampling(ignore_eos=True),
        Sampling(),
        Sampling(temperature=0.7, seed=3, top_p=0.95),
        Sampling(temperature=0.7, seed=4, ignore_eos=True),
        Sampling(temperature=1.0, seed=5, top_k=50, stop_ids=(eos, 13)),
        Sampling(repetition_penalty=1.1, logprobs=3),
    ]
    requests, used = [], 0
    for slab, (length, sampling) in enumerate(zip((1, 40, 63, 64, 100, 127), settings, strict=True)):
        limit = 28
        count = -(-(length + limit) // PAGE)
        prompt = np.array(ids[97 * slab : 97 * slab + length], np.int64)
        requests.append(Request(slab, tuple(range(used, used + count)), prompt, sampling, limit))
        used += count
    return requests


async def test_its_texts_are_those_without_drafts_and_take_fewer_steps() -> None:
    shape, weights, tables = load_nano()
    source, eos = Source(shape, weights, tables), shape.eos_token_id
    plain = make_requests(eos)
    device = open_device(source, plain, None, eos, page_tokens=PAGE)
    host = Host(plain, (eos,), [0], 1, begin=len(plain))
    await run_host(device, host)
    await device.aclose()
    for drafts in (3, 5):
        device = open_device(source, plain, "own", eos, page_tokens=PAGE)
        host = Host([request.again() for request in plain], (eos,), [drafts], 1)
        await run_host(device, host)
        await device.aclose()
        for found, wanted in zip(host.requests, plain, strict=True):
            assert found.text == wanted.text
            assert found.scored == wanted.scored
        rows = sum(host.figures.accepted.values())
        # Without drafts, and in each sequence's first row with them, a row brings one token.
        assert sum(held for _, held in host.figures.accepted.elements()) > 0.33 * rows


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(1)
    ids = text_ids()
    return Bench(NANO, [ids[start : start + 50] for start in (0, 300, 600)], 24)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_measured_adds_up(bench: Bench, temperature: float) -> None:
    filled = bench.fill(temperature)
    held: dict[str, float] = {}
    for rule in DRAWN if temperature else DRAWN[:2]:
        tally = bench.run(rule, 3, *filled)
        assert tally.reached[0] == tally.steps
        assert (tally.held <= tally.reached).all()
        assert (tally.reached[1:] <= tally.held[:-1]).all()
        assert tally.tokens <= tally.steps + tally.held.sum()
        assert tally.tokens <= 3 * (24 + 3)
        again = bench.run(rule, 3, *filled)
        assert again.report() == tally.report()
        held[rule.name] = float(tally.held.sum())
    assert all(value > 0 for value in held.values()), held


def test_steps_that_end_in_a_draft_do_not_judge_the_next_one() -> None:
    tally = Tally(np.zeros(3, np.int64), np.zeros(3, np.int64))
    tally.add(2, 3)
    tally.add(2, 2)
    tally.add(0, 1)
    tally.add(3, 4)
    assert tally.reached.tolist() == [4, 3, 2] and tally.held.tolist() == [3, 3, 1]
    assert tally.report() == {"tokens_per_step": 2.5, "per_position": [0.75, 1.0, 0.5], "steps": 4}


def test_without_held_out_text_the_samples_are_continued(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompts", "1", "--new-tokens", "4", "--drafts", "2"]) == 0
    out = capsys.readouterr().out
    assert '"chat": 1' in out and '"equal, coupled"' in out and '"prose"' not in out


def test_a_model_without_drafter_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config=small_v4_config())
    with pytest.raises(ConfigError, match="has no drafter"):
        Bench(tmp_path, [[3, 4, 5]], 4)
