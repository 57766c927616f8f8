"""Dummy weights and records: random bytes of a model's real sizes, made on the device in a second.

A step over them must behave as one over a trained model does: activations keep their magnitude, nothing is NaN, rows
differ, choose different experts and select different entries. A step whose rows route alike touches fewer experts and
is falsely fast; who measures says how many experts were touched.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.model.checkpoint import GROUP, tensor_specs
from engine.model.records import Records
from engine.model.shapes import ModelShape
from engine.model.slot_form import SlotForm
from kernels.forms import Plane, SlotWeights, Weight

CLEAN = -0x0101010101010102
"""Clears the lowest bit of every byte: e4m3 codes 0x7F and 0xFF, which are NaN, become the largest numbers."""
E2M1_RMS = 2.93
"""Root of the mean square of a random E2M1 code."""
KEY_SCALE = 2.0**-7
ENTRY_BYTES = (119, 122)
"""From, up to: e8m0 bytes that bring random e4m3 codes to a root mean square of about 1."""


class DummySource:
    """A `WeightSource` of random numbers."""

    def __init__(
        self, shape: ModelShape, device: torch.device, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """`dtype`: of what a checkpoint stores in bf16. Matrices and experts are quantised as a vendor's are."""
        self.device = device
        self.expert_dtype = torch.uint8
        self._dtype = dtype
        self._specs = tensor_specs(shape)
        self._shape = shape
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)
        self._e4m3_rms = _e4m3_rms()

    def matrix(self, *names: str) -> Weight:
        specs = [self._specs[name] for name in names]
        rows, columns = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
        if any(spec.store != "fp8" for spec in specs):
            return Weight(self._normal(rows, columns).mul_(columns**-0.5).to(self._dtype))
        data = _random_words(torch.empty((rows, columns), dtype=torch.uint8, device=self.device), self._generator)
        block = self._shape.weight_block or (128, 128)
        byte = 127 + round(math.log2(columns**-0.5 / self._e4m3_rms))
        scale = self._bytes(-(-rows // block[0]), -(-columns // block[1]), low=byte - 1, high=byte + 1)
        return Weight(data.view(torch.float8_e4m3fn), scale, block)

    def vector(self, name: str) -> Tensor:
        sizes = self._specs[name].shape
        drawn = self._normal(*sizes)
        if name.endswith("norm.weight"):
            return drawn.mul_(0.1).add_(1)
        if name.endswith("_scale"):
            return drawn.mul_(0.1).add_(1)
        if name.endswith("_fn"):
            return drawn.mul_(sizes[-1] ** -0.5)
        if name.endswith("gate.bias"):
            return drawn.mul_(0.01)  # a trained one evens loads out; a random one must not skew them
        return drawn.mul_(0.3)

    def embedding(self, name: str) -> Tensor:
        return self._normal(*self._specs[name].shape).to(self._dtype)

    def ids(self, name: str) -> Tensor:
        rows, chosen = self._specs[name].shape
        drawn = torch.rand((rows, self._shape.num_experts), generator=self._generator, device=self.device)
        return drawn.topk(chosen, -1).indices.int()

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        rows, columns = self._specs[name].shape
        data = _random_words(torch.empty((rows, columns), dtype=torch.uint8, device=self.device), self._generator)
        byte = 127 + round(math.log2(1 / self._e4m3_rms))
        scale = self._bytes(rows, -(-columns // GROUP), low=byte - 1, high=byte + 1)
        # Where a real one would be.
        placed = data.cpu().pin_memory() if self.device.type == "cuda" else data
        return placed.view(torch.float8_e4m3fn), scale

    def slots(self, owned: Sequence[tuple[int, int]]) -> SlotWeights:
        form = SlotForm(self._shape.hidden, self._shape.expert_width, torch.uint8)
        slots = form.allocate(len(owned), self.device)
        for slot, (layer, expert) in enumerate(owned):
            self.put_expert(f"layers.{layer}.ffn.experts", expert, slots, slot)
        return slots

    def put_expert(self, stack: str, expert: int, slots: SlotWeights, slot: int) -> None:
        """Writes an expert's weights into a slot: a `PutExpert`. They are the same on any rank, in any slot."""
        assert slots.up_scale is not None and slots.down_scale is not None
        number = zlib.crc32(f"{self._seed} {stack} {expert}".encode())
        generator = torch.Generator(self.device).manual_seed(number)
        for data, scale in ((slots.up[slot], slots.up_scale[slot]), (slots.down[slot], slots.down_scale[slot])):
            data.view(-1).view(torch.int64).random_(-(2**63), None, generator=generator)
            # Bytes b - 1 to b + 1 have the same mean square as 0.6 above b.
            byte = 127 + round(math.log2((2 * data.shape[1]) ** -0.5 / E2M1_RMS) - 0.6)
            scale.random_(byte - 1, byte + 2, generator=generator)

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator, device=self.device)

    def _bytes(self, *sizes: int, low: int, high: int) -> Tensor:
        room = torch.empty(sizes, dtype=torch.uint8, device=self.device)
        return room.random_(low, high + 1, generator=self._generator)


def fill_arena(records: Records, arena: Tensor, *, seed: int = 0) -> None:
    """Random valid records everywhere: as if every page and slab held a long text."""
    generator = torch.Generator(arena.device).manual_seed(seed)
    if records.format == "fp8":
        _random_words(arena, generator)
        for plane, blocks in _planes(records):
            if plane.rope == 0:
                _view(arena, plane.scale, plane, blocks, torch.float32, plane.scale_bytes, 1).fill_(KEY_SCALE)
                continue
            still = plane.width - plane.rope
            turned = _view(arena, plane.data + still, plane, blocks, torch.bfloat16, plane.data_bytes, plane.rope)
            turned.normal_(generator=generator)
            scales = _view(arena, plane.scale, plane, blocks, torch.uint8, plane.scale_bytes, plane.scale_bytes)
            scales.random_(*ENTRY_BYTES, generator=generator)
    else:
        arena.view(torch.bfloat16 if records.format == "bf16" else torch.float32).normal_(generator=generator)
    for layer in records.layers:
        for ring in (layer.entry_ring, layer.key_ring):
            if ring is not None:
                rows = arena.view(torch.float32).as_strided(
                    (records.num_slabs, ring.rows * ring.width), (ring.stride // 4, 1), ring.data // 4
                )
                rows.normal_(generator=generator)


    if records.ids is not None:
        ids = arena.view(torch.int32).as_strided(
            (records.num_slabs, records.ids.rows), (records.ids.stride // 4, 1), records.ids.data // 4
        )
        # Every vocabulary has these.
        ids.random_(0, 256, generator=generator)


def _planes(records: Records) -> Iterator[tuple[Plane, int]]:
    """Every plane, with the number of its blocks; entries that layers share once."""
    for plane in records.stages:
        yield plane, records.num_slabs
    for layer in records.layers:
        yield layer.window, records.num_slabs
    shared = {part for layer in records.layers for part in (layer.entries, layer.keys) if part is not None}
    for plane in sorted(shared, key=lambda part: part.data):
        yield plane, records.num_pages


def _view(
    arena: Tensor, start: int, plane: Plane, blocks: int, dtype: torch.dtype, row_bytes: int, count: int
) -> Tensor:
    """dtype[blocks, plane.rows, count]: so many numbers from `start` on in every record."""
    item = dtype.itemsize
    strides = (plane.stride // item, row_bytes // item, 1)
    return arena.view(dtype).as_strided((blocks, plane.rows, count), strides, start // item)


def _random_words(room: Tensor, generator: torch.Generator) -> Tensor:
    """Fills uint8 of a multiple of 8 bytes with e4m3 codes that are numbers."""
    words = room.view(-1).view(torch.int64)
    words.random_(-(2**63), None, generator=generator).bitwise_and_(CLEAN)
    return room


def _e4m3_rms() -> float:
    codes = torch.arange(0, 256, 2, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    return float(codes.square().mean().sqrt())
