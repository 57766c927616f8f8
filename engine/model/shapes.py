"""ModelShape: every size and layer role of one model, read from the vendor's config.json.

Owns the translation from the vendor's field names to ours and the rules that make a configuration valid.
Does not own tensors (checkpoint.py) and does not import torch. A ModelShape is immutable; layers, experts and
positions count from 0.

Only the V4.1 text architecture is accepted. V4 differs in its layer roles (each layer owns its entries), not in
what a role *is*, so it becomes a second function beside `_shape_v41`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True)
class LayerRole:
    """What one layer owns and what it borrows from an earlier layer.

    Attributes:
        index: position of the layer in the stack.
        ratio: tokens per compressed entry; 0 for a layer that sees its window only.
        kv_source: layer whose compressed entries this one attends to; None when ratio is 0.
        is_kv_source: this layer computes those entries, and the index keys, itself.
        selection_source: layer whose top-k selection this one uses; None when ratio is 0.
        is_index_source: this layer scores entries with its own index queries.
        candidate_source: layer whose candidate blocks limit this layer's scoring; None for no limit.
        is_candidate_source: this layer publishes candidate blocks.
        has_engram: an n-gram memory is added to the streams that enter this layer.
    """

    index: int
    ratio: int
    kv_source: int | None
    is_kv_source: bool
    selection_source: int | None
    is_index_source: bool
    candidate_source: int | None
    is_candidate_source: bool
    has_engram: bool


@dataclass(frozen=True)
class RopeScaling:
    """YaRN frequency blend of the layers with compressed entries (no attention temperature)."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class EngramShape:
    """Sizes of the n-gram memory.

    Attributes:
        layers: layers that have one, ascending.
        num_rows: rows of each layer's table, in the order of `layers`.
        max_ngram: longest n-gram; orders are 2..max_ngram.
        num_heads: hash heads per order.
        head_dim: width of a table row.
        bucket_base: the table primes are searched upwards from here.
        pad_token_id: token that stands for positions before the start.
        num_classes: distinct folded ids.
    """

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    max_ngram: int
    num_heads: int
    head_dim: int
    bucket_base: int
    pad_token_id: int
    num_classes: int

    @property
    def rows_per_token(self) -> int:
        """Table rows that one token reads in one layer."""
        return (self.max_ngram - 1) * self.num_heads


@dataclass(frozen=True)
class DrafterShape:
    """The block drafter (DSpark): a short stack of window-only stages over target features.

    Attributes:
        num_stages: blocks in the stack (`mtp.0` ..).
        block_size: most rows that one round drafts.
        noise_token_id: token that fills the rows after the anchor.
        target_layers: target layers whose entering streams are the features, ascending.
        markov_rank: rank of the bias from the previous token.
        num_experts: routed experts of a stage.
        top_k: experts chosen per row.
    """

    num_stages: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class ModelShape:
    """All sizes of one model. Widths are in channels, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_blocks: int
    candidate_block_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    expert_width: int
    routed_scale: float
    clamp: float
    num_streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    norm_eps: float
    rope_theta: float
    compress_theta: float
    rope_scaling: RopeScaling | None
    max_length: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    weight_block: tuple[int, int] | None
    layer_roles: tuple[LayerRole, ...]
    engram: EngramShape | None
    drafter: DrafterShape | None

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layers that own compressed entries, ascending."""
        return tuple(role.index for role in self.layer_roles if role.is_kv_source)

    @property
    def index_sources(self) -> tuple[int, ...]:
        """Layers that select entries, ascending."""
        return tuple(role.index for role in self.layer_roles if role.is_index_source)

    @property
    def shared_width(self) -> int:
        """Width of the shared expert's hidden layer."""
        return self.expert_width * self.num_shared_experts

    @property
    def stream_width(self) -> int:
        """Channels of all residual streams of one token together."""
        return self.num_streams * self.hidden

    @property
    def hyper_width(self) -> int:
        """Coefficients of one hyper-connection: pre, post and the square combination."""
        return self.num_streams * (2 + self.num_streams)

    def num_entries(self, layer: int, length: int) -> int:
        """Compressed entries that `length` tokens have closed for `layer`; 0 for a window-only layer."""
        ratio = self.layer_roles[layer].ratio
        return length // ratio if ratio else 0

    def long_term_bytes(self, length: int, *, entry_bytes: int, key_bytes: int) -> int:
        """Bytes of compressed entries and index keys of one request.

        Args:
            length: tokens in the request.
            entry_bytes: bytes of one compressed entry in the chosen record format.
            key_bytes: bytes of one index key.
        """
        return sum(self.num_entries(layer, length) for layer in self.kv_sources) * (entry_bytes + key_bytes)

    def window_bytes(self, *, entry_bytes: int) -> int:
        """Bytes of one request's window entries, all layers and drafter stages."""
        stages = self.drafter.num_stages if self.drafter else 0
        return (self.num_layers + stages) * self.window * entry_bytes


class _Fields:
    """Typed reads from one JSON object; every error names the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        if not self.has(name):
            raise ConfigError(f"{self._where}.{name} is missing")
        return self._values[name]

    def count(self, name: str, *, low: int = 1) -> int:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self._where}.{name} must be an integer, found {value!r}")
        if value < low:
            raise ConfigError(f"{self._where}.{name} must be at least {low}, found {value}")
        return value

    def number(self, name: str) -> float:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"{self._where}.{name} must be a positive number, found {value!r}")
        return float(value)

    def counts(self, name: str) -> tuple[int, ...]:
        value = self.raw(name)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            raise ConfigError(f"{self._where}.{name} must be a list of non-negative integers, found {value!r}")
        return tuple(value)

    def layers(self, name: str, num_layers: int) -> tuple[int, ...]:
        value = self.counts(name)
        if list(value) != sorted(set(value)) or any(v >= num_layers for v in value):
            raise ConfigError(
                f"{self._where}.{name} must ascend and stay below {num_layers} layers, found {list(value)}"
            )
        return value

    def only(self, name: str, *supported: object) -> None:
        value = self._values.get(name, supported[0])
        if value not in supported:
            wanted = " or ".join(repr(v) for v in supported)
            raise ConfigError(f"{self._where}.{name} must be {wanted}, found {value!r}")


def load_shape(directory: Path) -> ModelShape:
    """Read `config.json` of a checkpoint directory.

    Raises:
        ConfigError: the file is missing, is not JSON, or describes something this engine does not support.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a folder that holds a checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return shape_from_config(config)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Build a ModelShape from the parsed `config.json`.

    Raises:
        ConfigError: a field is missing, malformed or unsupported; the message names the field and the limit.
    """
    kind = config.get("model_type")
    if kind == "deepseek_v41":
        return _shape_v41(config)
    raise ConfigError(f"config.model_type must be 'deepseek_v41', found {kind!r}")


def _shape_v41(config: Mapping[str, Any]) -> ModelShape:
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        raise ConfigError("config.text_config is missing or not an object")
    text = _Fields(nested, "text_config")
    text.only("num_key_value_heads", 1)
    text.only("scoring_func", "sqrtsoftplus")
    text.only("topk_method", "noaux_tc")
    text.only("norm_topk_prob", True)
    text.only("hidden_act", "silu")
    text.only("attention_bias", False)
    text.only("tie_word_embeddings", False)
    num_layers = text.count("num_hidden_layers")
    head_dim = text.count("head_dim")
    rope_dim = text.count("qk_rope_head_dim")
    index_dim = text.count("index_head_dim")
    if rope_dim % 2 or rope_dim > min(head_dim, index_dim):
        limit = min(head_dim, index_dim)
        raise ConfigError(f"text_config.qk_rope_head_dim must be even and at most {limit}, found {rope_dim}")
    num_heads = text.count("num_attention_heads")
    o_groups = text.count("o_groups")
    if num_heads % o_groups:
        raise ConfigError(f"text_config.o_groups must divide the {num_heads} attention heads, found {o_groups}")
    drafter = _drafter(text, num_layers)
    num_experts = text.count("n_routed_experts")
    top_k = text.count("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"text_config.num_experts_per_tok must be at most {num_experts} experts, found {top_k}")
    engram = _engram(text, num_layers)
    vocab_size = text.count("vocab_size")
    image_token_id = config.get("image_token_id")
    return ModelShape(
        architecture="v4.1",
        vocab_size=vocab_size,
        hidden=text.count("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=text.count("q_lora_rank"),
        o_groups=o_groups,
        o_rank=text.count("o_lora_rank"),
        window=text.count("sliding_window"),
        index_heads=text.count("index_n_heads"),
        index_dim=index_dim,
        index_topk=text.count("index_topk"),
        candidate_blocks=text.count("candidate_topk_blocks") if text.has("candidate_source_layer_id") else 0,
        candidate_block_size=text.count("candidate_block_size") if text.has("candidate_source_layer_id") else 1,
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=text.count("n_shared_experts"),
        expert_width=text.count("moe_intermediate_size"),
        routed_scale=text.number("routed_scaling_factor"),
        clamp=text.number("swiglu_limit"),
        num_streams=text.count("hc_mult"),
        sinkhorn_iterations=text.count("hc_sinkhorn_iters"),
        hyper_eps=text.number("hc_eps"),
        norm_eps=text.number("rms_norm_eps"),
        rope_theta=text.number("rope_theta"),
        compress_theta=text.number("compress_rope_theta"),
        rope_scaling=_rope_scaling(text),
        max_length=text.count("max_position_embeddings"),
        bos_token_id=text.count("bos_token_id", low=0),
        eos_token_id=text.count("eos_token_id", low=0),
        pad_token_id=text.count("pad_token_id", low=0),
        image_token_id=image_token_id if isinstance(image_token_id, int) else None,
        weight_block=_weight_block(config),
        layer_roles=_roles_v41(text, num_layers, engram.layers if engram else ()),
        engram=engram,
        drafter=drafter,
    )


def _roles_v41(text: _Fields, num_layers: int, engram_layers: tuple[int, ...]) -> tuple[LayerRole, ...]:
    """Who owns and who borrows: the latest source at or before a layer serves it."""
    ratios = text.counts("compress_ratios")
    stages = text.count("num_nextn_predict_layers", low=0)
    if len(ratios) != num_layers + stages:
        found, wanted = len(ratios), num_layers + stages
        raise ConfigError(f"text_config.compress_ratios must have {wanted} entries (layers + stages), found {found}")
    if any(ratios[num_layers:]):
        raise ConfigError("text_config.compress_ratios of drafter stages must be 0")
    kv_sources = text.layers("kv_source_layer_ids", num_layers)
    index_sources = text.layers("index_source_layer_ids", num_layers)
    candidate = text.count("candidate_source_layer_id", low=0) if text.has("candidate_source_layer_id") else None
    if candidate is not None and candidate not in index_sources:
        raise ConfigError(f"text_config.candidate_source_layer_id must be an index source, found {candidate}")
    roles = []
    kv_source: int | None = None
    selection_source: int | None = None
    for index, ratio in enumerate(ratios[:num_layers]):
        if ratio == 0 and (index in kv_sources or index in index_sources):
            raise ConfigError(f"text_config.compress_ratios[{index}] must not be 0: the layer is a source")
        if index in kv_sources:
            kv_source = index
            if index not in index_sources:
                raise ConfigError(f"text_config.index_source_layer_ids must contain layer {index}: it owns new entries")
        if index in index_sources:
            selection_source = index
        if ratio and (kv_source is None or ratios[kv_source] != ratio):
            raise ConfigError(f"text_config.compress_ratios[{index}] must equal its source's ratio, found {ratio}")
        limited = candidate is not None and index in index_sources and index > candidate and kv_source == candidate
        roles.append(
            LayerRole(
                index=index,
                ratio=ratio,
                kv_source=kv_source if ratio else None,
                is_kv_source=index in kv_sources,
                selection_source=selection_source if ratio else None,
                is_index_source=index in index_sources,
                candidate_source=candidate if limited else None,
                is_candidate_source=index == candidate,
                has_engram=index in engram_layers,
            )
        )
    return tuple(roles)


def _engram(text: _Fields, num_layers: int) -> EngramShape | None:
    if not text.has("engram_layer_ids") or not text.counts("engram_layer_ids"):
        return None
    layers = text.layers("engram_layer_ids", num_layers)
    num_rows = text.counts("engram_num_embeddings")
    if len(num_rows) != len(layers):
        raise ConfigError(
            f"text_config.engram_num_embeddings must have one entry per layer ({len(layers)}), found {len(num_rows)}"
        )
    return EngramShape(
        layers=layers,
        num_rows=num_rows,
        max_ngram=text.count("engram_max_ngram_size", low=2),
        num_heads=text.count("engram_n_heads"),
        head_dim=text.count("engram_head_dim"),
        bucket_base=text.count("engram_vocab_size"),
        pad_token_id=text.count("engram_pad_token_id", low=0),
        num_classes=text.count("engram_compressed_vocab_size"),
    )


def _drafter(text: _Fields, num_layers: int) -> DrafterShape | None:
    num_stages = text.count("num_nextn_predict_layers", low=0)
    if num_stages == 0:
        return None
    target_layers = text.layers("dspark_target_layer_ids", num_layers)
    num_experts = text.count("dspark_n_routed_experts")
    top_k = text.count("dspark_num_experts_per_tok")
    if not target_layers:
        raise ConfigError("text_config.dspark_target_layer_ids must name at least one layer")
    if top_k > num_experts:
        raise ConfigError(f"text_config.dspark_num_experts_per_tok must be at most {num_experts}, found {top_k}")
    return DrafterShape(
        num_stages=num_stages,
        block_size=text.count("dspark_block_size"),
        noise_token_id=text.count("dspark_noise_token_id", low=0),
        target_layers=target_layers,
        markov_rank=text.count("dspark_markov_rank"),
        num_experts=num_experts,
        top_k=top_k,
    )


def _rope_scaling(text: _Fields) -> RopeScaling | None:
    if not text.has("rope_scaling"):
        return None
    values = text.raw("rope_scaling")
    if not isinstance(values, dict):
        raise ConfigError("text_config.rope_scaling must be an object")
    scaling = _Fields(values, "text_config.rope_scaling")
    kind = values.get("rope_type", values.get("type"))
    if kind != "yarn":
        raise ConfigError(f"text_config.rope_scaling.rope_type must be 'yarn', found {kind!r}")
    return RopeScaling(
        factor=scaling.number("factor"),
        original_length=scaling.count("original_max_position_embeddings"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
    )


def _weight_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Block of the fp8 matrices, or None for a checkpoint that says nothing (then shapes decide)."""
    section = config.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError("config.quantization_config must be an object")
    fields = _Fields(section, "quantization_config")
    fields.only("quant_method", "fp8")
    fields.only("fmt", "e4m3")
    fields.only("scale_fmt", "ue8m0")
    fields.only("expert_dtype", "fp4")
    if not fields.has("weight_block_size"):
        return None
    block = fields.counts("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise ConfigError(f"quantization_config.weight_block_size must be two positive sizes, found {list(block)}")
    return block[0], block[1]
