"""Quantisation: from float tensors to the vendor's stored format, and the round trip for training with it.

Owns the rounding rules and the writer. Reading is checkpoint.py's; what `fake_quantise` returns is bitwise what
`load_checkpoint` reads back after `save_checkpoint`. Scales are powers of two, the smallest that keeps the largest
magnitude of a group inside the format; rounding is to nearest, ties to the even code. Straight-through gradients are
the trainer's business: nothing here is differentiable.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.model.checkpoint import (
    E2M1,
    GROUP,
    Store,
    TensorSpec,
    dequantise_fp8,
    dequantise_mxfp4,
    power_of_two,
    scale_name,
    stacked_name,
    tensor_specs,
)
from engine.model.layers import WeightMap, Weights
from engine.model.shapes import ModelShape, shape_from_config

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NARROW_GROUP = 16
_DEFAULT_BLOCK = (32, 32)
# Midpoints between neighbouring E2M1 magnitudes.
_MIDPOINTS = tuple((low + high) / 2 for low, high in itertools.pairwise(E2M1))


def scale_bytes(largest: Tensor, limit: float) -> Tensor:
    """e8m0 bytes uint8[...] of 2^ceil(log2(largest / limit)); a group of zeros gets scale 1."""
    mantissa, exponent = torch.frexp(largest.float() / limit)
    # frexp gives a mantissa in [0.5, 1): exactly 0.5 is a power of two and needs no rounding up.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(largest > 0, exponent, 0)
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def quantise_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Round a matrix to e4m3 with one scale per block.

    Args:
        weight: float[rows, columns].
        block: edge lengths; the last blocks may be cut off.

    Returns:
        (float8_e4m3fn[rows, columns], uint8[ceil(rows / block 0), ceil(columns / block 1)]).
    """
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    padded = torch.nn.functional.pad(
        weight.detach().float(), (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows)
    )
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    scale = scale_bytes(blocks.abs().amax((1, 3)), E4M3_MAX)
    scaled = blocks / power_of_two(scale)[:, None, :, None]
    stored = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.view(padded.shape)[:rows, :columns].contiguous(), scale


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round n-gram rows to e4m3 with one scale per row and 32 columns; shapes as `quantise_fp8` with block (1, 32)."""
    return quantise_fp8(weight, (1, GROUP))


def quantise_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to packed E2M1 with one scale per 32 columns.

    Args:
        weight: float[..., columns], columns a multiple of 32.

    Returns:
        (int8[..., columns / 2] with the even column in the low nibble, uint8[..., columns / 32]).
    """
    groups = weight.detach().float().unflatten(-1, (-1, GROUP))
    scale = scale_bytes(groups.abs().amax(-1), E2M1_MAX)
    scaled = groups / power_of_two(scale).unsqueeze(-1)
    code = (_nearest_code(scaled) | (torch.signbit(scaled) << 3)).flatten(-2).to(torch.uint8)
    return (code[..., ::2] | (code[..., 1::2] << 4)).view(torch.int8), scale


def _nearest_code(scaled: Tensor) -> Tensor:
    """int64[...] code 0..7 of the E2M1 magnitude nearest to |scaled|; beyond the largest means the largest."""
    midpoints = torch.tensor(_MIDPOINTS, device=scaled.device)
    magnitude = scaled.abs().contiguous()
    # A magnitude on a midpoint belongs to the even one of its two codes; midpoint i lies between codes i and i + 1.
    below = torch.bucketize(magnitude, midpoints)
    above = torch.bucketize(magnitude, midpoints, right=True)
    return torch.where(below % 2 == 0, below, above)


def fake_quantise_fp8(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix after its round trip through fp8 blocks, float32."""
    return dequantise_fp8(*quantise_fp8(weight, block), block)


def fake_quantise_rows(weight: Tensor) -> Tensor:
    """N-gram rows after their round trip through fp8, float32."""
    return dequantise_fp8(*quantise_rows(weight), (1, GROUP))


def fake_quantise_mxfp4(weight: Tensor) -> Tensor:
    """Expert matrices [..., columns] after their round trip through MXFP4, float32."""
    return dequantise_mxfp4(*quantise_mxfp4(weight))


def round_window(entry: Tensor) -> Tensor:
    """Window entries [..., channels] after their round trip through e4m3 with one scale per 32 channels."""
    return fake_quantise_rows(entry.flatten(0, -2)).view(entry.shape).to(entry.dtype)


def round_entry(entry: Tensor) -> Tensor:
    """Compressed entries [..., channels] after their round trip through E2M1 with an e4m3 scale per 16 channels."""
    groups = entry.detach().float().unflatten(-1, (-1, NARROW_GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / E2M1_MAX).to(torch.float8_e4m3fn).float()
    scaled = torch.where(scale > 0, groups / scale, 0.0)
    values = torch.tensor(E2M1, device=entry.device)[_nearest_code(scaled)]
    return (torch.copysign(values, scaled) * scale).flatten(-2).to(entry.dtype)


def round_index(vector: Tensor) -> Tensor:
    """Index queries or keys [..., channels] after their round trip through MXFP4."""
    return fake_quantise_mxfp4(vector).to(vector.dtype)


@dataclass(frozen=True)
class CacheRounding:
    """How cached values are rounded on their way in; each takes and returns float[..., channels].

    Attributes:
        window: for window entries.
        entry: for compressed entries.
        index: for index queries and keys.
    """

    window: Callable[[Tensor], Tensor]
    entry: Callable[[Tensor], Tensor]
    index: Callable[[Tensor], Tensor]


# The roundings that the vendor trained V4.1 with.
VENDOR_ROUNDING = CacheRounding(round_window, round_entry, round_index)


def fake_quantise_tensor(weight: Tensor, spec: TensorSpec, block: tuple[int, int] | None) -> Tensor:
    """One tensor after its round trip through the file, float32.

    Args:
        weight: float tensor; experts may be stacked in leading dimensions.
        spec: how the format stores it.
        block: edges of fp8 blocks; None for a file that is not quantised.
    """
    weight = weight.detach()
    if spec.store == "fp32":
        return weight.float()
    if spec.store == "bf16" or block is None:
        return weight.to(torch.bfloat16).float()
    if spec.store == "fp8":
        return fake_quantise_fp8(weight, block)
    return fake_quantise_rows(weight) if spec.store == "rows" else fake_quantise_mxfp4(weight)


def weight_specs(shape: ModelShape) -> dict[str, TensorSpec]:
    """As `tensor_specs`, under the names of loaded weights: experts stacked, shapes with a leading expert count."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in tensor_specs(shape).items():
        stacked = stacked_name(name)
        if stacked is None:
            specs[name] = spec
        else:
            specs[stacked[0]] = TensorSpec((stacked[1] + 1, *spec.shape), spec.store)
    return specs


def fake_quantise(weights: WeightMap, shape: ModelShape, stores: Mapping[str, Store] | None = None) -> Weights:
    """All tensors after their round trip through a quantised checkpoint, float32 and detached.

    Args:
        weights: vendor-named tensors with stacked experts.
        shape: the model.
        stores: tensors that are stored otherwise than the vendor does, by name; see `save_checkpoint`.

    Raises:
        ConfigError: a tensor of the shape is missing, unexpected or has another shape.
    """
    specs = _check_weights(weights, shape)
    block = shape.weight_block or _DEFAULT_BLOCK
    return {
        name: fake_quantise_tensor(weights[name], _stored(name, spec, stores), block) for name, spec in specs.items()
    }


def _stored(name: str, spec: TensorSpec, stores: Mapping[str, Store] | None) -> TensorSpec:
    return TensorSpec(spec.shape, stores.get(name, spec.store)) if stores else spec


def _check_weights(weights: WeightMap, shape: ModelShape) -> dict[str, TensorSpec]:
    specs = weight_specs(shape)
    for name in weights:
        if name not in specs:
            raise ConfigError(f"tensor {name} is unexpected: config.json asks for no such tensor")
    for name, spec in specs.items():
        if name not in weights:
            raise ConfigError(f"tensor {name} {list(spec.shape)} is missing")
        if tuple(weights[name].shape) != spec.shape:
            raise ConfigError(f"tensor {name} must have shape {list(spec.shape)}, found {list(weights[name].shape)}")
    return specs


def save_checkpoint(
    directory: Path, config: Mapping[str, Any], weights: WeightMap, stores: Mapping[str, Store] | None = None
) -> None:
    """Write config.json and model.safetensors in the vendor's layout.

    Args:
        directory: made if missing; the two files are replaced.
        config: the vendor's configuration. With a `quantization_config` the quantised format is written, without one
            everything that is not kept in float32 is written as bfloat16.
        weights: vendor-named tensors with stacked experts, any float dtype or device. Borrowed.
        stores: tensors to store otherwise than the vendor does: "fp8" for one that is bf16 there, "bf16" for one that
            is fp32. The reader goes by the stored dtype.

    Raises:
        ConfigError: the configuration is unsupported or does not fit the tensors.
    """
    shape = shape_from_config(config)
    _check_weights(weights, shape)
    block = (shape.weight_block or _DEFAULT_BLOCK) if config.get("quantization_config") is not None else None
    tensors: dict[str, Tensor] = {}
    for name, spec in tensor_specs(shape).items():
        stacked = stacked_name(name)
        weight = weights[name] if stacked is None else weights[stacked[0]][stacked[1]]
        tensors.update(_store(name, weight.detach().cpu(), _stored(name, spec, stores), block))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def _store(name: str, weight: Tensor, spec: TensorSpec, block: tuple[int, int] | None) -> dict[str, Tensor]:
    """The file entries of one tensor."""
    if spec.store == "fp32":
        return {name: weight.float().contiguous()}
    if spec.store == "bf16" or block is None:
        return {name: weight.to(torch.bfloat16).contiguous()}
    if spec.store == "fp8":
        stored, scale = quantise_fp8(weight, block)
    elif spec.store == "rows":
        stored, scale = quantise_rows(weight)
    else:
        stored, scale = quantise_mxfp4(weight)
    return {name: stored.contiguous(), scale_name(name): scale.contiguous().view(torch.float8_e8m0fnu)}
