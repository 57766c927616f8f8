"""A step over an arena of its own, driven position by position as a decode loop would, for tests of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.engram import EngramTables
from engine.model.ops import Ops
from engine.model.records import Records, plan_records
from engine.model.shapes import ModelShape, shape_from_config
from engine.model.step_forward import StepForward, StepSize
from engine.model.step_shared import open_step
from engine.model.step_weights import StepWeights, WeightSource, make_step_weights
from kernels.forms import RecordFormat
from tests.model.paged_cases import smallest_page, write_checkpoint

POISON = 0xFF
MAX_TOKENS = 320


@dataclasses.dataclass
class StepRig:
    """A model's weights, and arenas for steps of it."""

    shape: ModelShape
    weights: StepWeights
    ops: Ops
    device: torch.device

    def open(
        self, sequences: int, span: int, format: RecordFormat, *, seed: int = 0, pages: int | None = None
    ) -> StepForward:
        """A step over poisoned memory; each sequence has shuffled pages of its own, and a slab."""
        page_tokens = smallest_page(self.shape)
        pages = -(-MAX_TOKENS // page_tokens) if pages is None else pages
        records: Records = plan_records(
            self.shape,
            page_tokens=page_tokens,
            num_pages=sequences * pages + 1,
            num_slabs=sequences + 1,
            format=format,
        )
        arena = records.make_arena(self.device).fill_(POISON)
        step = open_step(self.shape, self.weights, records, arena, self.ops, StepSize(sequences, span, pages))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sequences * pages + 1, generator=generator)[: sequences * pages]
        step.rows.tables.copy_(order.view(sequences, pages))
        step.rows.slabs.copy_(torch.randperm(sequences + 1, generator=generator)[:sequences])
        return step


def make_rig(
    shape: ModelShape,
    source: WeightSource,
    ops: Ops,
    *,
    max_tokens: int = MAX_TOKENS,
    engram: EngramTables | None = None,
) -> StepRig:
    """Weights from a source, on its device."""
    return StepRig(shape, make_step_weights(shape, source, max_tokens=max_tokens, engram=engram), ops, source.device)


@dataclasses.dataclass
class Decoded:
    """Of one sequence, by position: logits float32[length, vocab], experts int64[length, layers, k]."""

    logits: Tensor
    experts: Tensor


def fill_inputs(step: StepForward, texts: Sequence[Tensor], start: int) -> list[int]:
    """The next `span` ids of every text from `start` on as the step's input; how many rows each has."""
    span = step.size.span
    tokens = torch.zeros((len(texts), span), dtype=torch.int32)
    positions = torch.full((len(texts), span), -1, dtype=torch.int32)
    counts = []
    for row, ids in enumerate(texts):
        part = ids[start : start + span]
        tokens[row, : len(part)] = part
        positions[row, : len(part)] = torch.arange(start, start + len(part), dtype=torch.int32)
        counts.append(len(part))
    step.tokens.copy_(tokens.flatten())
    step.rows.positions.copy_(positions.flatten())
    return counts


def decode(step: StepForward, texts: Sequence[Tensor]) -> list[Decoded]:
    """Teacher-forced from position 0: sequence i of the step reads `texts[i]`; those that have ended are padding."""
    span = step.size.span
    logits: list[list[Tensor]] = [[] for _ in texts]
    experts: list[list[Tensor]] = [[] for _ in texts]
    for start in range(0, max(len(ids) for ids in texts), span):
        counts = fill_inputs(step, texts, start)
        outputs = step.run()
        chosen = torch.stack(outputs.ids, 1).cpu().long()
        found = outputs.logits.cpu()
        for row, count in enumerate(counts):
            logits[row].append(found[row * span : row * span + count])
            experts[row].append(chosen[row * span : row * span + count])
    return [Decoded(torch.cat(a), torch.cat(b)) for a, b in zip(logits, experts, strict=True)]


def flash_shape() -> ModelShape:
    """V4-Flash at its real size."""
    from engine.bench.cases import load_model_config

    return shape_from_config(load_model_config("v4-flash"))


def write_agreeing_checkpoint(directory: Path, config: dict[str, Any], *, share: float = 0.03) -> None:
    """A random V4 model as `write_checkpoint` writes one, whose drafts often hold: what layers add is `share` of what
    random ones do, so that the next token follows from the present one as a rule, and the layer that predicts ahead
    sees the token and not the streams."""
    write_checkpoint(directory, config=config)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("wo_b.weight", "w2.weight")):
            tensor *= share
    weights["mtp.0.h_proj.weight"] *= share / 10
    weights["mtp.0.e_proj.weight"] = torch.eye(len(weights["mtp.0.e_proj.weight"]))
    weights["mtp.0.norm.weight"] = weights["norm.weight"].clone()
    save_file(weights, directory / "model.safetensors")
