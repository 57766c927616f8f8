"""How much work each expert gets: a part's load window with two half-lives, and the skew of ranks in three figures.

Counts come from the gate (`Loads`), idle and padded rows excluded there. The window keeps two decayed sums of them, a
fast and a slow one; the slow one has less noise, the fast one is right after the traffic has changed. Half-lives count
steps, not seconds: an idle group forgets nothing.

The three figures of skew always have these names (design, section 5): `balancedness`, `imbalance`, `lost_us_per_step`.
The last is the one to act on.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Loads:
    """What one rank's (or a whole group's) gates counted over some steps.

    Attributes:
        counts: int64[layers, experts], rows sent to each expert. Taken, and made read-only.
        steps: steps in which they were counted; steps without rows count too.

    Raises:
        ValueError: a negative count or number of steps.
    """

    counts: Ints
    steps: int

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or self.counts.dtype != np.int64:
            raise ValueError(f"loads are int64[layers, experts], not {self.counts.dtype}{self.counts.shape}")
        if self.steps < 0 or (self.counts.size and int(self.counts.min()) < 0):
            raise ValueError(f"loads over {self.steps} steps hold a negative number")
        self.counts.flags.writeable = False


def add_ranks(loads: list[Loads]) -> Loads:
    """One group's loads from those of its ranks over the same stretch: counts add up, steps do not."""
    if not loads:
        raise ValueError("a group has at least one rank's loads")
    shapes = {entry.counts.shape for entry in loads}
    if len(shapes) != 1:
        raise ValueError(f"ranks of a group count different layers or experts: {sorted(shapes)}")
    return Loads(np.sum([entry.counts for entry in loads], axis=0), max(entry.steps for entry in loads))


class LoadWindow:
    """Decayed loads of one model part.

    Args:
        layers, experts: shape of the part.
        fast_steps, slow_steps: half-lives; counts that are one half-life old weigh half.
        drift: how far the fast and the slow distribution of a layer may be apart (total variation, 0 to 1, beyond
            what chance explains) before `expected` believes the fast one.
    """

    def __init__(
        self, layers: int, experts: int, *, fast_steps: float = 256.0, slow_steps: float = 4096.0, drift: float = 0.04
    ) -> None:
        if not 0 < fast_steps <= slow_steps:
            raise ValueError(f"half-lives of {fast_steps} (fast) and {slow_steps} (slow) steps: fast comes first")
        if not 0 <= drift <= 1:
            raise ValueError(f"drift is a share, {drift} is not in [0, 1]")
        self._half_lives = np.array([fast_steps, slow_steps])
        self._drift = drift
        self._counts = np.zeros((2, layers, experts))
        self._steps = np.zeros(2)
        self._expected: Floats | None = None
        self.total_steps = 0

    def add(self, loads: Loads) -> None:
        """Takes what was counted since the last time in."""
        if loads.counts.shape != self._counts.shape[1:]:
            raise ValueError(f"loads of shape {loads.counts.shape} in a window of {self._counts.shape[1:]}")
        decay = 0.5 ** (loads.steps / self._half_lives)
        self._counts *= decay[:, None, None]
        self._counts += loads.counts
        self._steps = self._steps * decay + loads.steps
        self.total_steps += loads.steps
        self._expected = None

    def fast(self) -> Floats:
        """float64[layers, experts]: tokens per step, by the fast half-life; zeros before the first step."""
        return self._per_step(0)

    def slow(self) -> Floats:
        """The same by the slow half-life."""
        return self._per_step(1)

    def _per_step(self, index: int) -> Floats:
        steps = float(self._steps[index])
        rates: Floats = self._counts[index] / steps if steps > 0 else np.zeros_like(self._counts[index])
        return rates

    def measure_drift(self) -> Floats:
        """float64[layers]: total variation between fast and slow, less what counting noise alone would show, >= 0."""
        sums = self._counts.sum(axis=2)
        shares = self._counts / np.maximum(sums, 1.0)[:, :, None]
        distance = 0.5 * np.abs(shares[0] - shares[1]).sum(axis=1)
        # A multinomial share p of n draws is off by sqrt(2 p (1 - p) / (pi n)) on average.
        spread = np.sqrt(shares[1] * (1 - shares[1])).sum(axis=1)
        noise = 0.5 * math.sqrt(2 / math.pi) * spread / np.sqrt(np.maximum(sums[0], 1.0))
        drift: Floats = np.where(sums[0] > 0, np.maximum(distance - noise, 0.0), 0.0)
        return drift

    def expected(self) -> Floats:
        """float64[layers, experts]: tokens per step to plan with: slow, but fast in layers that drifted. Read-only, and
        the same array until the window takes more in: so what is made of it can be kept as long as it is the same."""
        if self._expected is None:
            moved = self.measure_drift() > self._drift
            self._expected = np.where(moved[:, None], self.fast(), self.slow())
            self._expected.flags.writeable = False
        return self._expected


@dataclasses.dataclass(frozen=True, slots=True)
class Skew:
    """How uneven ranks are loaded.

    Attributes:
        balancedness: sum over layers of mean rank load / sum over layers of the largest; 1 is even.
        imbalance: (max - mean) / mean of the worst layer; 0 is even.
        lost_us_per_step: (max - mean) tokens x microseconds per token, summed over layers: what a perfect placement
            would save in each step.
        layer, rank: the worst layer, and its fullest rank.
    """

    balancedness: float
    imbalance: float
    lost_us_per_step: float
    layer: int
    rank: int


def measure_skew(rank_loads: Floats, us_per_token: float) -> Skew:
    """`rank_loads`: float64[layers, ranks], tokens per step, as `Placement.sum_rank_loads` gives them."""
    if rank_loads.ndim != 2 or rank_loads.size == 0:
        raise ValueError(f"rank loads are float64[layers, ranks], not of shape {rank_loads.shape}")
    most, mean = rank_loads.max(axis=1), rank_loads.mean(axis=1)
    over = most - mean
    uneven = np.divide(over, mean, out=np.zeros_like(over), where=mean > 0)
    layer = int(uneven.argmax())
    total = float(most.sum())
    return Skew(
        balancedness=float(mean.sum()) / total if total > 0 else 1.0,
        imbalance=float(uneven[layer]),
        lost_us_per_step=float(over.sum()) * us_per_token,
        layer=layer,
        rank=int(rank_loads[layer].argmax()),
    )
