"""ModelShape: every size and layer role of one model, read from the vendor's config.json.

Owns the translation from the vendor's field names to ours and the rules that make a configuration valid.
Does not own tensors (checkpoint.py) and does not import torch. A ModelShape is immutable; layers, experts and
positions count from 0.

Two architectures are accepted: V4 (Flash, Pro) and the text part of V4.1. What differs between them is said here, in
layer roles and a few switches of ModelShape; code that runs a model asks those and never for a name.
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
        selection_source: layer whose top-k selection this one uses; None when it has no entries or attends to all that
            are visible.
        is_index_source: this layer scores entries with its own index queries.
        candidate_source: layer whose candidate blocks limit this layer's scoring; None for no limit.
        is_candidate_source: this layer publishes candidate blocks.
        has_engram: an n-gram memory is added to the streams that enter this layer.
        overlaps: an entry pools its own group of tokens and the one before it, each with a half of its own.
        is_hashed: experts are looked up by token id instead of being scored.
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
    overlaps: bool = False
    is_hashed: bool = False

    @property
    def attends_to_all(self) -> bool:
        """Every visible entry is attended to; nothing is selected."""
        return self.ratio > 0 and self.selection_source is None

    @property
    def pooled_tokens(self) -> int:
        """Tokens whose raw rows make one entry."""
        return self.ratio * (2 if self.overlaps else 1)


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
        target_layers: target layers whose streams are the features, ascending.
        takes_leaving: these streams are taken after the layer; before it otherwise.
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
    takes_leaving: bool = False


@dataclass(frozen=True)
class ModelShape:
    """All sizes of one model. Widths are in channels, lengths in tokens.

    Attributes that are switches between the architectures:
        norms_query: each head of the query is normed, without a weight.
        shifts_pre: a sublayer is collapsed with the pre of the sublayer before it, and the head with the last one's;
            otherwise with its own, and the head with coefficients of its own (`hc_head`).
        biases_gates: compressor gates get a bias by position in the group (`ape`).
        pools_keys: index keys are pooled by a compressor of their own; otherwise projected from the pooled entry.
        has_image_bias: routers have a second bias, for image tokens.
        num_predict_layers: layers that predict one token more from the target's streams (MTP).
    """

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
    norms_query: bool = False
    shifts_pre: bool = True
    biases_gates: bool = False
    pools_keys: bool = False
    has_image_bias: bool = True
    num_predict_layers: int = 0

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layers that own compressed entries, ascending."""
        return tuple(role.index for role in self.layer_roles if role.is_kv_source)

    @property
    def index_sources(self) -> tuple[int, ...]:
        """Layers that select entries, ascending."""
        return tuple(role.index for role in self.layer_roles if role.is_index_source)

    @property
    def key_sources(self) -> tuple[int, ...]:
        """Layers that own index keys, ascending: KV sources whose entries are selected from."""
        return tuple(layer for layer in self.kv_sources if not self.layer_roles[layer].attends_to_all)

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
        return (self.num_layers + self.num_draft_layers) * self.window * entry_bytes

    @property
    def num_draft_layers(self) -> int:
        """Window-only layers beside the target's: stages of the block drafter, or layers that predict ahead."""
        return self.drafter.num_stages if self.drafter else self.num_predict_layers


class _Fields:
    """Typed reads from one JSON object; every error names the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    @property
    def where(self) -> str:
        """Name of the object, for errors about several of its fields."""
        return self._where

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
        nested = config.get("text_config")
        if not isinstance(nested, dict):
            raise ConfigError("config.text_config is missing or not an object")
        return _shape(config, _Fields(nested, "text_config"), is_v41=True)
    if kind == "deepseek_v4":
        return _shape(config, _Fields(config, "config"), is_v41=False)
    raise ConfigError(f"config.model_type must be 'deepseek_v41' or 'deepseek_v4', found {kind!r}")


def _shape(config: Mapping[str, Any], text: _Fields, *, is_v41: bool) -> ModelShape:
    """Both architectures. `text` holds the sizes: the whole file in V4, a part of it in V4.1."""
    where = text.where
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
        raise ConfigError(f"{where}.qk_rope_head_dim must be even and at most {limit}, found {rope_dim}")
    num_heads = text.count("num_attention_heads")
    o_groups = text.count("o_groups")
    if num_heads % o_groups:
        raise ConfigError(f"{where}.o_groups must divide the {num_heads} attention heads, found {o_groups}")
    num_experts = text.count("n_routed_experts")
    top_k = text.count("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"{where}.num_experts_per_tok must be at most {num_experts} experts, found {top_k}")
    drafter, num_predict_layers = _draft_layers(text, num_layers, (num_experts, top_k), is_v41=is_v41)
    ratios = _ratios(text, num_layers)
    engram = _engram(text, num_layers) if is_v41 else None
    if is_v41:
        roles = _roles_v41(text, ratios, engram.layers if engram else ())
    else:
        roles = _roles_v4(text, ratios)
    eos_token_id = text.count("eos_token_id", low=0)
    has_candidates = is_v41 and text.has("candidate_source_layer_id")
    vocab_size = text.count("vocab_size")
    image_token_id = config.get("image_token_id")
    return ModelShape(
        architecture="v4.1" if is_v41 else "v4",
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
        candidate_blocks=text.count("candidate_topk_blocks") if has_candidates else 0,
        candidate_block_size=text.count("candidate_block_size") if has_candidates else 1,
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
        eos_token_id=eos_token_id,
        # V4 names none, and nothing in it reads one.
        pad_token_id=text.count("pad_token_id", low=0) if is_v41 or text.has("pad_token_id") else eos_token_id,
        image_token_id=image_token_id if isinstance(image_token_id, int) else None,
        weight_block=_weight_block(config),
        layer_roles=roles,
        engram=engram,
        drafter=drafter,
        norms_query=not is_v41,
        shifts_pre=is_v41,
        biases_gates=not is_v41,
        pools_keys=not is_v41,
        has_image_bias=is_v41,
        num_predict_layers=num_predict_layers,
    )


def _ratios(text: _Fields, num_layers: int) -> tuple[int, ...]:
    """Tokens per entry of the target's layers."""
    ratios = text.counts("compress_ratios")
    stages = text.count("num_nextn_predict_layers", low=0)
    # A V4 file without drafter weights may keep the entry of the layer that it left out.
    spare = 1 if stages == 0 and len(ratios) == num_layers + 1 else 0
    if len(ratios) != num_layers + stages + spare:
        found, wanted = len(ratios), num_layers + stages
        raise ConfigError(f"{text.where}.compress_ratios must have {wanted} entries (layers + stages), found {found}")
    if any(ratios[num_layers:]):
        raise ConfigError(f"{text.where}.compress_ratios of drafter stages must be 0")
    return ratios[:num_layers]


OVERLAPPING_RATIO = 4
"""V4: layers with so many tokens per entry select among overlapping entries; those with more attend to all."""


def _roles_v4(text: _Fields, ratios: tuple[int, ...]) -> tuple[LayerRole, ...]:
    """Each layer owns what it attends to."""
    hashed = text.count("num_hash_layers", low=0) if text.has("num_hash_layers") else 0
    roles = []
    for index, ratio in enumerate(ratios):
        if 0 < ratio < OVERLAPPING_RATIO:
            raise ConfigError(
                f"{text.where}.compress_ratios[{index}] must be 0 or at least {OVERLAPPING_RATIO}, found {ratio}"
            )
        selects = ratio == OVERLAPPING_RATIO
        roles.append(
            LayerRole(
                index=index,
                ratio=ratio,
                kv_source=index if ratio else None,
                is_kv_source=ratio > 0,
                selection_source=index if selects else None,
                is_index_source=selects,
                candidate_source=None,
                is_candidate_source=False,
                has_engram=False,
                overlaps=selects,
                is_hashed=index < hashed,
            )
        )
    return tuple(roles)


def _roles_v41(text: _Fields, ratios: tuple[int, ...], engram_layers: tuple[int, ...]) -> tuple[LayerRole, ...]:
    """Who owns and who borrows: the latest source at or before a layer serves it."""
    num_layers = len(ratios)
    kv_sources = text.layers("kv_source_layer_ids", num_layers)
    index_sources = text.layers("index_source_layer_ids", num_layers)
    candidate = text.count("candidate_source_layer_id", low=0) if text.has("candidate_source_layer_id") else None
    if candidate is not None and candidate not in index_sources:
        raise ConfigError(f"text_config.candidate_source_layer_id must be an index source, found {candidate}")
    roles = []
    kv_source: int | None = None
    selection_source: int | None = None
    for index, ratio in enumerate(ratios):
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


def _draft_layers(
    text: _Fields, num_layers: int, experts: tuple[int, int], *, is_v41: bool
) -> tuple[DrafterShape | None, int]:
    """The block drafter, or how many layers predict ahead. `experts`: the target's number of them and top-k."""
    num_stages = text.count("num_nextn_predict_layers", low=0)
    if num_stages == 0:
        return None, 0
    if not is_v41 and not text.has("dspark_block_size"):
        if num_stages > 1:
            raise ConfigError(
                f"{text.where}.num_nextn_predict_layers must be 0 or 1 without dspark, found {num_stages}"
            )
        return None, num_stages
    target_layers = text.layers("dspark_target_layer_ids", num_layers)
    num_experts, top_k = experts
    if is_v41:
        num_experts, top_k = text.count("dspark_n_routed_experts"), text.count("dspark_num_experts_per_tok")
    if not target_layers:
        raise ConfigError(f"{text.where}.dspark_target_layer_ids must name at least one layer")
    if top_k > num_experts:
        raise ConfigError(f"{text.where}.dspark_num_experts_per_tok must be at most {num_experts}, found {top_k}")
    drafter = DrafterShape(
        num_stages=num_stages,
        block_size=text.count("dspark_block_size"),
        noise_token_id=text.count("dspark_noise_token_id", low=0),
        target_layers=target_layers,
        markov_rank=text.count("dspark_markov_rank"),
        num_experts=num_experts,
        top_k=top_k,
        takes_leaving=not is_v41,
    )
    return drafter, 0


def _rope_scaling(text: _Fields) -> RopeScaling | None:
    if not text.has("rope_scaling"):
        return None
    values = text.raw("rope_scaling")
    if not isinstance(values, dict):
        raise ConfigError(f"{text.where}.rope_scaling must be an object")
    scaling = _Fields(values, f"{text.where}.rope_scaling")
    kind = values.get("rope_type", values.get("type"))
    if kind != "yarn":
        raise ConfigError(f"{text.where}.rope_scaling.rope_type must be 'yarn', found {kind!r}")
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
