"""Loads a model whose passes are the device's step (`step_model.py`), with its arena, on a CUDA device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.config import RankConfig, model_directory
from engine.errors import ConfigError
from engine.model.ahead_weights import AheadWeights, ExpertSource, make_ahead_weights
from engine.model.checkpoint import load_checkpoint
from engine.model.device_slots import DevicePart
from engine.model.dummy import DummySource
from engine.model.engram import load_tables
from engine.model.kv import SPARE_ROWS
from engine.model.ops import Ops, ops_for
from engine.model.records import Records, plan_records
from engine.model.shapes import ModelShape, load_shape
from engine.model.step_arena import StepArena
from engine.model.step_drafter import StepDrafter
from engine.model.step_forward import Peers
from engine.model.step_model import StepModel
from engine.model.step_weights import PlacedExperts, StepWeights, make_step_weights
from engine.model.weight_sources import PlainSource, StoredSource
from engine.ports import DeviceInfo
from kernels.forms import RecordFormat

Report = Callable[[str, int, int, str], None]

PROMPT_ROWS = (32, 256)
"""Rows of a prompt that steps have: products are bound by the bytes of weights below some 200 rows."""
MOST_PROMPT_ROWS = 2048
"""Rows of prompts on all ranks of a group that go through the experts together where prompts are all there is: experts
are read once for all of them, and have no more rows than fill a tile of their products."""
FORMATS: dict[str, RecordFormat] = {"float32": "fp32", "bfloat16": "bf16", "fp8": "fp8"}
"""Record formats by `kv_dtype`."""
FORMAT_VERSION = 2
"""Raised when the meaning of bytes in a page or slab changes."""


def choose_prompt_rows(config: RankConfig) -> tuple[int, ...]:
    """Numbers of rows of a prompt that steps of a rank have, ascending: longer ones where it has nothing but prompts,
    as far as its chunks are so long."""
    rows = [*PROMPT_ROWS]
    if config.role == "prefill":
        while rows[-1] < config.limits.prefill_chunk_tokens and 2 * rows[-1] * config.group <= MOST_PROMPT_ROWS:
            rows.append(2 * rows[-1])
    return tuple(rows)


def load_step_model(
    config: RankConfig,
    report: Report,
    device: torch.device,
    *,
    poison: bool = False,
    ops: Ops | None = None,
    prompt_rows: tuple[int, ...] = (),
    parts: Sequence[DevicePart] = (),
    peers: Callable[[int], Peers] | None = None,
    mesh_address: str = "",
) -> tuple[StepModel, DeviceInfo]:
    """Weights, arena, and steps of all sizes. Blocks for as long as it takes.

    Args:
        config: the rank's configuration, with `num_pages` and `num_slabs`.
        report: called with (phase, done, total, unit).
        device: where to.
        poison: fill the arena with NaN, so that a test sees a read of something never written.
        ops: implementation of the operations; None for the device's.
        prompt_rows: see `StepModel`; none for those of `choose_prompt_rows`.
        parts: of a rank of a group, its experts' slots and tables, borrowed; nothing need be in them yet.
        peers, mesh_address: of a rank of a group, see `StepModel` and `DeviceInfo`.

    Raises:
        ConfigError: the model is none that a step can run, a page of it can not be laid out, it does not fit the
            device's memory, or that can not be registered.
    """
    if (config.group > 1) != bool(parts):
        raise ValueError(f"a rank of a group of {config.group} has {len(parts)} parts of experts in slots")
    prompt_rows = prompt_rows or choose_prompt_rows(config)
    directory = model_directory(config.model)
    shape = load_shape(directory)
    max_tokens = min(config.max_model_tokens or shape.max_length, shape.max_length)
    try:
        records = plan_records(
            shape,
            page_tokens=config.page_tokens,
            num_pages=config.num_pages,
            num_slabs=config.num_slabs,
            format=FORMATS[config.kv_dtype],
            staging_rows=max(prompt_rows),
        )
    except ConfigError as error:
        raise ConfigError(f"kv_dtype {config.kv_dtype}, page_tokens {config.page_tokens}: {error}") from error
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    report("weights", 0, total, "bytes")
    try:
        weights, ahead = _load_weights(config, directory, shape, device, max_tokens, parts)
        report("weights", total, total, "bytes")
        report("arena", 0, records.num_bytes, "bytes")
        arena = StepArena(records, device, shape.vocab_size, poison=poison)
        _check_segments(device)
        report("arena", records.num_bytes, records.num_bytes, "bytes")
        report("warmup", 0, 1, "steps")
        ops = ops or ops_for(device)
        drafter = None
        if ahead is not None:
            drafts = config.draft.tokens if config.role == "decode" else 0
            drafter = StepDrafter(
                shape,
                weights,
                ahead,
                arena,
                ops,
                max_tokens=max_tokens,
                drafts=drafts,
                draft_rows=config.draft.max_rows,
                peers=peers,
            )
        model = StepModel(
            shape,
            weights,
            arena,
            ops,
            max_tokens=max_tokens,
            decode_rows=config.limits.decode_rows,
            prompt_rows=prompt_rows,
            peers=peers,
            drafter=drafter,
        )
        if drafter is not None and drafter.drafts:
            drafter.open_steps(decode_rows=config.limits.decode_rows)
        # The logits that a pass copies out of its graphs. The allocator keeps what it had: no request finds it short.
        most = config.limits.prefill_chunk_tokens if config.role == "prefill" else config.limits.decode_rows
        torch.empty((most + max(prompt_rows), shape.vocab_size), device=device)
        report("warmup", 1, 1, "steps")
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        raise ConfigError(
            f"the model{_name_slots(parts)}, {config.num_pages} pages and {config.num_slabs} slabs"
            f" ({records.num_bytes / 2**30:.1f} GiB) do not fit {device}, which has {free:.1f} GiB left; lower"
            f" num_pages or limits.{'prefill_chunk_tokens' if config.role == 'prefill' else 'decode_rows'}"
        ) from error
    info = DeviceInfo(
        name=f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device),
        layout_digest=digest_records(shape, records),
        page_tokens=config.page_tokens,
        page_bytes=records.page_bytes,
        num_pages=records.num_pages,
        slab_bytes=records.slab_bytes,
        num_slabs=records.num_slabs,
        vocab_size=shape.vocab_size,
        max_model_tokens=max_tokens,
        eos_ids=(shape.eos_token_id,),
        mesh_address=mesh_address,
        parts=tuple(part.pool.info for part in parts),
        max_drafts=drafter.drafts if drafter is not None else 0,
    )
    return model, info


def digest_records(shape: ModelShape, records: Records) -> str:
    """Over all that two devices must share to exchange pages and slabs."""
    described = {
        "step": FORMAT_VERSION,
        "architecture": shape.architecture,
        "format": records.format,
        "page": [records.page_tokens, records.page_bytes],
        "slab": [records.slab_bytes, records.counts],
        "streams": [records.streams.data - records.slabs_at] if records.streams else [],
        "stages": [plane.data - records.slabs_at for plane in records.stages],
        "ids": [records.ids.data - records.slabs_at, records.ids.rows] if records.ids else [],
        # Windows and rings without the run of pages in front of them, which is each device's own.
        "parts": [
            [
                layer.window.data - records.slabs_at,
                layer.window.rows,
                *([layer.entries.data, layer.entries.rows] if layer.entries else []),
                *([layer.keys.data, layer.keys.rows] if layer.keys else []),
                *([layer.entry_ring.data - records.slabs_at, layer.entry_ring.rows] if layer.entry_ring else []),
                *([layer.key_ring.data - records.slabs_at, layer.key_ring.rows] if layer.key_ring else []),
            ]
            for layer in records.layers
        ],
        "widths": [shape.vocab_size, shape.hidden, shape.head_dim, shape.rope_dim, shape.index_dim, SPARE_ROWS],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def activations(config: RankConfig) -> torch.dtype:
    """The type in which a step's rows are. They are as exact as records: float32 is for comparisons."""
    return torch.float32 if config.kv_dtype == "float32" else torch.bfloat16


def keeps_stored_bytes(config: RankConfig, shape: ModelShape) -> bool:
    """Whether a checkpoint's weights are taken as they are stored. If not, they are dequantised."""
    return shape.weight_block is not None and activations(config) != torch.float32


def _load_weights(
    config: RankConfig,
    directory: Path,
    shape: ModelShape,
    device: torch.device,
    max_tokens: int,
    parts: Sequence[DevicePart],
) -> tuple[StepWeights, AheadWeights | None]:
    """The target's weights, and those of the layer that predicts ahead where this rank drafts or keeps its context."""
    dtype = activations(config)
    placed = None
    if parts:
        main = parts[0]
        placed = PlacedExperts(main.pool.weights, main.tables.expert_to_slot, main.tables.counts)
    engram = load_tables(directory, shape)

    has_drafter = bool(config.draft.tokens and shape.num_predict_layers)

    def gather(source: ExpertSource) -> tuple[StepWeights, AheadWeights | None]:
        weights = make_step_weights(shape, source, max_tokens=max_tokens, engram=engram, placed=placed)
        if not has_drafter:
            return weights, None
        # All experts also in a group: one layer's are few bytes, and drafting needs no exchange then.
        return weights, make_ahead_weights(shape, source, None if config.role == "decode" else range(0))

    if config.load_format == "dummy":
        return gather(DummySource(shape, device, dtype=dtype))
    if not keeps_stored_bytes(config, shape):
        return gather(PlainSource(load_checkpoint(directory, experts=placed is None or has_drafter)[1], device, dtype))
    stored = StoredSource(directory, shape, device)
    try:
        return gather(stored)
    finally:
        stored.close()


def _check_segments(device: torch.device) -> None:
    """Peers write to memory that the fabric registers, which it can only where an allocation is a single mapping."""
    if device.type == "cuda" and any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
        raise ConfigError(
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments, whose memory can not be registered for pushes: leave it"
            " out"
        )


def _name_slots(parts: Sequence[DevicePart]) -> str:
    infos = [part.pool.info for part in parts]
    size = sum(info.slots * info.slot_bytes for info in infos)
    return f", {sum(info.slots for info in infos)} expert slots ({size / 2**30:.1f} GiB)" if infos else ""
