"""Cases of the dense products: every weight of a V4-Flash layer and the head, 1 to 256 rows, variants of tiling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import linear, reference
from kernels.forms import Weight
from kernels.tiling import Tiling, tiling
from tests.kernels.bench import BYTES_PER_US, FLOPS_PER_US, Case

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROTATED_BYTES = 200e6
"""Copies of a weight are together larger than this, three times the L2: a step touches each weight once."""
SETS = 4
"""Sets of rows. They come from the kernel before and may sit in the L2."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A weight: its form, its shape, and the type of the result."""

    form: str
    out: int
    width: int
    dtype: torch.dtype
    result: torch.dtype = BF16
    block: tuple[int, int] = (128, 128)

    @property
    def groups(self) -> int:
        return 8 if self.form == "grouped" else 1


SIZES = {
    "wq_a|wkv": Size("linear", 1536, 4096, FP8, F32),
    "csa": Size("linear", 2624, 4096, BF16, F32),
    "hca": Size("linear", 1024, 4096, BF16, F32),
    "wq_b": Size("linear", 40960, 1024, FP8),
    "wo_a": Size("grouped", 8192, 4096, FP8),
    "wo_b": Size("linear", 4096, 8192, FP8),
    "shared up": Size("gated", 4096, 4096, FP8),
    "shared down": Size("linear", 4096, 2048, FP8),
    "gate": Size("linear", 256, 4096, BF16, F32),
    "head": Size("linear", 129280, 4096, BF16, F32),
    # V4.1's blocks on V4's shape: what the finer scales cost.
    "wo_b 32x32": Size("linear", 4096, 8192, FP8, BF16, (32, 32)),
}
ROWS = (1, 16, 64, 256)

VARIANTS: dict[str, dict[int, list[dict[str, object]]]] = {
    "wq_a|wkv": {
        1: [{"overlaps": True}],
        16: [{"slices": 4}, {"slices": 16}, {"stages": 4}, {"block_m": 128, "stages": 4}, {"scale_weights": True}],
        64: [{"overlaps": True}, {"block_n": 32}, {"slices": 4}],
        256: [{"block_m": 128, "block_n": 128, "warps": 8}],
    },
    "csa": {
        1: [{"overlaps": True}],
        16: [{"block_k": 128, "stages": 4}, {"slices": 8}, {"slices": 2}, {"stages": 4}, {"block_m": 128, "stages": 4}],
        64: [{"overlaps": True}, {"block_m": 128}, {"block_m": 128, "serial": True}],
        256: [{"serial": True}, {"block_m": 64}],
    },
    "hca": {1: [{"overlaps": True}], 16: [{"slices": 8}, {"stages": 4}]},
    "wq_b": {
        1: [{"overlaps": True}],
        16: [{"block_m": 128, "stages": 4}, {"stages": 3}, {"stages": 4}],
        64: [
            {"overlaps": True},
            {"stages": 3},
            {"block_m": 128},
            {"block_m": 128, "warps": 8},
            {"block_m": 128, "warps": 8, "scale_weights": True},
        ],
        256: [
            {"block_n": 64, "warps": 4},
            {"block_m": 64, "warps": 4, "stages": 3},
            {"block_n": 256, "stages": 2, "scale_weights": True},
            {"scale_weights": True},
        ],
    },
    "wo_a": {1: [{"overlaps": True}], 16: [{"slices": 4}, {"stages": 4}], 64: [{"block_m": 128}]},
    "wo_b": {
        1: [{"overlaps": True}],
        16: [{"slices": 8}, {"stages": 4}, {"block_m": 128, "stages": 4}],
        64: [{"block_m": 128}, {"block_m": 128, "warps": 8}, {"block_m": 128, "slices": 8}, {"stages": 3}],
        256: [{"serial": True}, {"block_n": 64, "warps": 4}, {"block_n": 256, "stages": 2, "scale_weights": True}],
    },
    "shared up": {1: [{"overlaps": True}], 16: [{"slices": 8}, {"block_m": 128}], 64: [{"block_m": 128}]},
    "shared down": {1: [{"overlaps": True}], 16: [{"slices": 2}], 64: [{"block_m": 128}]},
    "gate": {1: [{"overlaps": True}], 16: [{"slices": 8}, {"slices": 32}], 64: [{"block_n": 32}]},
    "head": {16: [{"block_m": 64}, {"stages": 6}], 64: [{"block_m": 64}, {"warps": 8}], 256: [{"block_m": 64}]},
}
"""By weight and rows: what differs from the tiling that is used."""


@functools.lru_cache(2)
def weights(name: str) -> list[Weight]:
    """Copies of a weight, each with its own values."""
    size = SIZES[name]
    nbytes = size.out * size.width * size.dtype.itemsize
    copies = []
    for seed in range(int(ROTATED_BYTES // nbytes) + 1):
        generator = torch.Generator("cuda").manual_seed(seed)
        data = torch.randn(size.out, size.width, generator=generator, device="cuda", dtype=BF16)
        if size.dtype == BF16:
            copies.append(Weight(data.mul_(size.width**-0.5)))
            continue
        shape = (-(-size.out // size.block[0]), -(-size.width // size.block[1]))
        scale = torch.randint(116, 121, shape, generator=generator, device="cuda", dtype=torch.uint8)
        copies.append(Weight(data.mul_(4).to(FP8), scale, size.block))
    return copies


@functools.lru_cache(8)
def inputs(width: int, rows: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)
    return [torch.randn(rows, width, generator=generator, device="cuda", dtype=BF16) for _ in range(SETS)]


def product(size: Size, x: Tensor, weight: Weight, config: Tiling | None) -> Tensor:
    if size.form == "grouped":
        return linear.grouped_linear(x, weight, size.groups, config=config)
    if size.form == "gated":
        return linear.gated_linear(x, weight, 10.0, config=config)
    return linear.linear(x, weight, size.result, config=config)


def check(name: str, rows: int, same_bits: bool) -> Callable[[object], None]:
    """Against float32 on the device; and the last row alone, tiled as is usual, has the bits that it has here."""
    size = SIZES[name]

    def compare(got: object) -> None:
        assert isinstance(got, Tensor)
        weight, x = weights(name)[0], inputs(size.width * size.groups, rows)[0]
        if size.form == "grouped":
            want = reference.grouped_linear(x.float(), weight, size.groups)
        elif size.form == "gated":
            want = reference.gated_linear(x.float(), weight, 10.0)
        else:
            want = reference.linear(x, weight, F32)
        error = float((got.float() - want).norm() / want.norm())
        # torch's own float32 product is the truth here, so its rounding counts too.
        limit = 1e-5 if size.result == F32 else 3e-3
        assert error < limit, f"error {error:.2e}"
        if not same_bits:
            return
        alone = product(size, x[-1:], weight, None)
        assert torch.equal(alone[0], got[-1]), "the last row alone differs from the last row in the batch"

    return compare


def predict(size: Size, rows: int, config: Tiling) -> float:
    """Bytes at 85 % of a copy's rate or operations at 60 % of the peak, and fixed costs.

    Fixed: 2.5 us for a dependent kernel in a graph and the first bytes, 1.5 us where slices are summed at the end
    (three round trips to the L2: store, count, load), and what the last program loads, at the 100 KB/us that one
    multiprocessor takes.
    """
    moved = size.out * size.width * size.dtype.itemsize / (0.85 * BYTES_PER_US)
    computed = 2 * size.out * size.width * max(rows, 16) / (0.6 * FLOPS_PER_US)
    sums = 0.0
    if config.slices > 1 and not config.serial:
        sums = 1.5 + config.slices * config.block_m * config.block_n * 4 / 100e3
    if config.overlaps:
        # Launch and first bytes are hidden behind the kernel before; from the wait to the end it is 2 us at least.
        return max(moved, computed, 2.0) + 0.5 + sums / 2
    return max(moved, computed) + 2.5 + sums


def case(name: str, rows: int, changes: dict[str, object]) -> Case:
    size = SIZES[name]
    # By shape only: weights are made when a case runs.
    meta = Weight(
        torch.empty(size.out, size.width, dtype=size.dtype, device="meta"),
        torch.empty(0, device="meta") if size.dtype == FP8 else None,
        size.block,
    )
    config = dataclasses.replace(tiling(meta, rows), **changes)  # type: ignore[arg-type]
    same_bits = {"slices", "block_k", "scale_weights"}.isdisjoint(changes)
    nbytes = size.out * size.width * size.dtype.itemsize + rows * size.width * size.groups * 2
    nbytes += rows * size.out * size.result.itemsize // (2 if size.form == "gated" else 1)

    def run(i: int) -> Tensor:
        held, rotating = weights(name), inputs(size.width * size.groups, rows)
        return product(size, rotating[i % SETS], held[i % len(held)], config)

    label = f"m{config.block_m} n{config.block_n} k{config.block_k} s{config.slices}"
    label += f"{'*' if config.serial else ''} w{config.warps} p{config.stages}"
    label += f"{' overlaps' if config.overlaps else ''}{' scaled weights' if config.scale_weights else ''}"
    return Case(
        name=f"{name} R{rows} {label}{' (variant)' if changes else ''}",
        run=run,
        bytes=nbytes,
        flops=2 * size.out * size.width * rows,
        predicted_us=predict(size, rows, config),
        # A variant that cuts columns otherwise has other bits.
        check=check(name, rows, same_bits),
    )


def yardstick(name: str, rows: int) -> Case:
    """What torch takes for the same shape in bf16."""
    size = SIZES[name]

    def run(i: int) -> Tensor:
        held, rotating = weights(name), inputs(size.width, rows)
        return rotating[i % SETS] @ held[i % len(held)].data.T

    nbytes = size.out * size.width * 2 + rows * (size.width + size.out) * 2
    moved = nbytes / (0.75 * BYTES_PER_US)
    return Case(f"{name} R{rows} torch bf16", run, nbytes, 2 * size.out * size.width * rows, moved + 4)


def cases() -> list[Case]:
    found = []
    for name in SIZES:
        for rows in ROWS:
            found.append(case(name, rows, {}))
            found.extend(case(name, rows, changes) for changes in VARIANTS.get(name, {}).get(rows, []))
            if name in ("csa", "head"):
                found.append(yardstick(name, rows))
    return found
