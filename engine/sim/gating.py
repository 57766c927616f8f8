"""Which experts rows go to: a popularity per domain of requests and layer, which drifts and flips. And the keys of it.

A request belongs to a domain by its number. Experts of a layer are popular by Zipf's law, in an order that each domain
draws for itself; now and then some change places (drift), and sometimes a domain's orders are drawn anew (a flip).
Nothing is drawn for a single row: a step's pairs per rank are the expected ones with the noise of their number, and
what ranks report is drawn for all rows since the last report at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.config import ExpertsConfig
from engine.core.placement import EMPTY, Placement
from transport.messages import PartInfo

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a simulated model, on the ranks of its groups: the table `[experts]` of a scenario.

    Attributes:
        layers, experts: layers with experts, experts of each.
        draft_layers, draft_experts: the same of the drafter; 0 layers: none.
        chosen: experts that a row goes to in each layer.
        slot_bytes: weights of one expert, as copies and bills count them; a simulated slot holds a tag.
        spare_slots, mode, interval_s, min_gain_us, horizon_steps, max_bytes_per_step, loads_s: see ExpertsConfig.
        link_bytes_per_s: of copies, apart from pushes.
        pair_s: time of one (row, expert) pair on its rank.
        load_bytes_per_s: of the checkpoint, when a rank loads experts.
        domains: kinds of requests.
        zipf: exponent of the popularity; 0 is even.
        drift_s, drift_share: so often, this share of a layer's experts change places in popularity. 0 s: never.
        flip_s: so often all orders of one domain are drawn anew, one domain after the other. 0: never.
        wild_share: so many plans go to a placement drawn at random, whatever it brings; for moves of many stages.
        is_perfect: skew costs nothing, as under a perfect balancer; for comparison.
    """

    layers: int = 2
    experts: int = 8
    draft_layers: int = 0
    draft_experts: int = 8
    chosen: int = 2
    slot_bytes: int = 1 << 20
    spare_slots: int = 3
    mode: Literal["off", "manual", "auto"] = "manual"
    interval_s: float = 2.0
    min_gain_us: float = 0.0
    horizon_steps: int = 10_000
    max_bytes_per_step: int = 4 << 20
    loads_s: float = 0.25
    link_bytes_per_s: float = 300e9
    pair_s: float = 20e-6
    load_bytes_per_s: float = 5e9
    domains: int = 3
    zipf: float = 1.0
    drift_s: float = 1.0
    drift_share: float = 0.2
    flip_s: float = 0.0
    wild_share: float = 0.0
    is_perfect: bool = False

    def parts(self, ranks: int) -> tuple[PartInfo, ...]:
        """As each rank of a group of so many has them."""
        sizes = [("main", self.layers, self.experts), ("draft", self.draft_layers, self.draft_experts)]
        kinds: Any = [size for size in sizes if size[1]]
        return tuple(
            PartInfo(name, layers, experts, -(-layers * experts // ranks) + self.spare_slots, self.slot_bytes)
            for name, layers, experts in kinds
        )

    def config(self) -> ExpertsConfig:
        """As the cluster's configuration says it, for each part."""
        return ExpertsConfig(
            spare_slots=self.spare_slots,
            mode=self.mode,
            interval_s=self.interval_s,
            min_gain_us=self.min_gain_us,
            horizon_steps=self.horizon_steps,
            max_bytes_per_step=self.max_bytes_per_step,
            loads_s=self.loads_s,
            link_bytes_per_s=int(self.link_bytes_per_s),
        )


def find_domains(requests: Ints, domains: int) -> Ints:
    """int64[n]: the domain of each request, by its number."""
    found: Ints = (requests * 0x9E3779B1 >> 7) % domains
    return found


class Gate:
    """The popularity of one part's experts, at an instant that never goes back.

    Args:
        seed: of its own chance; equal for all ranks, whose gates are the same model's.
    """

    def __init__(self, shape: ExpertShape, layers: int, experts: int, seed: Sequence[int]) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        weights = (1.0 + np.arange(experts)) ** -shape.zipf
        self._law = _cap(weights / weights.sum(), 1.0 / shape.chosen)
        self.phase = 0
        """Counts changes."""
        self._drifts = self._flips = 0
        self._order = self._rng.permuted(np.tile(np.arange(experts), (shape.domains, layers, 1)), axis=2)
        # [domain, layer, place in the order]: expert.
        self._shares: Floats = self._spread()

    def shares(self, now: float) -> Floats:
        """float64[domains, layers, experts]: where a pair of a row of that domain goes; each layer sums to 1."""
        shape = self._shape
        drifts = int(now / shape.drift_s) if shape.drift_s else 0
        flips = int(now / shape.flip_s) if shape.flip_s else 0
        if (drifts, flips) == (self._drifts, self._flips):
            return self._shares
        while self._flips < flips:
            domain = self._flips % shape.domains
            self._order[domain] = self._rng.permuted(self._order[domain], axis=1)
            self._flips += 1
        while self._drifts < drifts:
            self._drift()
            self._drifts += 1
        self.phase += 1
        self._shares = self._spread()
        return self._shares

    def _drift(self) -> None:
        experts = self._order.shape[2]
        count = round(self._shape.drift_share * experts)
        if count > 1:
            # Neighbours in the order change places: what is popular fades, it does not vanish.
            at = self._rng.choice(experts - 1, count // 2, replace=False)
            for each in at.tolist():
                self._order[:, :, [each, each + 1]] = self._order[:, :, [each + 1, each]]

    def _spread(self) -> Floats:
        shares = np.empty(self._order.shape)
        np.put_along_axis(shares, self._order, np.broadcast_to(self._law, shares.shape), axis=2)
        return shares


def _cap(law: Floats, most: float) -> Floats:
    """No expert gets more than one pair of a row: what is above goes to the others."""
    for _ in range(100):
        over = law > most
        if not over.any():
            break
        spare = 1.0 - most * over.sum()
        law = np.where(over, most, law * spare / law[~over].sum() if (~over).any() else most)
    return law


def draw_placement(current: Placement, rng: random.Random) -> Placement:
    """Any placement of the same experts in the same slots, with some replicas and some slots empty."""
    keys = [*range(current.layers * current.experts)]
    keys += rng.choices(keys, k=rng.randint(0, (current.table.size - len(keys)) // 2))
    table = np.full(current.table.size, EMPTY, np.int32)
    table[rng.sample(range(table.size), len(keys))] = keys
    rows = table.reshape(current.table.shape)
    for rank in range(current.ranks):
        # No rank holds an expert twice: nobody copies to itself.
        _, first = np.unique(rows[rank], return_index=True)
        rows[rank, np.setdiff1d(np.arange(current.slots), first)] = EMPTY
    return Placement(current.layers, current.experts, rows)


class PairCounter:
    """What the steps of a group cost in pairs: the gate's shares under a placement, kept while both stay."""

    def __init__(self, gate: Gate, chosen: int, rng: np.random.Generator) -> None:
        self._gate = gate
        self._chosen = chosen
        self._rng = rng
        self._phase = -1
        self._kept: Placement | None = None
        # Of each domain, one row: shares of pairs by layer and place.
        self._tilt: Floats = np.zeros((0, 0))

    def count(self, rows: Ints, placement: Placement, now: float) -> Floats:
        """float64[layers, places]: pairs of one step; `rows`: int64[domains] of the whole group."""
        shares = self._gate.shares(now)
        if self._kept is not placement or self._phase != self._gate.phase:
            self._kept, self._phase = placement, self._gate.phase
            self._tilt = np.stack([placement.sum_rank_loads(domain).reshape(-1) for domain in shares])
        # As one row, so that the product is the same whatever its other side.
        mean = self._chosen * np.dot(rows.astype(np.float64)[None], self._tilt).reshape(shares.shape[1], -1)
        noisy: Floats = np.maximum(mean + np.sqrt(mean) * self._rng.standard_normal(mean.shape), 0.0)
        return noisy

    def draw(self, rows: Ints, now: float, rng: np.random.Generator) -> Ints:
        """int64[layers, experts]: to which experts `rows` (int64[domains]) went; each layer sums to chosen x rows.

        As a multinomial law has it for many rows, for a fraction of its cost.
        """
        shares, total = self._gate.shares(now), int(rows.sum())
        mean = np.dot((rows * float(self._chosen))[None], shares.reshape(len(shares), -1)).reshape(shares.shape[1:])
        # In place: new memory for each step of it would take as long as what is reckoned.
        ends = rng.standard_normal(mean.shape)
        ends *= np.sqrt(mean)
        ends += mean
        mean *= 0.01
        np.maximum(ends, mean, out=ends)
        np.cumsum(ends, axis=1, out=ends)
        ends *= self._chosen * total / ends[:, -1:]
        drawn: Ints = np.rint(ends, out=ends).astype(np.int64)
        drawn[:, 1:] -= drawn[:, :-1].copy()
        return drawn
