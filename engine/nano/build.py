"""The bundled model's shape: its sizes, the config.json they make, and the folding of its vocabulary.

Does not own what a configuration means (`engine.model.shapes`) nor how its tensors start and are stored (plan.py).
`python -m engine.nano.build` prints the configuration and the byte count that decided the sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.model.engram import EngramTables, engram_tables, fold_vocabulary, hash_primes
from engine.model.shapes import EngramShape, ModelShape, shape_from_config
from engine.nano.plan import BLOCK, print_budget

TOKENIZER = Path(__file__).with_name("tokenizer.json")


def fold(tokenizer: Tokenizer) -> np.ndarray:
    """The classes of the vocabulary that the n-gram memory hashes: int64[vocab].

    By the text of each token alone: all pieces of a broken character share one class. The vendor tells them apart by
    their spelling, so this folding travels with the weights (`engram.safetensors`).
    """
    return fold_vocabulary(
        [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    )


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
    text["engram_compressed_vocab_size"] = int(fold(tokenizer).max()) + 1
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
    return engram_tables(shape, fold(tokenizer))


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER
    config = make_config(Tokenizer.from_file(str(path)))
    print(json.dumps(config, indent=1))
    print_budget(shape_from_config(config), path.stat().st_size)
