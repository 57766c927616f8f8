"""Cases of the gate's choice: 1 to 512 rows of 256 and 384 experts."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels import reference
from kernels.gate import route
from tests.kernels.bench import Case

SETS = 4
TOP_K = 6
SCALE = 1.5


@functools.cache
def inputs(rows: int, experts: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Sets of (logits, bias, looked-up experts, counts)."""
    generator = torch.Generator("cuda").manual_seed(rows)
    found = []
    for _ in range(SETS):
        logits = torch.randn(rows, experts, generator=generator, device="cuda") * 3
        bias = torch.randn(experts, generator=generator, device="cuda") * 0.2
        hashed = torch.rand(rows, experts, generator=generator, device="cuda").argsort(1)[:, :TOP_K].int().contiguous()
        found.append((logits, bias, hashed, torch.zeros(experts, dtype=torch.int32, device="cuda")))
    return found


def case(rows: int, experts: int, lookup: bool, overlaps: bool = False) -> Case:
    def run(i: int) -> tuple[Tensor, Tensor]:
        logits, bias, hashed, counts = inputs(rows, experts)[i % SETS]
        chosen = hashed if lookup else None
        return route(logits, None if lookup else bias, chosen, TOP_K, SCALE, None, counts, overlaps=overlaps)

    def check(got: object) -> None:
        assert isinstance(got, tuple)
        logits, bias, hashed, _ = inputs(rows, experts)[0]
        want = reference.route(logits, None if lookup else bias, hashed if lookup else None, TOP_K, SCALE)
        same = (got[0] == want[0]).all(1)
        # Exponentials that differ in the last bit may turn a choice between neighbours.
        assert int((~same).sum()) <= rows // 500
        assert float((got[1][same] - want[1][same]).norm() / want[1][same].norm()) < 1e-6

    return Case(
        name=f"{'looked up' if lookup else 'chosen'} T{rows} E{experts}{' overlaps' if overlaps else ''}",
        run=run,
        bytes=rows * (experts * 4 + TOP_K * 8),
        # Launch and first bytes 2.5 us; six maxima in turn, each some 60 dependent instructions of 5-6 cycles, and 200
        # instructions around them: 1.2 us at 1.7 GHz. A row is one warp and all are resident at once up to 4,000 rows.
        # Overlapping saves the launch, some 1.5 us.
        predicted_us=(1.0 if overlaps else 2.5) + (0.5 if lookup else 1.5),
        check=check,
    )


def cases() -> list[Case]:
    found = [case(rows, 256, lookup) for rows in (1, 16, 64, 256, 512) for lookup in (False, True)]
    return [*found, case(64, 384, False), case(64, 256, False, overlaps=True)]
