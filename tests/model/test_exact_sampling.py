"""Exact sampling: tokens come as often as the definition says, drawn directly and through drafts of a bad drafter.

Chi-square on a vocabulary of 12. Over all cells the chance of a false alarm is at most 1e-6, and seeds are fixed, so
what passes once passes always. That the test can fail, it shows itself: a bias of 2 % of the mass is found.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.model.penalties import count_ids
from engine.model.sampling import LANE_DRAFT, draw_uniform, process_logits, sample_tokens
from engine.model.verification import draw_uniforms, verify_drawn, verify_point
from transport.messages import Sampling

VOCAB, EOS = 12, (1,)
DRAWS = 40_000
FALSE_ALARM = 1e-6
SEEN = (np.array([2, 3, 3, 5, 2, 4, 4, 4]), 4)
"""Ids of a request and how many of them are generated: 2, 3 and 5 in the prompt, 2 once and 4 three times after it."""

Doubles = npt.NDArray[np.float64]

CASES = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.4),
    "hot": Sampling(temperature=2.5),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k": Sampling(temperature=1.3, top_k=5),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "all cuts": Sampling(temperature=1.5, top_p=0.9, top_k=8, min_p=0.05),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "presence": Sampling(temperature=1.0, presence_penalty=1.2),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.7),
    "negative penalties": Sampling(temperature=1.0, frequency_penalty=-0.4, presence_penalty=-0.3),
    "bias": Sampling(temperature=1.0, bias_ids=(0, 7), biases=(1.5, -2.0)),
    "no end": Sampling(temperature=1.0, min_tokens=3, stop_ids=(6,)),
    "everything": Sampling(
        temperature=0.8,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        bias_ids=(4, 9),
        biases=(2.0, -1.0),
        min_tokens=1,
    ),
}


def logits_of(case: str) -> npt.NDArray[np.float32]:
    return np.random.default_rng(len(case) * 31 + 1).normal(0, 1.2, VOCAB).astype(np.float32)


def define(logits: npt.NDArray[np.float32], settings: Sampling) -> Doubles:
    """The distribution by `docs/sampling.md`, one id after the other."""
    prompt, generated = SEEN[0][: -SEEN[1]].tolist(), SEEN[0][-SEEN[1] :].tolist()
    values = []
    for token in range(VOCAB):
        value = float(logits[token])
        if token in settings.bias_ids:
            value += settings.biases[settings.bias_ids.index(token)]
        if token in prompt or token in generated:
            value = value / settings.repetition_penalty if value > 0 else value * settings.repetition_penalty
        value -= settings.frequency_penalty * generated.count(token)
        value -= settings.presence_penalty * (token in generated)
        if settings.min_tokens and token in (*settings.stop_ids, *EOS):
            value = -np.inf
        values.append(value)
    shares = np.exp(np.array(values) / settings.temperature)
    shares /= shares.sum()
    order = sorted(range(VOCAB), key=lambda token: (-values[token], token))
    kept = np.zeros(VOCAB, bool)
    before = 0.0
    for rank, token in enumerate(order):
        is_cut = settings.top_k and rank >= settings.top_k
        is_cut = is_cut or before >= settings.top_p or shares[token] < settings.min_p * shares[order[0]]
        kept[token] = rank == 0 or not is_cut
        before += shares[token]
    return np.where(kept, shares, 0) / shares[kept].sum()


def counts_for(settings: Sampling, rows: int) -> torch.Tensor | None:
    return count_ids(*SEEN, VOCAB).repeat(rows, 1) if settings.has_penalties else None


def p_value(tokens: npt.NDArray[np.int64], wanted: Doubles) -> float:
    """Chance of a chi-square at least this large if tokens come as wanted; 0 where one came that must not."""
    observed = np.bincount(tokens, minlength=VOCAB)
    if observed[wanted == 0].any():
        return 0.0
    expected = wanted[wanted > 0] * len(tokens)
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    statistic = ((observed[wanted > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()))


WAYS = ("direct", "drawn drafts", "points")
LIMIT = FALSE_ALARM / (len(CASES) * len(WAYS))


def draw_direct(logits: npt.NDArray[np.float32], settings: Sampling, draws: int) -> npt.NDArray[np.int64]:
    rows = torch.from_numpy(logits).repeat(draws, 1)
    return sample_tokens(rows, [settings] * draws, list(range(draws)), EOS, counts_for(settings, draws))


def draw_through_drafts(
    logits: npt.NDArray[np.float32], settings: Sampling, draws: int, *, point: bool
) -> npt.NDArray[np.int64]:
    """First tokens of verifications with one draft of a drafter that knows nothing of the target."""
    p = process_logits(torch.from_numpy(logits)[None], [settings], counts_for(settings, 1), EOS)
    q = np.random.default_rng(9).dirichlet(np.full(VOCAB, 0.7))
    if point:
        drafts = torch.full((draws, 1), int(p[0].argmax()))
    else:
        uniform = draw_uniform([settings.seed] * draws, range(draws), LANE_DRAFT)
        drafts = torch.from_numpy((q.cumsum() <= uniform[:, None]).sum(1, keepdims=True).clip(max=VOCAB - 1))
    uniforms = draw_uniforms([settings.seed] * draws, range(draws), 1)
    target = p.expand(draws, VOCAB).unsqueeze(1).expand(-1, 2, -1)
    if point:
        verdict = verify_point(target, drafts, uniforms)
    else:
        verdict = verify_drawn(target, torch.from_numpy(q).expand(draws, 1, VOCAB), drafts, uniforms)
    return verdict.tokens[:, 0].numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_processed_distribution_is_the_defined_one(name: str) -> None:
    settings, logits = CASES[name], logits_of(name)
    got = process_logits(torch.from_numpy(logits)[None], [settings], counts_for(settings, 1), EOS)[0].numpy()
    # Penalties are applied in single precision, so that a device can.
    np.testing.assert_allclose(got, define(logits, settings), atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_tokens_come_as_often_as_they_should(name: str, way: str) -> None:
    settings, logits = CASES[name], logits_of(name)
    if way == "direct":
        tokens = draw_direct(logits, settings, DRAWS)
    else:
        tokens = draw_through_drafts(logits, settings, DRAWS, point=way == "points")
    assert p_value(tokens, define(logits, settings)) > LIMIT


@pytest.mark.parametrize("name", ["plain", "min_p", "everything"])
def test_a_bias_of_two_percent_is_found(name: str) -> None:
    settings, logits = CASES[name], logits_of(name)
    wanted = define(logits, settings)
    tokens = draw_direct(logits, settings, DRAWS)
    assert p_value(tokens, wanted) > LIMIT
    rich, poor = np.argsort(wanted)[::-1][:2]
    moved = np.flatnonzero(tokens == rich)[: int(0.02 * DRAWS)]
    biased = tokens.copy()
    biased[moved] = poor
    assert p_value(biased, wanted) < LIMIT


def test_a_wrong_residual_is_found() -> None:
    # What a verifier does that draws anew from p instead of from what p has above q.
    settings, logits = CASES["plain"], logits_of("plain")
    p = process_logits(torch.from_numpy(logits)[None], [settings], None, EOS)
    target = p.expand(DRAWS, VOCAB).unsqueeze(1).expand(-1, 2, -1)
    drafts = torch.full((DRAWS, 1), int(p[0].argmax()))
    uniforms = draw_uniforms([0] * DRAWS, range(DRAWS), 1)
    verdict = verify_point(target, drafts, uniforms)
    anew = (p.cumsum(1) <= uniforms.final[:, :1]).sum(1)
    wrong = torch.where(verdict.accepted == 1, verdict.tokens[:, 0], anew).numpy()
    assert p_value(wrong, define(logits, settings)) < LIMIT


def test_several_drafts_give_the_product_of_the_distributions() -> None:
    # Two tokens in a row, the second's distribution hangs on the first: pairs are as the chain rule says.
    rng = np.random.default_rng(4)
    first = rng.dirichlet(np.full(4, 1.0))
    second = rng.dirichlet(np.full(4, 1.0), 4)
    q_first, q_second = rng.dirichlet(np.full(4, 1.0)), rng.dirichlet(np.full(4, 1.0), 4)
    draws = 4 * DRAWS
    a = np.searchsorted(q_first.cumsum(), draw_uniform([5] * draws, range(draws), LANE_DRAFT), side="right").clip(max=3)
    b = (q_second.cumsum(1)[a] <= draw_uniform([6] * draws, range(draws), LANE_DRAFT)[:, None]).sum(1).clip(max=3)
    target = torch.from_numpy(np.stack([np.broadcast_to(first, (draws, 4)), second[a], np.full((draws, 4), 0.25)], 1))
    draft = torch.from_numpy(np.stack([np.broadcast_to(q_first, (draws, 4)), q_second[a]], 1))
    verdict = verify_drawn(
        target, draft, torch.from_numpy(np.stack([a, b], 1)), draw_uniforms(range(draws), [0] * draws, 2)
    )
    held = verdict.accepted.numpy() >= 1
    tokens = verdict.tokens.numpy()
    # Of sequences whose first token was not drafted, the second comes from the next step: only pairs that are there.
    for token in range(4):
        pairs = tokens[held & (tokens[:, 0] == token), 1]
        counts = np.bincount(pairs, minlength=4)
        expected = second[token] * len(pairs)
        statistic = torch.tensor(((counts - expected) ** 2 / expected).sum() / 2).double()
        assert float(torch.special.gammaincc(torch.tensor(1.5).double(), statistic)) > FALSE_ALARM / 5
    counts = np.bincount(tokens[:, 0], minlength=4)
    statistic = torch.tensor(((counts - first * draws) ** 2 / (first * draws)).sum() / 2).double()
    assert float(torch.special.gammaincc(torch.tensor(1.5).double(), statistic)) > FALSE_ALARM / 5


def test_settings_of_one_row_do_not_touch_another() -> None:
    names = list(CASES)
    logits = torch.from_numpy(np.stack([logits_of(name) for name in names]))
    rows = [CASES[name] for name in names]
    penalised = sum(row.has_penalties for row in rows)
    counts = count_ids(*SEEN, VOCAB).repeat(penalised, 1)
    together = process_logits(logits, rows, counts, EOS)
    for row, settings in enumerate(rows):
        alone = process_logits(logits[row : row + 1], [settings], counts_for(settings, 1), EOS)
        assert torch.equal(alone[0], together[row])
