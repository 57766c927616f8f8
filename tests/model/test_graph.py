"""Graphs that share memory: what of it they may, and how much less they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.graph import GraphPool, StepGraph, pool_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUMBERS = 8 << 20
"""32 MiB: a segment of its own in the allocator."""


class Spread:
    """A step whose result is small, or as large as what it has in between."""

    def __init__(self, *, is_large: bool) -> None:
        self.told = torch.zeros(1, device="cuda")
        self._is_large = is_large

    def run(self) -> Tensor:
        between = self.told.expand(NUMBERS) + 1
        doubled = between * 2
        return doubled if self._is_large else doubled[-1:].clone()


def make_graphs(pools: tuple[GraphPool | None, GraphPool | None]) -> tuple[list[Spread], list[StepGraph[Tensor]]]:
    steps = [Spread(is_large=False), Spread(is_large=True)]
    return steps, [StepGraph(step, pool) for step, pool in zip(steps, pools, strict=True)]


def test_results_that_are_read_at_once_are_right_in_any_order() -> None:
    pool = GraphPool(torch.device("cuda", 0))
    steps, graphs = make_graphs((pool, pool))
    for number, at in enumerate([0, 1, 1, 0, 1, 0, 0]):
        steps[at].told.fill_(number)
        assert float(graphs[at].replay()[-1]) == 2 * number + 2


def test_a_later_graphs_result_does_not_outlive_an_earlier_one() -> None:
    """Why each result has to be read before another graph is replayed."""
    pool = GraphPool(torch.device("cuda", 0))
    steps, graphs = make_graphs((pool, pool))
    steps[0].told.fill_(5)
    found = graphs[1].replay()
    assert float(found[0]) == 2
    graphs[0].replay()
    assert float(found[0]) in (6, 12)


def test_graphs_of_a_pool_take_what_the_largest_needs() -> None:
    taken = []
    for is_shared in (True, False):
        pool = GraphPool(torch.device("cuda", 0)) if is_shared else None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        kept = make_graphs((pool, pool))
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved() - before)
        del kept
    assert taken[0] <= 0.6 * taken[1], taken


def test_all_steps_of_an_arena_share_one_pool() -> None:
    arenas = [torch.zeros(64, device="cuda") for _ in range(2)]
    assert pool_of(arenas[0]) is pool_of(arenas[0].view(8, 8)) is not pool_of(arenas[1])
    streams = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert pool_of(arenas[0]).stream.cuda_stream not in streams
