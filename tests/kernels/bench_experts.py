"""Cases of the routed experts: a rank of two's share of V4-Flash's layers, uniform routing, MXFP4 slots; and of ranks
that hold 8 experts, or all.

Predictions. bf16 (`fp8=None`): a K tile of 256 columns and 128 weight rows (17.4 KB) costs each of a multiprocessor's
four schedulers 910 instructions, or 790 with `shift`; 936 to 1,055 cycles are what 4.3 TB/s leave for it. With twelve
warps about three quarters of the cycles issue something, which is 3.4 TB/s, or 3.9 with `shift`. fp8: 2.2 to 2.8
instructions a value for 3.5, so 500 to 700 of those cycles, and memory is what is left: 3.8 TB/s. Persistent programs
end unevenly (5 %). Grouping, two more launches that wait for each other, and the sum add about 13 us, more where many
pairs are summed.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from kernels import experts, experts_fp8, reference
from kernels.forms import SlotWeights
from tests.kernels.bench import Case

HIDDEN, WIDTH, EXPERTS, PLACES, LOCAL = 4096, 2048, 256, 6, 128
LAYERS = 8
"""Layers whose experts have slots; calls take them in turn, 13.7 GB in all. More or fewer where not LOCAL are here."""
CLAMP = 10.0
CHECKED_ROWS = 3
LIMIT = 6e-3
"""Relative error: the hidden layer is rounded to bf16 on both sides, now and then to different neighbours."""

LARGE: dict[str, int] = {"up_block": 64, "down_block": 128, "registers": 168, "programs": 3}
"""Twice as many channels in a program, of which three are resident."""

BF16 = experts.Config()
"""Products in bf16."""


def fp8(early: bool = False, **sizes: int) -> experts.Config:
    return experts.Config(early=early, fp8=experts_fp8.Config(**sizes))


EIGHT = {"warps": 8, "stages": 4, "programs": 2}
"""16 weight rows a warp."""
WIDE = {"rows": 256, "warps": 8, "stages": 2, "programs": 2}
"""256 weight rows a program."""
WIDEST = {"rows": 256, "warps": 16, "stages": 4, "programs": 1}

VARIANTS: dict[int, dict[str, experts.Config]] = {
    2: {
        "bf16": dataclasses.replace(BF16, early=True), "8 warps, late": fp8(**EIGHT), "4 warps": fp8(True),
        "3 programs": fp8(True, stages=3, programs=3), "256 rows": fp8(True, **WIDEST),
    },
    32: {
        "bf16": BF16, "bf16, all scales": dataclasses.replace(BF16, shift=None),
        "bf16, large": dataclasses.replace(BF16, **LARGE), "early": fp8(True), "8 warps": fp8(**EIGHT),
        "8 warps, early": fp8(True, **EIGHT), "3 programs": fp8(stages=3, programs=3), "256 rows": fp8(**WIDE),
        "256 rows, early": fp8(True, **WIDE), "256 rows, 16 warps": fp8(**WIDEST),
    },
    128: {
        "bf16": BF16, "early": fp8(True), "8 warps": fp8(**EIGHT), "256 rows": fp8(**WIDE),
        "256 rows, 16 warps": fp8(**WIDEST),
    },
    512: {
        "bf16": BF16, "tile 8": fp8(), "tile 8, 256 rows": fp8(**WIDE), "8 warps": fp8(tile=16, **EIGHT),
        "256 rows, 16 warps": fp8(tile=16, **WIDEST),
    },
}  # fmt: skip


@functools.cache
def slots() -> SlotWeights:
    count = LAYERS * LOCAL
    torch.manual_seed(0)

    def part(rows: int, columns: int) -> Tensor:
        words = torch.randint(-(2**63), 2**63 - 1, (count, rows, columns // 8), dtype=torch.int64, device="cuda")
        return words.view(torch.uint8)

    up, down = part(2 * WIDTH, HIDDEN // 2), part(HIDDEN, WIDTH // 2)
    # 2^-9 to 2^-5, on values of a deviation of 2.6: results of the order of one.
    up_scale, down_scale = (118 + part(*shape) % 5 for shape in ((2 * WIDTH, HIDDEN // 32), (HIDDEN, WIDTH // 32)))
    return SlotWeights(up, up_scale, down, down_scale)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Of one call: a layer's table, and its own rows and routes."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    expert_to_slot: Tensor

    def touched(self) -> list[int]:
        """Slots that a row chose."""
        chosen = self.expert_to_slot[self.ids.flatten().unique().long()]
        return [int(slot) for slot in chosen[chosen >= 0].tolist()]


@functools.cache
def inputs(rows: int, local: int = LOCAL) -> list[Inputs]:
    """Of each layer."""
    sets: list[Inputs] = []
    for layer in range(min(2 * LAYERS, LAYERS * LOCAL // local)):
        generator = torch.Generator().manual_seed(1000 * rows + layer)
        here = torch.randperm(EXPERTS, generator=generator)[:local]
        table = torch.full((EXPERTS,), -1)
        table[here] = layer * local + torch.randperm(local, generator=generator)
        ids = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :PLACES].sort(-1).values
        weights = torch.rand(rows, PLACES, generator=generator)
        x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
        sets.append(Inputs(x.cuda(), ids.int().cuda(), (weights / weights.sum(-1, keepdim=True) * 1.5).cuda(),
                           table.int().cuda()))  # fmt: skip
    return sets


@functools.cache
def truth(rows: int, local: int = LOCAL) -> Tensor:
    one, few = inputs(rows, local)[0], slice(0, CHECKED_ROWS)
    return reference.mix_experts(one.x[few], one.ids[few], one.weights[few], one.expert_to_slot, slots(), CLAMP)


def case(rows: int, name: str, config: experts.Config | None = None, local: int = LOCAL) -> Case:
    config = config or experts.choose_config(rows)
    sets = inputs(rows, local)

    def run(call: int) -> Tensor:
        one = sets[call % len(sets)]
        return experts.mix_experts(one.x, one.ids, one.weights, one.expert_to_slot, slots(), CLAMP, config=config)

    def check(result: object) -> None:
        assert isinstance(result, Tensor)
        want = truth(rows, local)
        error = float((result[:CHECKED_ROWS] - want).norm() / want.norm())
        if not error < LIMIT or not bool(result.isfinite().all()):
            raise AssertionError(f"relative error {error}")

    touched = sum(len(sets[call % len(sets)].touched()) for call in range(10)) / 10
    moved = touched * slots().slot_bytes
    pairs = rows * PLACES * local / EXPERTS
    rate = 3.8e6 if config.fp8 else 3.7e6 if config.shift is not None else 3.2e6
    return Case(
        name=f"T={rows} {touched:.1f} experts {name}",
        run=run,
        bytes=moved,
        flops=pairs * 6 * HIDDEN * WIDTH,
        # Partial sums are written and read, 16 KB a pair.
        predicted_us=13 + moved / rate + pairs * 2 * 16384 / 4.3e6,
        check=check,
    )


def yardstick(rows: int) -> Case:
    """The up projection alone in bf16 by torch._grouped_mm, over as many experts as a layer touches."""
    chosen = len(inputs(rows)[0].touched())
    per_expert = max(1, round(rows * PLACES / EXPERTS))
    weights = [torch.randn(chosen, HIDDEN, 2 * WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    x = torch.randn(chosen * per_expert, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ends = torch.arange(per_expert, chosen * per_expert + 1, per_expert, dtype=torch.int32, device="cuda")
    return Case(
        name=f"T={rows} {chosen} experts, bf16, up only, torch._grouped_mm",
        run=lambda call: torch._grouped_mm(x, weights[call % 2], ends),
        bytes=weights[0].nbytes,
        flops=2.0 * len(x) * HIDDEN * 2 * WIDTH,
        predicted_us=weights[0].nbytes / 3.1e6,
    )


def cases() -> list[Case]:
    """Defaults first, then what else might be faster."""
    listed = [case(rows, "default") for rows in VARIANTS]
    listed += [case(rows, *variant) for rows, variants in VARIANTS.items() for variant in variants.items()]
    listed += [case(8, "default"), case(512, "default, 8 experts here", local=8)]
    listed += [case(256, "default, all here", local=EXPERTS), case(256, "bf16, all here", BF16, local=EXPERTS)]
    return [*listed, yardstick(32)]
