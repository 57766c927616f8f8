"""ModelShape: layer roles, sizes of the published models, and what is refused."""

import copy
import math

import pytest

from engine.errors import ConfigError
from engine.model.checkpoint import tensor_specs
from engine.model.shapes import load_shape, shape_from_config


def real_config() -> dict:
    """The text sizes of the published V4.1-Flash."""
    return {
        "model_type": "deepseek_v41",
        "text_config": {
            "vocab_size": 129280,
            "hidden_size": 5120,
            "moe_intermediate_size": 2304,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 1280,
            "o_lora_rank": 1024,
            "o_groups": 8,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "candidate_source_layer_id": 20,
            "candidate_topk_blocks": 2048,
            "candidate_block_size": 8,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "rms_norm_eps": 1e-20,
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384_006_168, 384_016_682],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": 16_000_000,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 99_092,
            "rope_theta": 10_000.0,
            "compress_rope_theta": 160_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65_536,
            },
            "max_position_embeddings": 1_048_576,
            "num_nextn_predict_layers": 3,
            "dspark_block_size": 5,
            "dspark_noise_token_id": 128_799,
            "dspark_target_layer_ids": [37, 38, 39],
            "dspark_markov_rank": 256,
            "dspark_n_routed_experts": 128,
            "dspark_num_experts_per_tok": 3,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    }


def v4_config(*, pro: bool = False) -> dict:
    """The sizes of the published V4-Flash, or of V4-Pro."""
    layers = 61 if pro else 43
    return {
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 7168 if pro else 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 128 if pro else 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1536 if pro else 1024,
        "o_groups": 16 if pro else 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [128 if pro else 0] * 2 + [4 if n % 2 == 0 else 128 for n in range(layers - 2)] + [0],
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 1024 if pro else 512,
        "n_routed_experts": 384 if pro else 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 3072 if pro else 2048,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5 if pro else 1.5,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def test_each_layer_of_v4_owns_what_it_attends_to():
    shape = shape_from_config(v4_config())
    roles = shape.layer_roles
    assert [role.ratio for role in roles[:6]] == [0, 0, 4, 128, 4, 128] and roles[42].ratio == 4
    assert all(role.kv_source == (role.index if role.ratio else None) for role in roles)
    assert all(role.overlaps == role.is_index_source == (role.ratio == 4) for role in roles)
    assert all(role.attends_to_all == (role.ratio == 128) for role in roles)
    assert [role.index for role in roles if role.is_hashed] == [0, 1, 2]
    assert (len(shape.kv_sources), len(shape.key_sources), shape.num_predict_layers) == (41, 21, 1)
    assert [roles[n].pooled_tokens for n in (0, 2, 3)] == [0, 8, 128]


@pytest.mark.parametrize(("pro", "target", "ahead"), [(False, 284.33, 6.61), (True, 1573.0, 25.84)])
def test_the_published_sizes_of_v4_follow_from_its_configuration(pro, target, ahead):
    specs = tensor_specs(shape_from_config(v4_config(pro=pro)))
    counts = {True: 0.0, False: 0.0}
    for name, spec in specs.items():
        if spec.store != "ids":
            counts[name.startswith("mtp.")] += math.prod(spec.shape) / 1e9
    assert counts[False] == pytest.approx(target, abs=0.01) and counts[True] == pytest.approx(ahead, abs=0.01)
    if not pro:
        # Every quantised matrix has its scales: the number of tensors in the published files.
        assert len(specs) + sum(spec.store in ("fp8", "fp4") for spec in specs.values()) == 69_187


def test_the_published_bytes_per_token_of_v4_follow_from_its_configuration():
    shape = shape_from_config(v4_config())
    entries = sum(shape.num_entries(layer, 1 << 20) for layer in shape.kv_sources) / (1 << 20)
    keys = sum(shape.num_entries(layer, 1 << 20) for layer in shape.key_sources) / (1 << 20)
    assert round(584 * entries + 132 * keys) == 3850 and round(584 * entries + 68 * keys) == 3514


def test_every_layer_of_the_tiny_model_borrows_from_the_right_one(tiny):
    roles = tiny.shape.layer_roles
    assert [role.ratio for role in roles] == [0, 0, 2, 2, 2, 1, 1, 1]
    assert [role.kv_source for role in roles] == [None, None, 2, 2, 4, 5, 5, 5]
    assert [role.selection_source for role in roles] == [None, None, 2, 2, 4, 5, 6, 6]
    assert [role.candidate_source for role in roles] == [None] * 6 + [5, None]
    assert [role.index for role in roles if role.is_candidate_source] == [5]
    assert [role.index for role in roles if role.has_engram] == [1, 4]
    assert tiny.shape.kv_sources == (2, 4, 5)
    assert tiny.shape.index_sources == (2, 4, 5, 6)


def test_the_real_model_reindexes_four_layers_inside_the_candidates_of_layer_20():
    roles = shape_from_config(real_config()).layer_roles
    assert [role.index for role in roles if role.candidate_source == 20] == [24, 28, 32, 36]
    assert [role.selection_source for role in roles[20:30]] == [20] * 4 + [24] * 4 + [28] * 2
    assert {role.kv_source for role in roles[20:]} == {20}


def test_the_published_bytes_per_token_follow_from_the_real_sizes():
    shape = shape_from_config(real_config())
    assert shape.long_term_bytes(1_000_000, entry_bytes=288, key_bytes=68) == 890_000_000
    assert shape.long_term_bytes(1_000_000, entry_bytes=584, key_bytes=132) == 1_790_000_000
    assert shape.window_bytes(entry_bytes=528) == 43 * 128 * 528


def test_the_published_parameter_counts_follow_from_the_real_sizes():
    counts = {"engram": 0.0, "drafter": 0.0, "target": 0.0}
    for name, spec in tensor_specs(shape_from_config(real_config())).items():
        size = 1
        for width in spec.shape:
            size *= width
        part = "engram" if ".engram.embed" in name else "drafter" if name.startswith("mtp.") else "target"
        counts[part] += size / 1e9
    assert counts["engram"] == pytest.approx(196.6, abs=0.1)
    assert counts["target"] == pytest.approx(551.9, abs=0.5)


def test_entries_close_by_whole_groups(tiny):
    assert [tiny.shape.num_entries(2, length) for length in (0, 1, 2, 3, 4)] == [0, 0, 1, 1, 2]
    assert tiny.shape.num_entries(5, 3) == 3
    assert tiny.shape.num_entries(0, 300) == 0


def test_an_integer_norm_eps_of_the_vendor_is_kept_to_the_last_digit(tiny):
    assert tiny.shape.norm_eps == 1e-20
    assert tiny.shape.hyper_eps == 1e-6


REFUSED = [
    ("model_type", "llama", "model_type must be 'deepseek_v41' or 'deepseek_v4', found 'llama'"),
    ("text_config", None, "text_config is missing"),
    ("text_config.hidden_size", None, "text_config.hidden_size is missing"),
    ("text_config.hidden_size", 0, "hidden_size must be at least 1, found 0"),
    ("text_config.hidden_size", True, "hidden_size must be an integer"),
    ("text_config.rms_norm_eps", "tiny", "rms_norm_eps must be a positive number"),
    ("text_config.num_key_value_heads", 2, "num_key_value_heads must be 1, found 2"),
    ("text_config.scoring_func", "softmax", "scoring_func must be 'sqrtsoftplus'"),
    ("text_config.o_groups", 7, "o_groups must divide the 64 attention heads, found 7"),
    ("text_config.qk_rope_head_dim", 63, "qk_rope_head_dim must be even and at most 128, found 63"),
    ("text_config.qk_rope_head_dim", 256, "qk_rope_head_dim must be even and at most 128"),
    ("text_config.num_experts_per_tok", 385, "num_experts_per_tok must be at most 384 experts, found 385"),
    ("text_config.compress_ratios", [0, 0, 2], r"compress_ratios must have 43 entries .* found 3"),
    ("text_config.compress_ratios", [0, 0] + [2] * 18 + [1] * 23, "drafter stages must be 0"),
    ("text_config.compress_ratios", [0, 2] + [2] * 18 + [1] * 20 + [0] * 3, r"compress_ratios\[1\]"),
    ("text_config.kv_source_layer_ids", [8, 2], "kv_source_layer_ids must ascend"),
    ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 40], "stay below 40 layers"),
    ("text_config.kv_source_layer_ids", [2, 8, 14], r"compress_ratios\[20\] must equal its source's ratio"),
    ("text_config.index_source_layer_ids", [2, 8, 20], "index_source_layer_ids must contain layer 14"),
    ("text_config.index_source_layer_ids", [0, 2, 8, 14, 20], r"compress_ratios\[0\] must not be 0"),
    ("text_config.candidate_source_layer_id", 21, "candidate_source_layer_id must be an index source, found 21"),
    ("text_config.engram_num_embeddings", [1], r"engram_num_embeddings must have one entry per layer \(2\), found 1"),
    ("text_config.engram_max_ngram_size", 1, "engram_max_ngram_size must be at least 2"),
    ("text_config.dspark_num_experts_per_tok", 129, "dspark_num_experts_per_tok must be at most 128"),
    ("text_config.dspark_target_layer_ids", [], "dspark_target_layer_ids must name"),
    ("text_config.rope_scaling", {"rope_type": "linear"}, "rope_type must be 'yarn', found 'linear'"),
    ("quantization_config.quant_method", "awq", "quant_method must be 'fp8', found 'awq'"),
    ("quantization_config.weight_block_size", [32], "weight_block_size must be two positive sizes"),
    ("quantization_config.weight_block_size", [32, 0], "weight_block_size must be two positive sizes"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_an_unusable_field_is_named_with_its_limit(field, value, message):
    config = copy.deepcopy(real_config())
    *path, last = field.split(".")
    section = config
    for part in path:
        section = section[part]
    section[last] = value
    with pytest.raises(ConfigError, match=message):
        shape_from_config(config)


def test_a_missing_or_broken_config_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_shape(tmp_path)
