"""Times hyper-connections at V4-Flash's sizes, and V4.1's width: both kernels together, apart, and their variants."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels import hyper, reference
from kernels.forms import HyperWeights
from tests.kernels.bench import Case

CALLS = 6
"""Calls of a run. A graph has ten runs; ten calls' inputs would sit in the L2, sixty calls' do not: in a step
gigabytes pass between two calls."""
SETS = 10 * CALLS


@dataclasses.dataclass(frozen=True)
class Set:
    streams: Tensor
    output: Tensor
    post: Tensor
    combination: Tensor
    weights: HyperWeights


def draw(rows: int, hidden: int, *, head: bool = False) -> list[Set]:
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    count = 4 if head else 24
    return [
        Set(
            streams=normal(rows, 4, hidden).bfloat16(),
            output=normal(rows, hidden).bfloat16(),
            post=normal(rows, 4).sigmoid() * 2,
            combination=normal(rows, 4, 4).softmax(-1),
            weights=HyperWeights(
                normal(count, 4 * hidden) * (4 * hidden) ** -0.5,
                normal(count),
                normal(1 if head else 3).abs(),
                normal(hidden),
                20,
                1e-6,
                1e-6,
            ),
        )
        for _ in range(SETS)
    ]


def moved(rows: int, hidden: int, count: int = 24) -> float:
    """Bytes of one call: fn; streams read, written, and read again by the collapse from the L2, which is not counted;
    output and input of sublayers."""
    return count * 4 * hidden * 4 + rows * (2 * 4 + 2) * hidden * 2


def near(out: Tensor, truth: Tensor, tolerance: float) -> None:
    error = float((out.double() - truth.double()).norm() / truth.double().norm())
    assert error < tolerance, f"relative error {error:.2e}"


def cases() -> list[Case]:
    made = []
    default = hyper.DEFAULT
    variants = {
        "": default,
        " overlaps": dataclasses.replace(default, overlaps=True),
        " width 64": dataclasses.replace(default, width=64),
        " width 64, 8 warps, overlaps": dataclasses.replace(default, width=64, mix_warps=8, overlaps=True),
        " width 128, 8 warps": dataclasses.replace(default, width=128, mix_warps=8),
        " tf32x3": dataclasses.replace(default, projection="tf32x3"),
        " connect 8 warps": dataclasses.replace(default, connect_warps=8),
        " connect 16 warps": dataclasses.replace(default, connect_warps=16),
    }
    # Predictions, for one call. Two dependent launches, 2 us each. mix: one round of loads from memory (0.9 us), the
    # mixing and 24 matrix instructions of a warp (0.5 us), a store (0.4 us): 3.8 us up to 64 rows; at 256 rows 2,048
    # programs in three waves, 6.5 us. connect: partial sums and streams from the L2 (0.7 us), two reductions over a
    # program (0.3 us); beside it 20 iterations of 60 cycles twice (1.4 us): 3.6 us; at 256 rows 512 programs, 4.5 us.
    # Overlapped launches save about 1 us each.
    predicted = {1: 7.0, 16: 7.4, 64: 8.0, 256: 11.0}
    for rows in (1, 16, 64, 256):
        for name, config in variants.items():
            if rows in (1, 64) and name not in ("", " overlaps"):
                continue
            guess = predicted[rows] - 2.0 * config.overlaps
            made += _connect(rows, 4096, config, f"connect {rows} rows{name}", guess)
    made += _connect(16, 5120, default, "connect 16 rows, hidden 5120", 7.8)
    for rows in (16, 256):
        made += _apart(rows, default, f"{rows} rows", {16: (3.8, 3.6), 256: (6.5, 4.5)}[rows])
    made += _head(64, "collapse_head 64 rows", 7.4)
    return made


def _connect(rows: int, hidden: int, config: hyper.HyperConfig, name: str, predicted: float) -> list[Case]:
    sets: list[Set] = []

    def run(i: int) -> object:
        if not sets:
            sets.extend(draw(rows, hidden))
        out: object = None
        for call in range(CALLS):
            given = sets[(i * CALLS + call) % SETS]
            result = hyper.connect(
                given.streams, given.output, given.post, given.combination, given.weights, config=config
            )
            out = result if call == 0 else out
        return out

    def check(out: object) -> None:
        assert isinstance(out, tuple)
        given = sets[0]
        mixed = reference.connect(given.streams, given.output, given.post, given.combination, given.weights)[0]
        near(out[0], mixed, 2e-3)
        truth = reference.connect(out[0], None, None, None, given.weights)
        near(out[1], truth[1], 2e-3)
        # tf32 would be off by 3e-4.
        for coefficients, expected in zip(out[2:], truth[2:], strict=True):
            near(coefficients, expected, 1e-5)

    return [Case(f"{name} x{CALLS}", run, CALLS * moved(rows, hidden), 0.0, CALLS * predicted, check)]


def _apart(rows: int, config: hyper.HyperConfig, name: str, predicted: tuple[float, float]) -> list[Case]:
    sets: list[Set] = []
    halves: list[tuple[Tensor, Tensor]] = []

    def prepare() -> None:
        if not sets:
            sets.extend(draw(rows, 4096))
            halves.extend(_mixed(given, config) for given in sets)

    def run_mix(i: int) -> object:
        prepare()
        return [_mixed(sets[(i * CALLS + call) % SETS], config) for call in range(CALLS)]

    def run_connect(i: int) -> object:
        prepare()
        for call in range(CALLS):
            at = (i * CALLS + call) % SETS
            mixed, partials = halves[at]
            x = torch.empty_like(mixed[:, 0])
            ways_out = (partials.new_empty((rows, 4)), partials.new_empty((rows, 4, 4)), partials.new_empty((rows, 4)))
            hyper._collapse(mixed, partials, sets[at].weights, config, x, None, ways_out)
        return None

    mix_bytes = CALLS * moved(rows, 4096)
    connect_bytes = CALLS * rows * (5 * 4096 * 2 + 4096 // config.width * 128)
    return [
        Case(f"mix alone {name} x{CALLS}", run_mix, mix_bytes, 0.0, CALLS * predicted[0]),
        Case(f"connect alone {name} x{CALLS}", run_connect, connect_bytes, 0.0, CALLS * predicted[1]),
    ]


def _mixed(given: Set, config: hyper.HyperConfig) -> tuple[Tensor, Tensor]:
    return hyper._mix(given.streams, given.output, given.post, given.combination, given.weights, config)


def _head(rows: int, name: str, predicted: float) -> list[Case]:
    sets: list[Set] = []

    def run(i: int) -> object:
        if not sets:
            sets.extend(draw(rows, 4096, head=True))
        given = sets[i % SETS]
        return hyper.collapse_head(given.streams, given.output, given.post, given.combination, given.weights)

    def check(out: object) -> None:
        assert isinstance(out, tuple)
        given = sets[0]
        streams, hidden = reference.collapse_head(
            given.streams, given.output, given.post, given.combination, given.weights
        )
        near(out[0], streams, 2e-3)
        near(out[1], hidden, 4e-3)

    return [Case(name, run, moved(rows, 4096, 4), 0.0, predicted, check)]
