"""Rejection sampling of drafts as it is served: the Decoder with drawn drafts, by distribution, tables and accounts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model import rejection
from engine.model.decoding import Decode, Decoded
from engine.model.penalties import count_ids
from engine.model.rejection import Guesses, judge_guesses
from engine.model.sampling import process_logits
from tests.model.rejection_rig import Lines, Memory, Script, open_decoder
from tests.model.test_exact_sampling import CASES, DRAWS, FALSE_ALARM, SEEN, VOCAB, define, logits_of, p_value
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]
TABLES = load_file(str(Path(__file__).parents[1] / "oracle" / "spec" / "tables.safetensors"))
SERVED = ("plain", "cold", "all cuts", "frequency", "everything")


def serve(name: str, sequences: int, drafts: int) -> Decoded:
    """Two steps of so many sequences: the first has drafts proposed, the second judges them."""
    sampling = tuple([_with_seed(CASES[name], seed) for seed in range(sequences)])
    memory = Memory(sequences)
    target = Lines(memory, torch.from_numpy(logits_of(name))[None, None], 1)
    own = torch.from_numpy(np.random.default_rng(9).normal(0, 1, VOCAB).astype(np.float32))
    decoder = open_decoder(memory, target, Script(own.expand(1, drafts, -1)))
    slabs = np.arange(sequences)
    zeros = np.zeros(sequences, np.int64)

    def step(position: int, token: int) -> Decoded:
        decode = Decode(slabs, zeros + position, zeros + token, zeros[:, None], zeros + 1, sampling, None, drafts)
        decoded = decoder.run(decode)
        decoder.propose(decoded.wanted, drafts)
        return decoded

    first = step(1, 0)
    assert first.counts is not None and set(first.counts) == {1}
    # What was drawn first must not be what the counts of the second are about.
    memory.counts[:] = count_ids(*SEEN, VOCAB)
    decode = Decode(slabs, zeros + 2, np.array(first.tokens), zeros[:, None], zeros + 1, sampling, None, drafts)
    return decoder.run(decode)


def _with_seed(settings: Sampling, seed: int) -> Sampling:
    # A row whose minimum is not reached has no drafts.
    return msgspec.structs.replace(settings, seed=seed, min_tokens=0)


def wanted_of(name: str) -> npt.NDArray[np.float64]:
    return define(logits_of(name), _with_seed(CASES[name], 0))


def firsts(decoded: Decoded) -> Ints:
    assert decoded.counts is not None
    counts = np.array(decoded.counts)
    return np.array(decoded.tokens)[np.cumsum(counts) - counts]


@pytest.mark.parametrize("name", SERVED)
def test_served_tokens_come_as_often_as_they_should(name: str) -> None:
    decoded = serve(name, DRAWS, 1)
    assert decoded.proposed == (1,) * DRAWS
    assert decoded.counts is not None and 0.1 < np.mean(np.array(decoded.counts) == 2) < 0.95
    assert p_value(firsts(decoded), wanted_of(name)) > FALSE_ALARM / len(SERVED)


def test_the_token_behind_drafts_that_hold_comes_as_often_as_it_should() -> None:
    decoded = serve("plain", DRAWS, 2)
    counts = np.array(decoded.counts)
    tokens, starts = np.array(decoded.tokens), np.cumsum(counts) - counts
    for place in (1, 2):
        # Whether drafts before it hold says nothing of the target's own distribution at this place.
        there = tokens[starts[counts > place] + place]
        assert len(there) > 1000
        assert p_value(there, wanted_of("plain")) > FALSE_ALARM


@pytest.mark.parametrize("mistake", ["lenient", "whole"])
def test_a_mistake_of_two_per_cent_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection.verify_drawn

    def wrong(target: Tensor, draft: Tensor, drafts: Tensor, uniforms: rejection.Uniforms) -> Any:
        if mistake == "lenient":
            return right(target, draft, drafts, dataclasses.replace(uniforms, accept=uniforms.accept - 0.02))
        if mistake == "whole":  # draws anew from all of the target where a draft does not hold
            verdict = right(target, draft, drafts, uniforms)
            cumulative = target[:, 0].cumsum(1)
            anew = (cumulative <= uniforms.final[:, :1]).sum(1).clamp(max=VOCAB - 1)
            tokens = verdict.tokens.clone()
            tokens[:, 0] = torch.where(verdict.accepted == 0, anew, tokens[:, 0])
            return dataclasses.replace(verdict, tokens=tokens)
        raise AssertionError

    monkeypatch.setattr(rejection, "verify_drawn", wrong)
    assert p_value(firsts(serve("plain", DRAWS, 1)), wanted_of("plain")) < FALSE_ALARM


@pytest.mark.parametrize("k", range(1, 6))
def test_one_place_after_the_other_judges_as_the_tables_do(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden tables have uniform numbers of their own, which take the place of the drawn ones."""
    p, q, drafts = (TABLES[f"k{k}.{name}"] for name in ("p", "q", "draft"))
    n = len(p)
    going = np.arange(n)
    tokens = np.full((n, k + 1), -1)
    monkeypatch.setattr(rejection, "keep_likeliest", lambda logits, rows: logits.double())
    for depth in range(k):
        numbers = {
            lane: TABLES[f"k{k}.{name}"].double().numpy()[going]
            for lane, name in ((rejection.LANE_ACCEPT, "u"), (rejection.LANE_RESIDUAL, "u_final"))
        }
        numbers[rejection.LANE_ACCEPT] = numbers[rejection.LANE_ACCEPT][:, depth]
        monkeypatch.setattr(rejection, "draw_uniform", lambda seeds, positions, lane, numbers=numbers: numbers[lane])
        guesses = Guesses(np.arange(len(going)), drafts[going, depth].long().numpy(), q[going, depth].double())
        found = judge_guesses(p[going, depth], [Sampling()] * len(going), going, guesses)
        tokens[going, depth] = found
        going = going[found == drafts[going, depth].numpy()]
    golden = TABLES[f"k{k}.sampled.tokens"].long().numpy()
    accepted = TABLES[f"k{k}.sampled.accepted"].long().numpy()
    for row in range(n):
        until = min(int(accepted[row]) + 1, k)  # the token behind the last draft is drawn like any other
        assert tokens[row, :until].tolist() == golden[row, :until].tolist()


def test_the_same_requests_give_the_same_texts_and_greedy_ones_have_nothing_kept() -> None:
    once, again = serve("all cuts", 500, 3), serve("all cuts", 500, 3)
    assert (once.tokens, once.counts) == (again.tokens, again.counts)
    drawn = rejection.DrawnDrafts()
    pick, shares = drawn.begin([Sampling(temperature=0), Sampling(temperature=1.0, seed=5)])
    logits = torch.from_numpy(logits_of("plain")).repeat(2, 1)
    tokens = pick(logits, np.array([3, 3]))
    assert tokens[0] == int(logits[0].argmax())
    drawn.keep(np.array([4, 6]), [Sampling(temperature=0), Sampling(temperature=1.0, seed=5)], shares)
    assert len(drawn) == 1 and drawn.guess(np.array([4]), np.array([1]), 0) is None
    found = drawn.guess(np.array([4, 6]), np.array([1, 2]), 0)
    assert found is not None and found.rows.tolist() == [1]
    torch.testing.assert_close(found.shares[0], process_logits(logits[1:], [Sampling(temperature=1.0)])[0])
    drawn.forget(np.array([6, 7]))
    assert len(drawn) == 0
