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
    "wq_a|wkv": Size("linear", 1536, 4096, FP8),
    "csa": Size("linear", 2624, 4096, BF16, F32),
    "hca": Size("linear", 1024, 4096, BF16, F32),
    "wq_b": Size("linear", 40960, 1024, FP8),
    "wo_a": Size("grouped", 8192, 4096, FP8),
    "wo_b": Size("linear", 4096, 8192, FP8),
    "shared up": Size("gated", 4096, 4096, FP8),
    "shared down": Size("linear", 4096, 2048, FP8),
    "head": Size("linear", 129280, 4096, BF16, F32),
    # V4.1's blocks on V4's shape: what the finer scales cost.
    "wo_b 32x32": Size("linear", 4096, 8192, FP8, BF16, (32, 32)),
}
ROWS = (1, 16, 64, 256)

OLDER = {"overlaps": False}
"""What would be used without `kernels.streamed`, which takes products that have no tiling given."""
LOW = {"block_m": 64, "warps": 4}
TURNED = {"prepared": True}
HALF = {"block_n": 64, "registers": None}
WIDE = {"block_n": 256, "registers": None, "stages": 2}
EARLY = {"overlaps": True, "ahead": 0}
AHEAD = {"overlaps": True}
VARIANTS: dict[str, dict[int, list[dict[str, object]]]] = {
    "wq_b": {
        16: [OLDER, {"stages": 4}, EARLY, AHEAD],
        64: [OLDER, {"prepared": False}, LOW],
        256: [{"prepared": False}, HALF, WIDE],
    },
    "wo_a": {
        16: [OLDER, {"slices": 4}, EARLY],
        64: [OLDER, {"slices": 4}, {"prepared": False}, LOW],
        256: [{"slices": 4}, HALF],
    },
    "wo_b": {
        16: [OLDER, {"slices": 8}, EARLY, AHEAD],
        64: [OLDER, {"slices": 8}, {"prepared": False}, LOW],
        256: [{"slices": 8}, HALF, WIDE],
    },
    "shared up": {16: [EARLY, AHEAD], 64: [{"prepared": False}, LOW], 256: [HALF, WIDE]},
    "shared down": {16: [EARLY, {"slices": 2}], 64: [LOW, TURNED], 256: [{"slices": 2}, HALF]},
    "head": {256: [{"block_n": 256, "registers": None}]},
}
"""By weight and rows: what differs from the tiling that is used."""
PAIRED: dict[int, list[dict[str, object]]] = {16: [AHEAD], 64: [LOW, TURNED], 256: [HALF]}
"""The same for the first two of a layer in one launch."""


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
    """Bytes of weights, and of x for each tile that reads it, at their rates, or operations; and fixed costs.

    Weights at 85 % of a copy's rate; what comes from the L2 at 5.5 TB/s. Operations at 72 % of the peak (the matrix
    unit waits while a step's weights are dequantised), in whole rounds of programs. Fixed: 3 us for a dependent kernel
    in a graph and its first bytes, 1 us where slices are summed at the end, and what the last program loads, at the
    150 KB/us that one multiprocessor takes.
    """
    tiles = -(-size.out // config.block_m)
    programs = tiles * config.slices * -(-rows // config.block_n)
    moved = size.out * size.width * size.dtype.itemsize / (0.85 * BYTES_PER_US)
    cached = (tiles * rows * 2 + size.out * -(-rows // config.block_n)) * size.width / 5.5e6
    rounds = -(-programs // 132) * 132 / programs if rows > 64 else 1.0
    computed = 2 * size.out * size.width * max(rows, 16) / (0.72 * FLOPS_PER_US) * rounds
    sums = 0.0
    if config.slices > 1 and not config.serial:
        sums = 1.0 + config.slices * config.block_m * config.block_n * 4 / 150e3
    return max(moved, cached, computed) + (2.0 if config.overlaps else 3.0) + sums


def case(name: str, rows: int, changes: dict[str, object]) -> Case:
    size = SIZES[name]
    # By shape only: weights are made when a case runs.
    meta = Weight(
        torch.empty(size.out, size.width, dtype=size.dtype, device="meta"),
        torch.empty(0, device="meta") if size.dtype == FP8 else None,
        size.block,
    )
    config = dataclasses.replace(tiling(meta, rows), **changes)  # type: ignore[arg-type]
    same_bits = {"slices", "block_k"}.isdisjoint(changes)
    nbytes = size.out * size.width * size.dtype.itemsize + rows * size.width * size.groups * 2
    nbytes += rows * size.out * size.result.itemsize // (2 if size.form == "gated" else 1)

    def run(i: int) -> Tensor:
        held, rotating = weights(name), inputs(size.width * size.groups, rows)
        return product(size, rotating[i % SETS], held[i % len(held)], config if changes else None)

    label = f"m{config.block_m} n{config.block_n} k{config.block_k} s{config.slices}"
    label += f"{'*' if config.serial else ''} w{config.warps} p{config.stages}"
    label += f" overlaps {config.ahead}" if config.overlaps else ""
    label += f"{' turned' if config.prepared else ''}{f' r{config.registers}' if config.registers else ''}"
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


def paired(rows: int, changes: dict[str, object]) -> Case:
    """`wq_a|wkv` and `csa` in one launch."""
    sizes = [SIZES["wq_a|wkv"], SIZES["csa"]]
    config = None
    if changes:
        metas = [Weight(torch.empty(size.out, size.width, dtype=size.dtype, device="meta")) for size in sizes]
        first, second = (tiling(meta, rows) for meta in metas)
        shared = {name: getattr(first, name) for name in ("warps", "registers")} | {"overlaps": False}
        shared |= {"stages": min(first.stages, second.stages)} | changes
        config = (dataclasses.replace(first, **shared), dataclasses.replace(second, **shared))  # type: ignore[arg-type]

    def run(i: int) -> tuple[Tensor, Tensor]:
        first, second = weights("wq_a|wkv"), weights("csa")
        x = inputs(4096, rows)[i % SETS]
        return linear.paired_linear(x, first[i % len(first)], second[i % len(second)], config=config)

    def compare(got: object) -> None:
        assert isinstance(got, tuple)
        x = inputs(4096, rows)[0]
        for name, found in zip(("wq_a|wkv", "csa"), got, strict=True):
            want = linear.linear(x, weights(name)[0], SIZES[name].result)
            assert torch.equal(found, want), f"{name} by itself differs"

    nbytes = sum(size.out * size.width * size.dtype.itemsize for size in sizes)
    label = " ".join(f"{name} {value}" for name, value in changes.items())
    # As one product of both heights: bytes as they are, three steps of the shorter for two of the longer.
    together = max(nbytes / (0.85 * BYTES_PER_US), 2 * 4160 * 4096 * max(rows, 16) / (0.5 * FLOPS_PER_US)) + 5.0
    return Case(f"paired R{rows} {label}", run, nbytes, 2 * 4160 * 4096 * rows, together, compare)


LAYERS = 4
"""Of a chain: 0.6 GB of weights."""
CHAIN = ("wq_a|wkv", "csa", "wq_b", "wo_a", "wo_b", "shared up", "shared down")


@functools.lru_cache(1)
def layer_weights() -> list[dict[str, Weight]]:
    """Of some layers."""
    found = []
    for seed in range(LAYERS):
        generator = torch.Generator("cuda").manual_seed(seed)
        layer = {}
        for name in CHAIN:
            size = SIZES[name]
            data = torch.randn(size.out, size.width, generator=generator, device="cuda", dtype=BF16)
            if size.dtype == BF16:
                layer[name] = Weight(data)
            else:
                scale = torch.full((-(-size.out // 128), -(-size.width // 128)), 118, dtype=torch.uint8, device="cuda")
                layer[name] = Weight(data.mul_(4).to(FP8), scale)
        found.append(layer)
    return found


def chain(rows: int, ahead: int | None = None) -> Case:
    """Products of a layer, one after another.

    Args:
        rows: of the step.
        ahead: products are launched while those before them drain, and ask for so many bytes of each row.
    """

    def run(i: int) -> None:
        layer = layer_weights()[i % LAYERS]
        for name in CHAIN:
            size = SIZES[name]
            x = inputs(size.width * size.groups, rows)[i % SETS]
            config = None
            if ahead is not None:
                config = dataclasses.replace(tiling(layer[name], rows), overlaps=True, ahead=ahead)
            if name == "wq_a|wkv":
                linear.paired_linear(x, layer[name], layer["csa"])
            elif name != "csa":
                product(size, x, layer[name], config)

    nbytes = sum(SIZES[name].out * SIZES[name].width * SIZES[name].dtype.itemsize for name in CHAIN)
    flops = sum(2 * SIZES[name].out * SIZES[name].width * rows for name in CHAIN)
    # 4 us for each of 6 kernels; 3 where they overlap.
    predicted = max(nbytes / (0.85 * BYTES_PER_US), flops / (0.6 * FLOPS_PER_US)) + (24.0 if ahead is None else 18.0)
    return Case(f"layer R{rows}{'' if ahead is None else f' ahead {ahead}'}", run, nbytes, flops, predicted)


def cases() -> list[Case]:
    found = []
    for rows in ROWS:
        found.extend(chain(rows, ahead) for ahead in (None, 0, 512))
        found.extend(paired(rows, changes) for changes in ({}, *PAIRED.get(rows, [])))
    for name in SIZES:
        for rows in ROWS:
            found.append(case(name, rows, {}))
            found.extend(case(name, rows, changes) for changes in VARIANTS.get(name, {}).get(rows, []))
            if name in ("csa", "head"):
                found.append(yardstick(name, rows))
    return found
