"""Cases of the gate: its product and the choice, 1 to 256 rows of 256 and 384 experts."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from kernels import reference
from kernels.forms import Weight
from kernels.gate import DEFAULT, GateConfig, route
from tests.kernels.bench import Case

SETS = 40
"""Of 2 MB of weights each: more than the L2 holds, as in a step."""
HIDDEN = 4096
TOP_K = 6
SCALE = 1.5
VOCAB = 5000


@functools.cache
def inputs(rows: int, experts: int) -> list[tuple[Tensor, Weight, Tensor, Tensor, Tensor, Tensor]]:
    """Sets of (x, gate, bias, looked-up experts, tokens, positions)."""
    generator = torch.Generator("cuda").manual_seed(rows)
    hashed = torch.rand(VOCAB, experts, generator=generator, device="cuda").argsort(1)[:, :TOP_K].int().contiguous()
    found = []
    for _ in range(SETS):
        x = torch.randn(rows, HIDDEN, generator=generator, device="cuda").bfloat16()
        gate = torch.randn(experts, HIDDEN, generator=generator, device="cuda") * 3 * HIDDEN**-0.5
        bias = torch.randn(experts, generator=generator, device="cuda") * 0.2
        tokens = torch.randint(VOCAB, (rows,), generator=generator, device="cuda").int()
        positions = torch.arange(rows, device="cuda").int()
        found.append((x, Weight(gate.bfloat16()), bias, hashed, tokens, positions))
    return found


def case(rows: int, experts: int, lookup: bool, name: str = "", config: GateConfig = DEFAULT) -> Case:
    def arguments(i: int) -> tuple:
        x, gate, bias, hashed, tokens, positions = inputs(rows, experts)[i % SETS]
        return (x, gate, None if lookup else bias, hashed if lookup else None, TOP_K, SCALE, tokens, positions)

    def run(i: int) -> tuple[Tensor, Tensor]:
        return route(*arguments(i), config=config)

    def check(got: object) -> None:
        assert isinstance(got, tuple)
        want = reference.route(*arguments(0))
        same = (got[0] == want[0]).all(1)
        # Sums in another order may turn a choice between neighbours.
        assert int((~same).sum()) <= 1 + rows // 100
        assert float((got[1][same] - want[1][same]).norm() / want[1][same].norm()) < 3e-6

    return Case(
        name=f"{'looked up' if lookup else 'chosen'} T{rows} E{experts}{name}",
        run=run,
        bytes=experts * HIDDEN * 2 + rows * (HIDDEN * 2 + TOP_K * 8),
        # Weights come while the kernel before ends. Then x (0.7 us), 32 products in a row (0.6), parts to the L2 and a
        # count (1.3), parts back (0.7), six maxima of four warps in turn and what is around them (1.2). Of more rows a
        # second kernel chooses: 2.5 for its launch, 3 for some 1,000 instructions of one warp, none of them twice.
        # 256 rows are 1,024 programs in two waves, of which each reads 48 KB.
        predicted_us={1: 4.5, 16: 8.0, 64: 8.5, 256: 11.0}[rows] - (0.5 if lookup else 0.0),
        check=check,
    )


def cases() -> list[Case]:
    found = [case(rows, 256, lookup) for rows in (1, 16, 64, 256) for lookup in (False, True)]
    found.append(case(64, 384, False))
    variants = {
        " late": {"overlaps": False},
        " 16 slices": {"slices": 16, "chunk": 256},
        " 64 experts": {"experts": 64, "slices": 16, "chunk": 256},
        " 8 warps": {"warps": 8},
        " the last program chooses": {"together": 16},
        " a second kernel chooses": {"together": 0},
        " four warps choose": {"choosing_warps": 4},
    }
    for name, changes in variants.items():
        found += [case(rows, 256, False, name, dataclasses.replace(DEFAULT, **changes)) for rows in (1, 16, 256)]  # type: ignore[arg-type]
    return found
