"""The bundled model's shape: its config.json, its tensors with their storage format, and their initial values.

Owns the sizes and the byte count that decided them; `python -m engine.nano.build` prints the count. Does not own what a
configuration means (`engine.model.shapes`) nor the formats (`engine.model.quantise`).

Invariant: every quantised dimension is a multiple of 32, and the exported file with its tokenizer fits FILE_BUDGET.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.model.checkpoint import Store
from engine.model.engram import EngramTables, engram_tables, fold_vocabulary, hash_primes
from engine.model.quantise import weight_specs
from engine.model.shapes import EngramShape, ModelShape, shape_from_config

FILE_BUDGET = 16 * 1024 * 1024
BLOCK = 32


def token_strings(tokenizer: Tokenizer) -> list[str]:
    """The text of every id, as the n-gram memory folds it."""
    return [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]


def text_sizes() -> dict[str, Any]:
    """The sizes that make this model, vendor names. The roles are V4.1's, three stacks of them in eight layers."""
    return {
        "vocab_size": 8192,
        "hidden_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "n_routed_experts": 24,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 6],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-20,
        "engram_layer_ids": [1, 4],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 1500,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "max_position_embeddings": 16384,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def miniature_sizes() -> dict[str, Any]:
    """The same roles at a size that a test trains in seconds."""
    return text_sizes() | {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "sliding_window": 16,
        "index_topk": 8,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "engram_vocab_size": 100,
        "dspark_n_routed_experts": 4,
        "max_position_embeddings": 1024,
    }


def make_config(tokenizer: Tokenizer, sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The complete vendor-style config.json.

    Args:
        tokenizer: the vocabulary; decides the folded size and the table sizes.
        sizes: `text_sizes()` unless given.
    """
    text = dict(sizes or text_sizes())
    folded = fold_vocabulary(token_strings(tokenizer))
    text["engram_compressed_vocab_size"] = int(folded.max()) + 1
    engram = EngramShape(
        layers=tuple(text["engram_layer_ids"]),
        num_rows=(0, 0),
        max_ngram=text["engram_max_ngram_size"],
        num_heads=text["engram_n_heads"],
        head_dim=text["engram_head_dim"],
        bucket_base=text["engram_vocab_size"],
        pad_token_id=text["engram_pad_token_id"],
        num_classes=text["engram_compressed_vocab_size"],
    )
    text["engram_num_embeddings"] = [int(total) for total in hash_primes(engram).sum(1)]
    text = {"model_type": "deepseek_v41_text", "dtype": "bfloat16"} | text
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "image_token_id": 65,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }


def make_tables(shape: ModelShape, tokenizer: Tokenizer) -> EngramTables:
    """Hash constants of the n-gram memory for this vocabulary."""
    return engram_tables(shape, fold_vocabulary(token_strings(tokenizer)))


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
    # Names, offsets and dtypes of about 2,900 tensors (each expert is stored on its own, as the vendor does).
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


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("tokenizer.json")
    config = make_config(Tokenizer.from_file(str(path)))
    print(json.dumps(config, indent=1))
    print_budget(shape_from_config(config), path.stat().st_size)
