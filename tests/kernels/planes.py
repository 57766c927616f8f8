"""Planes: record planes for tests, laid out with gaps, and comparison of arenas that kernels and truths wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reference
from kernels.forms import Plane, RecordFormat

GAP = 96
"""Bytes between parts of a block that nobody may touch; a multiple of 16, and of no power of two above 32."""


def lay_plane(base: int, rows: int, width: int, rope: int, form: RecordFormat, stride: int = 0) -> tuple[Plane, int]:
    """(a plane at `base`, the byte behind it and a gap). An index key is one in fp8 with `rope` 0."""
    size = {"fp32": width * 4, "bf16": width * 2, "fp8": width + rope}[form]
    scale_bytes = 0 if form != "fp8" else 8 if rope else 4
    scale = base + rows * size + -(rows * size) % 16
    end = scale + rows * scale_bytes
    return Plane(base, scale, stride, rows, width, rope, form, size, scale_bytes), end + -end % 16 + GAP


def plane_records(arena: Tensor, plane: Plane, blocks: int) -> Tensor:
    """float32[blocks * rows, width]: all that a plane holds."""
    places = [(block, row) for block in range(blocks) for row in range(plane.rows)]
    return torch.stack([reference.load_record(arena, plane, block, row) for block, row in places])


def compare_records(arena: Tensor, truth: Tensor, plane: Plane, blocks: int) -> float:
    """Largest relative error of a record; those that the truth did not write must hold the same bytes in both."""
    out, wanted = plane_records(arena, plane, blocks), plane_records(truth, plane, blocks)
    written = ~wanted.isnan().any(1)
    assert written.any()
    assert torch.equal(out[~written].isnan(), wanted[~written].isnan())
    error = (out[written] - wanted[written]).norm(dim=1) / wanted[written].norm(dim=1)
    assert not error.isnan().any()
    return float(error.max())


def blank_records(arena: Tensor, plane: Plane, blocks: int) -> Tensor:
    """The arena with all that a plane holds zeroed: what is left must not depend on it."""
    left = arena.clone()
    for block in range(blocks):
        for at, size in ((plane.data, plane.data_bytes), (plane.scale, plane.scale_bytes)):
            begin = at + block * plane.stride
            left[begin : begin + plane.rows * size] = 0
    return left
