"""The plan of the bundled model's tensors: how each is stored, starts and learns, and what all of them take.

Does not own the formats (`engine.model.quantise`). Invariant: every quantised dimension is a multiple of BLOCK, and the
exported files together fit FILE_BUDGET.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.model.checkpoint import Store
from engine.model.quantise import weight_specs
from engine.model.shapes import ModelShape

# Weights, tokenizer and folding together.
FILE_BUDGET = 16 * 1024 * 1024
BLOCK = 32

# Stored narrower than the vendor stores them, so that the file fits: fp8 blocks for the tables over the vocabulary and
# the drafter's input projection, bf16 for the hyper-connection projections. The reader goes by the stored dtype.
_NARROW: tuple[tuple[str, Store], ...] = (
    ("embed.weight", "fp8"),
    ("head.weight", "fp8"),
    ("main_proj.weight", "fp8"),
    ("hc_attn_fn", "bf16"),
    ("hc_ffn_fn", "bf16"),
)


def narrow_stores(shape: ModelShape) -> dict[str, Store]:
    """Tensors whose storage differs from the vendor's, by name. N-gram tables (`engram.embed`) are not among them."""
    return {
        name: store
        for name in weight_specs(shape)
        for ending, store in _NARROW
        if name.endswith(ending) and "engram" not in name
    }


Kind = Literal["matrix", "table", "vector", "index", "bias"]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor (a stack, for experts): logical size, storage, and how it starts and learns.

    Attributes:
        size: logical dimensions, [out, in] for matrices, [experts, out, in] for stacks.
        store: format in the exported file.
        start: standard deviation of random initial values, or the constant of a vector.
        kind: "matrix" goes to Muon, "table" and "vector" to AdamW, "index" to AdamW (trained by its own loss),
            "bias" is moved by the load rule alone.
    """

    size: tuple[int, ...]
    store: Store
    start: float
    kind: Kind

    @property
    def is_random(self) -> bool:
        """Starts from random values, not from a constant."""
        return self.kind in ("matrix", "table", "index") or (len(self.size) == 2 and self.start < 0.05)

    @property
    def file_bytes(self) -> int:
        """Bytes in the exported file, scales included."""
        count = math.prod(self.size)
        return {
            "fp32": 4 * count,
            "bf16": 2 * count,
            "fp8": count + count // (BLOCK * BLOCK),
            "rows": count + count // BLOCK,
            "fp4": count // 2 + count // BLOCK,
        }[self.store]


def _rule(name: str, size: tuple[int, ...]) -> tuple[float, Kind]:
    """(start, kind) by name. Projections back to the streams start small; everything else at 1 / sqrt(in)."""
    fan = size[-1] ** -0.5
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return 0.0, "bias"
    if name.endswith("_scale"):
        return 0.1, "vector"
    if name.endswith(("_base", "attn_sink")):
        return 0.0, "vector"
    if name.endswith("_fn"):
        return 0.02, "vector"
    if name.endswith("confidence_head.proj.weight"):
        return 0.01, "vector"
    if name.endswith(("markov_head.head.weight", "head.weight")):
        return 0.02, "table"
    if name.endswith("markov_head.embed.weight"):
        return 0.1, "table"
    if name.endswith("embed.weight"):
        return 0.05, "table"
    if name.endswith("gate.weight") and ".ffn." in name:
        return fan, "table"
    if name.endswith(("q_weight", "k_weight")) or len(size) == 1:
        return 1.0, "vector"
    if ".indexer." in name:
        return fan, "index"
    return (0.3 * fan if name.endswith(("wo_b.weight", ".w2", ".w2.weight")) else fan), "matrix"


def plan_tensors(shape: ModelShape) -> dict[str, TensorPlan]:
    """Every tensor of the model, target first, then the drafter (`mtp.*`)."""
    narrow = narrow_stores(shape)
    return {
        name: TensorPlan(spec.shape, narrow.get(name, spec.store), *_rule(name, spec.shape))
        for name, spec in weight_specs(shape).items()
    }


def initial_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Float32 starting values on the CPU, a function of (shape, seed).

    Streams start apart: sublayer s reads mostly stream s mod 4 and writes to all, and mixing starts near the identity
    (a symmetric start would keep the four streams equal for a long time).
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    sublayer = 0
    for name, plan in plan_tensors(shape).items():
        if plan.is_random:
            weights[name] = torch.randn(plan.size, generator=generator) * plan.start
        else:
            weights[name] = torch.full(plan.size, plan.start)
        if name.endswith(("hc_attn_base", "hc_ffn_base")):
            n = shape.num_streams
            base = torch.zeros(shape.hyper_width)
            # This `pre` is used by the next sublayer.
            base[:n] = -2.0
            base[(sublayer + 1) % n] = 1.0
            base[2 * n :] = (4.0 * torch.eye(n)).flatten()
            weights[name] = base
            sublayer += 1
    return weights


def print_budget(shape: ModelShape, tokenizer_bytes: int) -> int:
    """Print the byte table and return the total in bytes."""
    groups: dict[str, list[int]] = {}
    for name, plan in plan_tensors(shape).items():
        part = "drafter " if name.startswith("mtp.") else ""
        if ".experts." in name:
            part += "routed experts"
        elif "hc_" in name:
            part += "hyper-connections"
        elif "indexer" in name:
            part += "indexer"
        elif "engram" in name:
            part += "engram"
        elif ".attn." in name:
            part += "attention"
        elif "markov" in name:
            part += "markov"
        elif ".ffn." in name:
            part += "shared experts and router"
        elif name.startswith(("embed", "head")):
            part += name.split(".")[0]
        else:
            part += "rest"
        entry = groups.setdefault(part, [0, 0])
        entry[0] += math.prod(plan.size)
        entry[1] += plan.file_bytes
    groups["tokenizer"] = [0, tokenizer_bytes]
    groups["folding"] = [0, 4 * shape.vocab_size + 80]
    # Names, offsets and dtypes of about 1,700 tensors (each expert is stored on its own, as the vendor does).
    stacked = sum(plan.size[0] * 2 for plan in plan_tensors(shape).values() if len(plan.size) == 3)
    singles = sum(1 + (plan.store in ("fp8", "rows")) for plan in plan_tensors(shape).values() if len(plan.size) < 3)
    groups["file header"] = [0, 120 * (stacked + singles)]
    total = sum(entry[1] for entry in groups.values())
    for part, (count, size) in sorted(groups.items(), key=lambda item: -item[1][1]):
        print(f"{part:36s} {count:12,d} parameters {size:12,d} bytes")
    params = sum(entry[0] for entry in groups.values())
    share = total / FILE_BUDGET
    print(f"{'total':36s} {params:12,d} parameters {total:12,d} bytes = {total / 2**20:.2f} MiB, {share:.1%} of budget")
    return total
