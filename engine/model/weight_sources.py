"""Weight sources over a checkpoint: dequantised tensors in one type, or the bytes of the vendor's files as they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.model.checkpoint import GROUP, ExpertReader, dequantise_fp8, scale_name, tensor_specs
from engine.model.layers import WeightMap
from engine.model.shapes import ModelShape
from engine.model.slot_form import SlotForm
from kernels.forms import LARGEST_SLOT_SCALE, SlotWeights, Weight

HOST_TABLE_BYTES = 4 << 30
"""Larger tables of an n-gram memory stay on the host, pinned: a step reads some kilobytes of them for a token."""


class PlainSource:
    """Matrices in float32 or bf16, from what `load_checkpoint` gives."""

    def __init__(self, weights: WeightMap, device: torch.device, dtype: torch.dtype) -> None:
        """`weights`: vendor-named tensors, experts stacked; `dtype`: of matrices."""
        self.device = device
        self.expert_dtype = dtype
        self._weights = weights
        self._dtype = dtype

    def matrix(self, *names: str) -> Weight:
        parts = [self._weights[name].to(self.device, self._dtype) for name in names]
        return Weight(torch.cat(parts).contiguous())

    def vector(self, name: str) -> Tensor:
        return self._weights[name].to(self.device, torch.float32).contiguous()

    def embedding(self, name: str) -> Tensor:
        return self._weights[name].to(self.device, self._dtype).contiguous()

    def ids(self, name: str) -> Tensor:
        return self._weights[name].to(self.device, torch.int32).contiguous()

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        return _place_table(self._weights[name].to(self._dtype), self.device), None

    def slots(self, owned: Sequence[tuple[int, int]]) -> SlotWeights:
        up, down = [], []
        for layer, expert in owned:
            w1, w3, w2 = (self._weights[f"layers.{layer}.ffn.experts.{name}"][expert] for name in ("w1", "w3", "w2"))
            up.append(torch.cat((w1, w3)).to(self.device, self._dtype))
            down.append(w2.to(self.device, self._dtype))
        return SlotWeights(torch.stack(up), None, torch.stack(down), None)

    def put_expert(self, stack: str, expert: int, slots: SlotWeights, slot: int) -> None:
        """Writes an expert's weights into a slot: a `PutExpert`."""
        w1, w3, w2 = (self._weights[f"{stack}.{name}"][expert] for name in ("w1", "w3", "w2"))
        slots.up[slot].copy_(torch.cat((w1, w3)))
        slots.down[slot].copy_(w2)


class PlainExperts:
    """Experts of a checkpoint one by one, dequantised: for slots in float32 or bf16."""

    def __init__(self, reader: ExpertReader) -> None:
        """Borrows the reader."""
        self._reader = reader

    def put_expert(self, stack: str, expert: int, slots: SlotWeights, slot: int) -> None:
        """Writes an expert's weights into a slot: a `PutExpert`.

        Raises:
            ConfigError: a tensor is malformed, or can not be read.
        """
        w1, w3, w2 = self._reader.read(stack, expert)
        slots.up[slot].copy_(torch.cat((w1, w3)))
        slots.down[slot].copy_(w2)


class StoredSource:
    """The stored bytes: fp8 and MXFP4 where a file has them. What is stored unquantised comes in bf16."""

    def __init__(self, directory: Path, shape: ModelShape, device: torch.device) -> None:
        """Opens the folder's files, until `close`.

        Raises:
            ConfigError: one is missing or no safetensors file.
        """
        self.device = device
        self.expert_dtype = torch.uint8
        self._shape = shape
        self._specs = tensor_specs(shape)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        paths = sorted(Path(directory).glob("*.safetensors"))
        try:
            for path in paths:
                file = self._stack.enter_context(safe_open(str(path), framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
        if not self._files:
            raise ConfigError(f"{directory} has no safetensors files")

    def close(self) -> None:
        """Ends the mapping. A second time does nothing."""
        self._stack.close()

    def matrix(self, *names: str) -> Weight:
        parts = [self._read(name) for name in names]
        block = self._shape.weight_block or (128, 128)
        quantised = all(part.dtype == torch.float8_e4m3fn for part in parts)
        # Scales stack only where no block would cross from one matrix to the next.
        if quantised and all(len(part) % block[0] == 0 for part in parts[:-1]):
            scales = [self._scale(name, part, block) for name, part in zip(names, parts, strict=True)]
            return Weight(_stack_bytes(parts).to(self.device), torch.cat(scales).to(self.device), block)
        plain = [self._plain(name, part, block) for name, part in zip(names, parts, strict=True)]
        return Weight(torch.cat(plain).to(self.device))

    def vector(self, name: str) -> Tensor:
        return self._read(name).to(self.device, torch.float32).contiguous()

    def embedding(self, name: str) -> Tensor:
        block = self._shape.weight_block or (128, 128)
        return self._plain(name, self._read(name), block).to(self.device)

    def ids(self, name: str) -> Tensor:
        return self._read(name).to(self.device, torch.int32).contiguous()

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        data = self._read(name)
        if data.dtype != torch.float8_e4m3fn:
            return _place_table(data, self.device), None
        return _place_table(data, self.device), self._scale(name, data, (1, GROUP)).to(self.device)

    def slots(self, owned: Sequence[tuple[int, int]]) -> SlotWeights:
        form = SlotForm(self._shape.hidden, self._shape.expert_width, torch.uint8)
        slots = form.allocate(len(owned), self.device)
        for slot, (layer, expert) in enumerate(owned):
            self.put_expert(f"layers.{layer}.ffn.experts", expert, slots, slot)
        return slots

    def put_expert(self, stack: str, expert: int, slots: SlotWeights, slot: int) -> None:
        """Writes an expert's bytes into a slot: a `PutExpert`.

        Raises:
            ConfigError: a tensor is missing, is not MXFP4, or has a scale that the products do not take.
        """
        assert slots.up_scale is not None and slots.down_scale is not None
        width = self._shape.expert_width
        for name, data, scale in (
            ("w1", slots.up[slot, :width], slots.up_scale[slot, :width]),
            ("w3", slots.up[slot, width:], slots.up_scale[slot, width:]),
            ("w2", slots.down[slot], slots.down_scale[slot]),
        ):
            name = f"{stack}.{expert}.{name}.weight"
            stored = self._stored(name)
            if stored.dtype not in (torch.int8, torch.uint8):
                raise ConfigError(f"tensor {name} must be stored as fp4, found {stored.dtype}")
            stored_scale = self._stored(scale_name(name)).view(torch.uint8)
            for tensor, found, room in ((name, stored, data), (scale_name(name), stored_scale, scale)):
                if found.shape != room.shape:
                    raise ConfigError(f"tensor {tensor} must have shape {[*room.shape]}, found {[*found.shape]}")
            if (largest := int(stored_scale.max())) > LARGEST_SLOT_SCALE:
                raise ConfigError(f"scales of {name} may be at most byte {LARGEST_SLOT_SCALE}, found {largest}")
            data.copy_(stored.view(torch.uint8))
            scale.copy_(stored_scale)

    def _stored(self, name: str) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"tensor {name} is missing from the checkpoint")
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"tensor {name} can not be read: {error}") from error
        return tensor

    def _read(self, name: str) -> Tensor:
        tensor, spec = self._stored(name), self._specs[name]
        if tuple(tensor.shape) != spec.shape:
            raise ConfigError(f"tensor {name} must have shape {list(spec.shape)}, found {list(tensor.shape)}")
        return tensor

    def _scale(self, name: str, part: Tensor, block: tuple[int, int]) -> Tensor:
        """uint8, by block of a stored matrix."""
        scale = self._stored(scale_name(name)).view(torch.uint8)
        wanted = (-(-part.shape[0] // block[0]), -(-part.shape[1] // block[1]))
        if tuple(scale.shape) != wanted:
            raise ConfigError(f"tensor {scale_name(name)} must have shape {list(wanted)}, found {list(scale.shape)}")
        return scale

    def _plain(self, name: str, part: Tensor, block: tuple[int, int]) -> Tensor:
        """bf16; exact, as products of e4m3 and a power of two are."""
        if part.dtype == torch.float8_e4m3fn:
            part = dequantise_fp8(part, self._scale(name, part, block), block)
        return part.to(torch.bfloat16)


def _place_table(data: Tensor, device: torch.device) -> Tensor:
    """Where kernels on the device can read it."""
    if device.type == "cuda" and data.nbytes > HOST_TABLE_BYTES:
        return data.contiguous().pin_memory()
    return data.to(device).contiguous()


def _stack_bytes(parts: Sequence[Tensor]) -> Tensor:
    # torch.cat does not know fp8 on every device.
    return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
