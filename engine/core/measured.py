"""Measured: what ranks report of one part while they step, as loads and prices to plan with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.core.load import Loads, LoadWindow, Skew, add_ranks, measure_skew
from engine.core.placement import Placement

FAST_STEPS = 256.0
SLOW_STEPS = 4096.0


class Measured:
    """One part's figures over the ranks of its group.

    Attributes:
        window: loads, with a fast and a slow half-life.
        lost_us_total: expert time lost to skew so far, microseconds, each stretch under the placement of its end.
    """

    def __init__(self, layers: int, experts: int, link_bytes_per_s: int) -> None:
        self.window = LoadWindow(layers, experts, fast_steps=FAST_STEPS, slow_steps=SLOW_STEPS)
        self.lost_us_total = 0.0
        self._round: dict[int, Loads] = {}
        self._pairs = self._expert_us = 0.0
        self._copied_bytes = self._transfer_us = 0.0
        self._link_bytes_per_us = link_bytes_per_s / 1e6

    def add_loads(self, place: int, loads: Loads, pairs: int, expert_us: int, num_places: int) -> Loads | None:
        """A rank's report. Reports of one stretch belong together, and idle ranks make none: a stretch is over when all
        have spoken, or one for the second time. What it came to is returned then.

        Raises:
            ValueError: another shape than the others.
        """
        decay = 0.5 ** (loads.steps / SLOW_STEPS)
        self._pairs = self._pairs * decay + pairs
        self._expert_us = self._expert_us * decay + expert_us
        closed = None
        if place in self._round:
            closed = self._close()
        self._round[place] = loads
        if len(self._round) >= num_places:
            closed = self._close()
        return closed

    def _close(self) -> Loads:
        loads = add_ranks(list(self._round.values()))
        self._round.clear()
        self.window.add(loads)
        return loads

    def add_loss(self, loads: Loads, placement: Placement) -> None:
        """Reckons what skew has cost in a stretch."""
        if loads.steps:
            skew = self.skew_of(loads.counts / loads.steps, placement)
            self.lost_us_total += skew.lost_us_per_step * loads.steps

    def forget(self, place: int) -> None:
        """The rank is dead; its half of a stretch is not waited for."""
        self._round.pop(place, None)

    def add_copies(self, num_bytes: int, transfer_us: int) -> None:
        """What copying took; late copies count more."""
        if transfer_us:
            self._copied_bytes = 0.9 * self._copied_bytes + num_bytes
            self._transfer_us = 0.9 * self._transfer_us + transfer_us

    @property
    def us_per_token(self) -> float:
        """Expert time of one (row, expert) pair; 0 before any was measured."""
        return self._expert_us / self._pairs if self._pairs > 0 else 0.0

    @property
    def link_bytes_per_us(self) -> float:
        """As configured until copies were measured."""
        return self._copied_bytes / self._transfer_us if self._transfer_us > 0 else self._link_bytes_per_us

    def skew_of(self, loads: npt.NDArray[np.float64], placement: Placement) -> Skew:
        """Of these loads, float64[layers, experts] per step, under a placement."""
        return measure_skew(placement.sum_rank_loads(loads), self.us_per_token)
