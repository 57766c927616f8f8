"""Sampling: draws are pure functions, distributions are what the settings say, rows do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.sampling import HEAD_TOKENS, draw_uniform, keep_likeliest, sample_tokens
from transport.messages import Sampling

EOS = (1,)


def plain_distribution(logits: np.ndarray, settings: Sampling) -> np.ndarray:
    """The definition, one row, by sorting everything: float64[vocab]."""
    if settings.temperature == 0:
        point = np.zeros(len(logits))
        point[int(np.argmax(logits))] = 1
        return point
    wide = logits.astype(np.float64)
    shares = np.exp((wide - wide.max()) / settings.temperature)
    shares /= shares.sum()
    order = np.lexsort((np.arange(len(logits)), -wide))
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if rank > 0 and (
            (settings.top_k and rank >= settings.top_k) or (settings.top_p < 1 and before >= settings.top_p)
        ):
            break
        kept.append(token)
        before += shares[token]
    result = np.zeros(len(logits))
    result[kept] = shares[kept] / shares[kept].sum()
    return result


SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, seed=3),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=2.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=0.95, top_k=40),
    Sampling(temperature=50.0, top_p=0.99),
    Sampling(temperature=1e-6),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=3.0, top_k=100_000),
]


@pytest.mark.parametrize("vocab", [7, 300, 1000])
def test_the_distribution_is_the_one_that_settings_describe(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (len(SETTINGS), vocab)).astype(np.float32)
    got = keep_likeliest(torch.from_numpy(logits), SETTINGS).numpy()
    for row, settings in enumerate(SETTINGS):
        np.testing.assert_allclose(
            got[row], plain_distribution(logits[row], settings), atol=1e-12, err_msg=str(settings)
        )


@pytest.mark.parametrize("settings", [s for s in SETTINGS if s.temperature > 0])
def test_draws_follow_the_distribution(settings: Sampling) -> None:
    vocab, draws = 600, 4000
    logits = np.random.default_rng(5).normal(0, 2, vocab).astype(np.float32)
    wanted = plain_distribution(logits, settings)
    rows = torch.from_numpy(logits).repeat(draws, 1)
    tokens = sample_tokens(rows, [settings] * draws, list(range(draws)), EOS)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[wanted == 0].sum() == 0
    # Chi-square over tokens expected at least 5 times, the rest in one bin.
    often = wanted * draws >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(wanted[often], wanted[~often].sum()) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    # Mean + 5 standard deviations of the statistic; positions are fixed, so this can not flicker.
    assert statistic <= freedom + 5 * (2 * max(freedom, 1)) ** 0.5


def test_uniform_draws_are_uniform_and_independent() -> None:
    draws = 20_000
    by_position = draw_uniform([7] * draws, list(range(draws)))
    by_seed = draw_uniform(list(range(draws)), [7] * draws)
    by_lane = np.concatenate([draw_uniform(range(100), range(100), lane) for lane in range(200)])
    for values in (by_position, by_seed, by_lane):
        assert values.min() > 0 and values.max() < 1
        counts, _ = np.histogram(values, bins=50, range=(0, 1))
        expected = len(values) / 50
        assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * (2 * 49) ** 0.5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / len(values) ** 0.5
    assert len(np.unique(by_position)) == draws
    assert not np.isin(by_position, by_seed[8:]).any()


def test_uniform_draws_are_fixed_forever() -> None:
    # Other numbers here change every sampled text that was ever reproducible.
    got = draw_uniform([0, 1, (1 << 53) - 1], [0, 100, 1 << 20])
    again = draw_uniform([(1 << 53) - 1], [1 << 20])
    assert got[2] == again[0]
    np.testing.assert_array_equal(got, FIXED)


FIXED = [0.5026230818294768, 0.1796301452644758, 0.48702807366756656]


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(2)
    vocab = 5000
    rows = [SETTINGS[i % len(SETTINGS)] for i in range(33)]
    logits = torch.from_numpy(rng.normal(0, 3, (33, vocab)).astype(np.float32))
    positions = rng.integers(0, 1 << 20, 33).tolist()
    together = sample_tokens(logits.clone(), rows, positions, EOS)
    for row in range(33):
        alone = sample_tokens(logits[row : row + 1].clone(), [rows[row]], [positions[row]], EOS)
        assert alone[0] == together[row]
    order = rng.permutation(33)
    mixed = sample_tokens(logits[order].clone(), [rows[i] for i in order], [positions[i] for i in order], EOS)
    np.testing.assert_array_equal(mixed, together[order])


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 500)
    logits[:, 77] = 1
    logits[:, 400] = 1
    greedy, narrow = Sampling(), Sampling(temperature=1.0, top_k=1)
    np.testing.assert_array_equal(sample_tokens(logits.clone(), [greedy, narrow], [5, 5], EOS), [77, 77])
    three = keep_likeliest(logits[:1], [Sampling(temperature=1.0, top_k=3)])[0]
    assert three.nonzero()[:, 0].tolist() == [0, 77, 400]


def test_a_cut_beyond_the_ordered_head_is_still_exact() -> None:
    # Nearly flat: 0.9 of the mass needs far more tokens than are ordered at first.
    vocab, draws = 4 * HEAD_TOKENS, 3000
    settings = Sampling(temperature=1.0, top_p=0.9)
    logits = torch.linspace(0, 0.1, vocab).repeat(draws, 1)
    tokens = sample_tokens(logits, [settings] * draws, list(range(draws)), EOS)
    wanted = plain_distribution(logits[0].numpy(), settings)
    assert (wanted[tokens] > 0).all()
    # The likeliest tokens have the highest ids here; those beyond the head come as often as their mass says.
    beyond = wanted[: vocab - HEAD_TOKENS].sum()
    assert abs((tokens < vocab - HEAD_TOKENS).mean() - beyond) < 5 * (beyond * (1 - beyond) / draws) ** 0.5


def test_ends_are_forbidden_until_the_minimum() -> None:
    logits = torch.zeros(4, 50)
    logits[:, 1] = 30
    logits[:, 9] = 20
    rows = [
        Sampling(),
        Sampling(min_tokens=1),
        Sampling(min_tokens=1, stop_ids=(9, 4_000_000)),
        Sampling(min_tokens=1, ignore_eos=True, stop_ids=(9,)),
    ]
    np.testing.assert_array_equal(sample_tokens(logits, rows, [3] * 4, EOS), [1, 9, 0, 1])
    hot = Sampling(temperature=1.0, min_tokens=2, stop_ids=(9,))
    logits = torch.zeros(500, 50)
    logits[:, 1] = 30
    tokens = sample_tokens(logits, [hot] * 500, list(range(500)), EOS)
    assert not np.isin(tokens, [1, 9]).any()


def test_no_rows_give_no_tokens() -> None:
    assert sample_tokens(torch.empty(0, 10), [], [], EOS).shape == (0,)
