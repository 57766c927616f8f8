"""Checkpoints: from a vendor's folder of safetensors files to dequantised tensors under the vendor's names.

Owns the list of tensors that a shape asks for, and the reading of fp8 blocks, MXFP4 experts and fp8 n-gram rows. Does
not own writing them (quantise.py). Routed experts are stacked on the way in: `layers.3.ffn.experts.w1` is
[experts, width, hidden] and replaces the vendor's one tensor per expert.

Invariants: every tensor of the text model and drafter is present once, with the shape that config.json implies, and
none is left over; `.scale` entries are consumed; scales are read as exponent *bytes*, never converted as numbers.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.model.layers import Weights
from engine.model.shapes import LayerRole, ModelShape, load_shape

Store = Literal["bf16", "fp32", "fp8", "fp4", "rows", "ids"]

# Columns that share one scale, in experts and n-gram rows.
GROUP = 32
# Block edges in use: 32 for V4.1, 128 for V4.
BLOCK_EDGES = (32, 128)
# Parts of a multimodal checkpoint that the text model does not read.
_IGNORED = re.compile(r"(vision|aligner)\.|image_(start|end|newline)$")
_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight$")
# E2M1 magnitudes by code; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the vendor's file: its logical shape and how a quantised checkpoint stores it."""

    shape: tuple[int, ...]
    store: Store


def tensor_specs(shape: ModelShape) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this shape must hold, by vendor name, without `.scale` entries."""
    specs = {
        "embed.weight": TensorSpec((shape.vocab_size, shape.hidden), "bf16"),
        "head.weight": TensorSpec((shape.vocab_size, shape.hidden), "bf16"),
        "norm.weight": TensorSpec((shape.hidden,), "bf16"),
    }
    if not shape.shifts_pre:
        specs.update(_collapse_specs(shape, ""))
    for role in shape.layer_roles:
        prefix = f"layers.{role.index}"
        specs.update(_block_specs(shape, prefix, shape.num_experts))
        if role.is_hashed:
            del specs[f"{prefix}.ffn.gate.bias"]
            specs[f"{prefix}.ffn.gate.tid2eid"] = TensorSpec((shape.vocab_size, shape.top_k), "ids")
        if role.is_kv_source:
            specs.update(_compressor_specs(shape, f"{prefix}.attn.compressor", role, shape.head_dim))
            if role.attends_to_all:
                pass
            elif shape.pools_keys:
                specs.update(_compressor_specs(shape, f"{prefix}.attn.indexer.compressor", role, shape.index_dim))
            else:
                specs[f"{prefix}.attn.indexer.wk.weight"] = TensorSpec((shape.index_dim, shape.head_dim), "bf16")
                specs[f"{prefix}.attn.indexer.k_norm.weight"] = TensorSpec((shape.index_dim,), "bf16")
        if role.is_index_source:
            width = shape.index_heads * shape.index_dim
            specs[f"{prefix}.attn.indexer.wq_b.weight"] = TensorSpec((width, shape.q_rank), "fp8")
            specs[f"{prefix}.attn.indexer.weights_proj.weight"] = TensorSpec((shape.index_heads, shape.hidden), "bf16")
    if shape.engram is not None:
        engram = shape.engram
        for layer, num_rows in zip(engram.layers, engram.num_rows, strict=True):
            prefix = f"layers.{layer}.engram"
            width = engram.rows_per_token * engram.head_dim
            specs[f"{prefix}.embed.weight"] = TensorSpec((num_rows, engram.head_dim), "rows")
            specs[f"{prefix}.wkv.weight"] = TensorSpec(((shape.num_streams + 1) * shape.hidden, width), "fp8")
            specs[f"{prefix}.q_weight"] = TensorSpec((shape.num_streams, shape.hidden), "bf16")
            specs[f"{prefix}.k_weight"] = TensorSpec((shape.num_streams, shape.hidden), "bf16")
    specs.update(_drafter_specs(shape))
    specs.update(_predict_specs(shape))
    return specs


def _collapse_specs(shape: ModelShape, prefix: str) -> dict[str, TensorSpec]:
    """Coefficients that collapse the streams for a head."""
    return {
        f"{prefix}hc_head_fn": TensorSpec((shape.num_streams, shape.stream_width), "fp32"),
        f"{prefix}hc_head_base": TensorSpec((shape.num_streams,), "fp32"),
        f"{prefix}hc_head_scale": TensorSpec((1,), "fp32"),
    }


def _compressor_specs(shape: ModelShape, prefix: str, role: LayerRole, width: int) -> dict[str, TensorSpec]:
    """What pools `width` channels."""
    rows = width * (2 if role.overlaps else 1)
    specs = {
        f"{prefix}.wkv.weight": TensorSpec((rows, shape.hidden), "bf16"),
        f"{prefix}.norm.weight": TensorSpec((width,), "bf16"),
    }
    if role.ratio > 1:
        specs[f"{prefix}.wgate.weight"] = TensorSpec((rows, shape.hidden), "bf16")
    if shape.biases_gates:
        specs[f"{prefix}.ape"] = TensorSpec((role.ratio, rows), "fp32")
    return specs


def _block_specs(shape: ModelShape, prefix: str, num_experts: int) -> dict[str, TensorSpec]:
    """Attention, experts, norms and hyper-connections: what a target layer and a drafter stage have in common."""
    d, width, shared = shape.hidden, shape.expert_width, shape.shared_width
    heads = shape.num_heads * shape.head_dim
    specs = {
        f"{prefix}.attn_norm.weight": TensorSpec((d,), "bf16"),
        f"{prefix}.ffn_norm.weight": TensorSpec((d,), "bf16"),
        f"{prefix}.attn.wq_a.weight": TensorSpec((shape.q_rank, d), "fp8"),
        f"{prefix}.attn.q_norm.weight": TensorSpec((shape.q_rank,), "bf16"),
        f"{prefix}.attn.wq_b.weight": TensorSpec((heads, shape.q_rank), "fp8"),
        f"{prefix}.attn.wkv.weight": TensorSpec((shape.head_dim, d), "fp8"),
        f"{prefix}.attn.kv_norm.weight": TensorSpec((shape.head_dim,), "bf16"),
        f"{prefix}.attn.wo_a.weight": TensorSpec((shape.o_groups * shape.o_rank, heads // shape.o_groups), "fp8"),
        f"{prefix}.attn.wo_b.weight": TensorSpec((d, shape.o_groups * shape.o_rank), "fp8"),
        f"{prefix}.attn.attn_sink": TensorSpec((shape.num_heads,), "fp32"),
        f"{prefix}.ffn.gate.weight": TensorSpec((num_experts, d), "bf16"),
        f"{prefix}.ffn.gate.bias": TensorSpec((num_experts,), "fp32"),
        f"{prefix}.ffn.gate.bias_vl": TensorSpec((num_experts,), "fp32"),
        f"{prefix}.ffn.shared_experts.w1.weight": TensorSpec((shared, d), "fp8"),
        f"{prefix}.ffn.shared_experts.w3.weight": TensorSpec((shared, d), "fp8"),
        f"{prefix}.ffn.shared_experts.w2.weight": TensorSpec((d, shared), "fp8"),
    }
    if not shape.has_image_bias:
        del specs[f"{prefix}.ffn.gate.bias_vl"]
    for sublayer in ("attn", "ffn"):
        specs[f"{prefix}.hc_{sublayer}_fn"] = TensorSpec((shape.hyper_width, shape.stream_width), "fp32")
        specs[f"{prefix}.hc_{sublayer}_base"] = TensorSpec((shape.hyper_width,), "fp32")
        specs[f"{prefix}.hc_{sublayer}_scale"] = TensorSpec((3,), "fp32")
    for expert in range(num_experts):
        specs[f"{prefix}.ffn.experts.{expert}.w1.weight"] = TensorSpec((width, d), "fp4")
        specs[f"{prefix}.ffn.experts.{expert}.w3.weight"] = TensorSpec((width, d), "fp4")
        specs[f"{prefix}.ffn.experts.{expert}.w2.weight"] = TensorSpec((d, width), "fp4")
    return specs


def _drafter_specs(shape: ModelShape) -> dict[str, TensorSpec]:
    drafter = shape.drafter
    if drafter is None:
        return {}
    d, rank = shape.hidden, drafter.markov_rank
    specs: dict[str, TensorSpec] = {}
    for stage in range(drafter.num_stages):
        specs.update(_block_specs(shape, f"mtp.{stage}", drafter.num_experts))
    last = f"mtp.{drafter.num_stages - 1}"
    specs["mtp.0.main_proj.weight"] = TensorSpec((d, len(drafter.target_layers) * d), "bf16")
    specs["mtp.0.main_norm.weight"] = TensorSpec((d,), "bf16")
    specs[f"{last}.norm.weight"] = TensorSpec((d,), "bf16")
    for name in markov_names(shape):
        specs[name] = TensorSpec((shape.vocab_size, rank), "bf16")
    if not shape.shifts_pre:
        specs.update(_collapse_specs(shape, f"{last}."))
    specs[f"{last}.confidence_head.proj.weight"] = TensorSpec((1, d + rank), "fp32")
    return specs


def markov_names(shape: ModelShape) -> tuple[str, str]:
    """Of the drafter's Markov factors: from the previous token, and to the logits. V4 numbers them."""
    assert shape.drafter is not None
    stem = f"mtp.{shape.drafter.num_stages - 1}.markov_head"
    first, second = ("embed", "head") if shape.shifts_pre else ("markov_w1", "markov_w2")
    return f"{stem}.{first}.weight", f"{stem}.{second}.weight"


def _predict_specs(shape: ModelShape) -> dict[str, TensorSpec]:
    """Layers that predict ahead (MTP): a window-only block behind two projections, with a head norm of its own."""
    specs: dict[str, TensorSpec] = {}
    d = shape.hidden
    for layer in range(shape.num_predict_layers):
        prefix = f"mtp.{layer}"
        specs.update(_block_specs(shape, prefix, shape.num_experts))
        for name in ("e_proj", "h_proj"):
            specs[f"{prefix}.{name}.weight"] = TensorSpec((d, d), "fp8")
        for name in ("enorm", "hnorm", "norm"):
            specs[f"{prefix}.{name}.weight"] = TensorSpec((d,), "bf16")
        specs.update(_collapse_specs(shape, f"{prefix}."))
    return specs


def stacked_name(name: str) -> tuple[str, int] | None:
    """(`layers.3.ffn.experts.w1`, 7) for the vendor's name of expert 7's matrix; None for any other tensor."""
    match = _EXPERT.match(name)
    return (f"{match['stack']}.{match['matrix']}", int(match["expert"])) if match else None


def load_checkpoint(
    directory: Path, *, dtype: torch.dtype = torch.float32, experts: bool = True
) -> tuple[ModelShape, Weights]:
    """Read a checkpoint folder (config.json, and model.safetensors whole or sharded) onto the CPU.

    Args:
        directory: the folder.
        dtype: of the returned tensors; those that the format keeps in float32 (sinks, hyper-connections, router
            biases, confidence) stay float32. Dequantised values are exact in bfloat16.
        experts: False leaves the routed experts out; `ExpertReader` reads them one by one.

    Returns:
        (shape, weights by vendor name with stacked experts). The caller owns both.

    Raises:
        ConfigError: the configuration is unsupported, or a tensor is missing, unexpected or malformed; it is named.
    """
    directory = Path(directory)
    shape = load_shape(directory)
    specs = tensor_specs(shape)
    weights: Weights = {}
    with ExitStack() as stack:
        get, names = _open_files(directory, stack)
        _check_names(directory, specs, names)
        for name, spec in specs.items():
            stacked = stacked_name(name)
            if stacked is not None and not experts:
                continue
            tensor = _read(name, spec, shape, get, names)
            if spec.store != "ids":
                tensor = tensor.to(torch.float32 if spec.store == "fp32" else dtype)
            if stacked is None:
                weights[name] = tensor
                continue
            # Filled in place: a real layer's experts are gigabytes, two copies of them would not fit.
            target, expert = stacked
            if target not in weights:
                num_experts = _num_experts(shape, name)
                weights[target] = torch.empty((num_experts, *spec.shape), dtype=dtype)
            weights[target][expert] = tensor
    return shape, weights


class ExpertReader:
    """Reads single routed experts of a checkpoint, whose files stay open, and mapped, until `close`."""

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        """Raises ConfigError where `load_checkpoint` of this folder would, but for the tensors' contents."""
        self._shape = shape
        self._stack = ExitStack()
        self._specs = tensor_specs(shape)
        try:
            self._get, self._names = _open_files(directory, self._stack)
            _check_names(directory, self._specs, self._names)
        except BaseException:
            self._stack.close()
            raise

    def read(self, stack: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate [width, hidden], up [width, hidden] and down projection [hidden, width], float32.

        Args:
            stack: prefix of the experts' names: `layers.3.ffn.experts`.
            expert: number in the stack.

        Raises:
            ConfigError: a tensor is malformed, or can not be read; it is named.
        """
        names = [f"{stack}.{expert}.{matrix}.weight" for matrix in ("w1", "w3", "w2")]
        try:
            w1, w3, w2 = (_read(name, self._specs[name], self._shape, self._get, self._names).float() for name in names)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{names[0]} and its like can not be read: {error}") from error
        return w1, w3, w2

    def close(self) -> None:
        """Ends the mapping. A second time does nothing."""
        self._stack.close()


def _num_experts(shape: ModelShape, name: str) -> int:
    if name.startswith("mtp.") and shape.drafter is not None:
        return shape.drafter.num_experts
    return shape.num_experts


def _open_files(directory: Path, stack: ExitStack) -> tuple[Callable[[str], Tensor], frozenset[str]]:
    """Open every shard; returns a reader by tensor name, and all names."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        try:
            name_to_file = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index_path} must hold a weight_map from tensor to file: {error!r}") from error
        file_names = sorted(set(name_to_file.values()))
    else:
        name_to_file = {}
        file_names = ["model.safetensors"]
    handles: dict[str, Any] = {}
    for file_name in file_names:
        path = directory / file_name
        if path.parent != directory or not path.is_file():
            raise ConfigError(f"{path} does not exist; the checkpoint is incomplete")
        try:
            handles[file_name] = stack.enter_context(safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
    found = {name: file_name for file_name, handle in handles.items() for name in _keys(handle)}
    for name, file_name in name_to_file.items():
        if found.get(name) != file_name:
            raise ConfigError(
                f"tensor {name} must be in {file_name} by the index, found in {found.get(name, 'no file')}"
            )

    def get(name: str) -> Tensor:
        tensor: Tensor = handles[found[name]].get_tensor(name)
        return tensor

    return get, frozenset(found)


def _keys(handle: Any) -> Iterator[str]:
    yield from handle.keys()


def _check_names(directory: Path, specs: dict[str, TensorSpec], names: frozenset[str]) -> None:
    for name in specs:
        if name not in names:
            raise ConfigError(f"tensor {name} {list(specs[name].shape)} is missing from {directory}")
    for name in sorted(names):
        owner = f"{name.removesuffix('.scale')}.weight" if name.endswith(".scale") else name
        if owner not in specs and not _IGNORED.match(name):
            raise ConfigError(f"tensor {name} is unexpected: config.json asks for no such tensor")


def scale_name(name: str) -> str:
    """The vendor's name of a quantised tensor's scales."""
    return f"{name.removesuffix('.weight')}.scale"


def _read(
    name: str, spec: TensorSpec, shape: ModelShape, get: Callable[[str], Tensor], names: frozenset[str]
) -> Tensor:
    """One tensor, dequantised to float32 where it is quantised."""
    stored = get(name)
    packed = stored.dtype in (torch.int8, torch.uint8) and spec.store == "fp4"
    wanted = (*spec.shape[:-1], spec.shape[-1] // 2) if packed else spec.shape
    if tuple(stored.shape) != wanted:
        raise ConfigError(f"tensor {name} must have shape {list(wanted)}, found {list(stored.shape)}")
    if spec.store == "ids":
        if stored.dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"tensor {name} must be stored as int32 or int64, found {stored.dtype}")
        if len(stored) and not 0 <= int(stored.min()) <= int(stored.max()) < shape.num_experts:
            raise ConfigError(
                f"tensor {name} must name experts 0 to {shape.num_experts - 1}, found {int(stored.min())} to "
                f"{int(stored.max())}"
            )
        return stored.to(torch.int64)
    has_scale = name.endswith(".weight") and scale_name(name) in names
    if stored.dtype in _FLOATS:
        if has_scale:
            raise ConfigError(f"tensor {scale_name(name)} is unexpected: {name} is stored as {stored.dtype}")
        return stored
    # A small bundled model stores tables as fp8 that the vendor keeps in bf16: the stored dtype says so.
    may_be_fp8 = stored.dtype == torch.float8_e4m3fn and len(spec.shape) == 2 and spec.store != "fp32"
    if not packed and not may_be_fp8:
        raise ConfigError(f"tensor {name} must be stored as {spec.store}, found {stored.dtype}")
    if not has_scale:
        raise ConfigError(f"tensor {scale_name(name)} is missing: {name} is stored as {stored.dtype}")
    scale = get(scale_name(name))
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise ConfigError(f"tensor {scale_name(name)} must be e8m0 bytes, found {scale.dtype}")
    scale = scale.view(torch.uint8)
    if spec.store in ("fp8", "bf16") or (spec.store == "fp4" and not packed):
        block = _find_block(name, spec, shape, tuple(scale.shape))
        return dequantise_fp8(stored, scale, block)
    wanted = (spec.shape[0], -(-spec.shape[1] // GROUP))
    if tuple(scale.shape) != wanted:
        raise ConfigError(f"tensor {scale_name(name)} must have shape {list(wanted)}, found {list(scale.shape)}")
    return dequantise_mxfp4(stored, scale) if packed else dequantise_fp8(stored, scale, (1, GROUP))


def _find_block(name: str, spec: TensorSpec, shape: ModelShape, scales: tuple[int, ...]) -> tuple[int, int]:
    """The block whose grid has the scales' shape. Two edges that fit the same grid describe the same blocks."""
    blocks = [shape.weight_block] if shape.weight_block else [(edge, edge) for edge in BLOCK_EDGES]
    grids = [(-(-spec.shape[0] // rows), -(-spec.shape[1] // columns)) for rows, columns in blocks]
    for block, grid in zip(blocks, grids, strict=True):
        if grid == scales:
            return block
    wanted = " or ".join(str(list(grid)) for grid in grids)
    raise ConfigError(f"tensor {scale_name(name)} must have shape {wanted}, found {list(scales)}")


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^(byte - 127) of e8m0 bytes uint8[...], built from bits: a library's pow may be an ulp off."""
    wide = exponent.to(torch.int32)
    return torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)


def dequantise_fp8(stored: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32[rows, columns] of e4m3 values and one e8m0 byte per block.

    Args:
        stored: float8_e4m3fn[rows, columns].
        scale: uint8[ceil(rows / block 0), ceil(columns / block 1)].
        block: edge lengths.
    """
    rows, columns = stored.shape
    factor = power_of_two(scale).repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return stored.float() * factor


def dequantise_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """float32[..., columns] of packed E2M1 codes and one e8m0 byte per 32 columns.

    Args:
        packed: int8[..., columns / 2]; the low nibble is the even column.
        scale: uint8[..., columns / 32].
    """
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=packed.device)
    codes = packed.view(torch.uint8).to(torch.int64)
    unpacked = torch.stack((values[codes & 15], values[codes >> 4]), -1).flatten(-2)
    return unpacked * power_of_two(scale).repeat_interleave(GROUP, -1)[..., : unpacked.shape[-1]]
