"""Loads a model whose passes are the device's step (`step_model.py`), with its arena, on a CUDA device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import RankConfig, model_directory
from engine.errors import ConfigError
from engine.model.checkpoint import load_checkpoint
from engine.model.dummy import DummySource
from engine.model.kv import SPARE_ROWS
from engine.model.ops import Ops, ops_for
from engine.model.records import Records, plan_records
from engine.model.shapes import ModelShape, load_shape
from engine.model.step_arena import StepArena
from engine.model.step_model import StepModel
from engine.model.step_weights import StepWeights, WeightSource, make_step_weights
from engine.model.weight_sources import PlainSource, StoredSource
from engine.ports import DeviceInfo
from kernels.forms import RecordFormat

Report = Callable[[str, int, int, str], None]

PROMPT_ROWS = (32, 256)
"""Rows of a prompt that steps have: products are bound by the bytes of weights below some 200 rows."""
FORMATS: dict[str, RecordFormat] = {"float32": "fp32", "bfloat16": "bf16", "fp8": "fp8"}
"""Record formats by `kv_dtype`."""
FORMAT_VERSION = 1
"""Raised when the meaning of bytes in a page or slab changes."""


def load_step_model(
    config: RankConfig,
    report: Report,
    device: torch.device,
    *,
    poison: bool = False,
    ops: Ops | None = None,
    prompt_rows: tuple[int, ...] = PROMPT_ROWS,
) -> tuple[StepModel, DeviceInfo]:
    """Weights, arena, and steps of all sizes. Blocks for as long as it takes.

    Args:
        config: the rank's configuration, with `num_pages` and `num_slabs`.
        report: called with (phase, done, total, unit).
        device: where to.
        poison: fill the arena with NaN, so that a test sees a read of something never written.
        ops: implementation of the operations; None for the device's.
        prompt_rows: see `StepModel`.

    Raises:
        ConfigError: the model is none that a step can run, a page of it can not be laid out, or it does not fit the
            device's memory.
    """
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
        weights = _load_weights(config, directory, shape, device, max_tokens)
        report("weights", total, total, "bytes")
        report("arena", 0, records.num_bytes, "bytes")
        arena = StepArena(records, device, shape.vocab_size, poison=poison)
        report("arena", records.num_bytes, records.num_bytes, "bytes")
        report("warmup", 0, 1, "steps")
        model = StepModel(
            shape,
            weights,
            arena,
            ops or ops_for(device),
            max_tokens=max_tokens,
            decode_rows=config.limits.decode_rows,
            prompt_rows=prompt_rows,
        )
        # The logits that a pass copies out of its graphs. The allocator keeps what it had: no request finds it short.
        most = config.limits.prefill_chunk_tokens if config.role == "prefill" else config.limits.decode_rows
        torch.empty((most + max(prompt_rows), shape.vocab_size), device=device)
        report("warmup", 1, 1, "steps")
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        raise ConfigError(
            f"the model, {config.num_pages} pages and {config.num_slabs} slabs ({records.num_bytes / 2**30:.1f} GiB) do"
            f" not fit {device}, which has {free:.1f} GiB left; lower num_pages or limits.decode_rows"
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


def _load_weights(
    config: RankConfig, directory: Path, shape: ModelShape, device: torch.device, max_tokens: int
) -> StepWeights:
    # Activations are as exact as records: float32 is for comparisons.
    dtype = torch.float32 if config.kv_dtype == "float32" else torch.bfloat16
    if config.load_format == "dummy":
        return make_step_weights(shape, DummySource(shape, device, dtype=dtype), max_tokens=max_tokens)
    if shape.weight_block is None or dtype == torch.float32:
        plain: WeightSource = PlainSource(load_checkpoint(directory)[1], device, dtype)
        return make_step_weights(shape, plain, max_tokens=max_tokens)
    stored = StoredSource(directory, shape, device)
    try:
        return make_step_weights(shape, stored, max_tokens=max_tokens)
    finally:
        stored.close()
