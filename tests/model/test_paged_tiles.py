"""The parts that rows' independence rests on: tiles, expert banks, choices, and what this machine's BLAS does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model import experts, hyper
from engine.model.attention import Gaps, choose_top, rank_blocks
from engine.model.mixing import sinkhorn_rows
from engine.model.reference import topk_mask
from engine.model.slot_bank import SlotBank
from engine.model.tiles import TILE, Choice, ExpertBank, TileLinear, choose_experts, norm_rows, pad_rows

SHAPES = [(96, 184), (384, 24), (192, 352), (512, 96), (64, 136), (768, 24), (192, 2500), (16, 8)]


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_this_blas_computes_all_rows_of_a_tile_alike(inner: int, outer: int) -> None:
    project = TileLinear(draw(outer, inner))
    rows = draw(5 * TILE, inner, seed=1)
    result = project(rows)
    for place in range(TILE):
        # The same rows, at another place of their tiles, among other neighbours.
        assert torch.equal(project(rows.roll(place, 0)).roll(-place, 0), result)
    alone = torch.cat([project(pad_rows(row.unsqueeze(0)))[:1] for row in rows])
    assert torch.equal(alone, result)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_tiled_product_is_the_product(inner: int, outer: int) -> None:
    weight, rows = draw(outer, inner), draw(3 * TILE, inner + 40, seed=1)[:, :inner]
    exact = rows.double() @ weight.double().t()
    assert (TileLinear(weight)(rows) - exact).norm() / exact.norm() < 1e-6


def bank(
    num_experts: int = 16, width: int = 24, hidden: int = 40
) -> tuple[ExpertBank, torch.Tensor, list[torch.Tensor]]:
    w1, w3 = draw(num_experts, width, hidden, seed=2), draw(num_experts, width, hidden, seed=3)
    w2, fold = draw(num_experts, hidden, width, seed=4), draw(hidden, seed=5)
    return ExpertBank(w1, w3, w2, 2.0, fold), fold, [w1, w3, w2]


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 70])
@pytest.mark.parametrize("skew", [False, True])
def test_grouped_experts_equal_the_dense_mixture(rows: int, skew: bool) -> None:
    grouped, fold, weights = bank()
    x = draw(rows, 40, seed=6)
    scores = torch.rand(rows, 16, generator=torch.Generator().manual_seed(7))
    bias = torch.zeros(16)
    if skew:
        bias[3] = bias[11] = 5
    choice, ranked = choose_experts(scores.numpy(), bias.numpy(), 3, 1.5)
    got = grouped.mix(pad_rows(x), choice)
    routing = experts.Routing(
        torch.from_numpy(choice.ids), torch.from_numpy(choice.weights), scores, torch.from_numpy(ranked)
    )
    wanted = experts.mix_dense((x * fold).double(), routing, *(w.double() for w in weights), 2.0)
    assert (got - wanted).norm() / wanted.norm() < 1e-6


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("rows", "hit"), [(1, 16), (3, 2), (5, 16), (40, 16), (40, 3), (40, 1)])
def test_experts_in_slots_give_the_bits_of_a_layers_bank(rows: int, hit: int, scattered: bool) -> None:
    grouped, fold, (w1, w3, w2) = bank(hidden=48)
    rng = np.random.default_rng(rows + hit)
    order = rng.permutation(40)[:16] if scattered else np.arange(9, 25)
    w_in, w_out = torch.full((40, 48, 48), torch.nan), torch.full((40, 24, 48), torch.nan)
    w_in[order] = (torch.cat((w1, w3), 1) * fold).transpose(1, 2)
    w_out[order] = w2.transpose(1, 2)
    x = pad_rows(draw(rows, 48, seed=6))
    ids = np.sort(rng.integers(0, hit, (rows, 3)), axis=1)
    found = SlotBank(w_in, w_out, 2.0).evaluate(x, np.repeat(np.arange(rows), 3), order[ids.ravel()])
    one = np.ones((rows, 1), np.float32)
    for column in range(3):
        wanted = grouped.mix(x, Choice(ids[:, column : column + 1], one))
        assert torch.equal(found.view(rows, 3, 48)[:, column], wanted)


def test_a_row_of_a_mixture_does_not_see_the_others() -> None:
    grouped, _, _ = bank()
    x = draw(70, 40, seed=6)
    scores = torch.rand(70, 16, generator=torch.Generator().manual_seed(8)).numpy()
    bias = np.zeros(16, np.float32)
    bias[3] = 5
    choice, _ = choose_experts(scores, bias, 3, 1.5)
    together = grouped.mix(pad_rows(x), choice)
    for size in (1, 2, 3, 9):
        for low in range(0, 70, size * 7):
            part, _ = choose_experts(scores[low : low + size], bias, 3, 1.5)
            assert torch.equal(grouped.mix(pad_rows(x[low : low + size]), part), together[low : low + size])


def test_equal_expert_scores_go_to_the_lowest_index_and_the_bias_moves_no_weight() -> None:
    scores = np.ones((1, 8), np.float32)
    choice, _ = choose_experts(scores, np.array([0, 0, 1, 0, 0, 0, 1, 0], np.float32), 3, 1.5)
    assert choice.ids.tolist() == [[0, 2, 6]]
    np.testing.assert_allclose(choice.weights, [[0.5, 0.5, 0.5]])


@pytest.mark.parametrize("count", [1, 8, 40, 64])
def test_the_best_are_chosen_and_ties_go_to_the_lowest_index(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    # Few distinct values, both zeros, hidden entries, rows with fewer finite scores than places.
    scores = torch.randint(-3, 4, (50, 40), generator=generator).float() * -0.25
    scores = torch.where(scores == 0, torch.where(torch.rand(50, 40, generator=generator) < 0.5, 0.0, -0.0), scores)
    visible = torch.randint(0, 41, (50, 1), generator=generator)
    scores = scores.masked_fill(torch.arange(40) >= visible, -torch.inf)
    chosen = choose_top(scores.clone(), count)
    for row in range(50):
        finite = [i for i in range(40) if scores[row, i] > -torch.inf]
        best = sorted(sorted(finite, key=lambda i: (-float(scores[row, i]), i))[:count])
        assert chosen[row].tolist() == best + [40] * (count - len(best))
    mask = topk_mask(scores, count)
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[i for i in row if i < 40] for row in chosen.tolist()]


def test_the_newest_visible_block_always_ranks_first() -> None:
    scores = torch.full((3, 10), -torch.inf)
    scores[1, :5] = torch.tensor([9.0, 1, 1, 2, -5])
    scores[2, :10] = torch.arange(10.0, 0, -1)
    ranked = rank_blocks(scores, torch.tensor([[0], [5], [10]]), 4)
    assert ranked.tolist() == [[-torch.inf] * 3, [9, torch.inf, -torch.inf], [10, 6, torch.inf]]


def test_gaps_ignore_what_is_hidden() -> None:
    gaps = Gaps(torch.full((3,), 1e9))
    gaps.note(torch.tensor([[5.0, 3, 1], [5, -torch.inf, -torch.inf], [5, 4, -torch.inf]]), 1)
    assert gaps.smallest.tolist() == [2, 1e9, 1]


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_sinkhorn_on_numpy_is_the_torch_one(rows: int) -> None:
    logits = 2 * draw(rows, 4, 4, seed=rows)
    matrix = logits.permute(1, 2, 0).numpy().copy(order="C")
    sinkhorn_rows(matrix, 20, 1e-6)
    wanted = hyper.sinkhorn(logits, 20, 1e-6).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(matrix, wanted, atol=1e-6)


def test_norms_do_not_depend_on_the_number_of_rows() -> None:
    x = draw(64, 5, 40)
    assert torch.equal(norm_rows(x[:, 4], 1e-20)[:8], norm_rows(x[:8, 4], 1e-20))
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert (norm_rows(x, 1e-20) - exact).abs().max() < 1e-5
