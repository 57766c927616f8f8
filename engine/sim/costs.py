"""What a step costs in virtual time. Every constant has its source; none was measured on the machines simulated.

Placeholders until `engine bench forward` files of real devices are fitted: roofline numbers for bf16 on one H200
(4.8 TB/s, 790 TFLOP/s), parts summed, for the V4-Flash sizes.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from engine.core.plan import StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class FlatCosts:
    """`base_s`, and `token_s` for each id of a chunk and each row with the drafts that it may have. For tests and small
    scenarios."""

    base_s: float = 0.005
    token_s: float = 0.0001

    def __call__(self, plan: StepPlan) -> float:
        ids = len(plan.rows) * (1 + plan.drafts)
        for chunk in plan.chunks:
            ids += chunk.num_tokens
        return self.base_s + self.token_s * ids


@dataclasses.dataclass(frozen=True)  # no slots, for what it has computed
class RooflineCosts:
    """V4-Flash on one H200 of an expert-parallel group.

    Attributes:
        ranks: of the group.
        layers, experts, expert_bytes: 43 layers with 256 experts of 13.37 MB (8.1).
        dense_bytes: read once per step: projections, compressors, shared experts, head, gate (8.1): 7.75 GB.
        read_bytes_per_s, flops: of the memory and of the units.
        token_flops: per row, without the parts that grow with the context (8.1, 4K column: 29.1 less indexer, core).
        context_flops: per row and id of context: indexer and core, from the 4K and 128K columns of 8.1.
        kv_bytes: read per row and id of context: (112 - 12.7) MB over 124 K ids (8.1).
        exchange_bytes_per_s, exchange_bytes: per row and step: 51 MB a step at 16 rows over 50 GB/s (8.3).
        exchange_floor_s: 86 collectives of 20 us each (8.3).
        routed_flops: of `token_flops`, what a row's routed experts take: 6 of 25.2 M weights in each layer. Left out
            where `has_experts`: there a group counts them pair by pair, by the placement (`ExpertShape.pair_s`).
    """

    ranks: int
    layers: int = 43
    experts: int = 256
    expert_bytes: float = 13.37e6
    dense_bytes: float = 7.75e9
    read_bytes_per_s: float = 4.8e12
    flops: float = 790e12
    token_flops: float = 26.6e9
    context_flops: float = 109e3
    kv_bytes: float = 800.0
    exchange_bytes: float = 3.2e6
    exchange_bytes_per_s: float = 50e9
    exchange_floor_s: float = 1.7e-3
    routed_flops: float = 13.0e9
    has_experts: bool = False

    def __call__(self, plan: StepPlan) -> float:
        positions = plan.columns.positions
        rows = len(positions)
        ids = rows * (1 + plan.drafts)
        context = int(np.add.reduce(positions)) if rows else 0  # half of what `sum` costs
        for chunk in plan.chunks:
            ids += chunk.num_tokens
            context += chunk.num_tokens * (chunk.start + chunk.num_tokens // 2)
        shares = self._ids_to_shares.get(ids)
        if shares is None:
            shares = self._ids_to_shares[ids] = self._share(ids)
        weights_s, flops, exchange_s = shares
        kv_s = rows and self.kv_bytes * context / self.read_bytes_per_s
        math_s = (flops + self.context_flops * context) / self.flops
        return max(weights_s + kv_s, math_s) + exchange_s

    @functools.cached_property
    def _ids_to_shares(self) -> dict[int, tuple[float, float, float]]:
        return {}

    def _share(self, ids: int) -> tuple[float, float, float]:
        """What depends on the number of rows and ids alone: time for weights, operations, time for exchanges."""
        # Experts of a rank that some row goes to, with `ids` on each rank.
        hit = self.experts / self.ranks * (1 - (1 - 6 / self.experts) ** (self.ranks * ids))
        weights_s = (self.dense_bytes + self.layers * hit * self.expert_bytes) / self.read_bytes_per_s
        token_flops = self.token_flops - (self.routed_flops if self.has_experts else 0.0)
        exchange_s = self.exchange_floor_s + self.exchange_bytes * ids / self.exchange_bytes_per_s
        return weights_s, token_flops * ids, exchange_s if self.ranks > 1 else 0.0
