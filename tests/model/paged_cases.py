"""Models, arenas and short cuts that the tests of the paged path share.

`random_model` makes a random-weight model of the bundled one's kind; `write_checkpoint` writes one with a tokenizer, so
that the whole way from a checkpoint directory can be tested where no trained weights are needed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.checkpoint import tensor_specs
from engine.model.engram import EngramTables, engram_tables
from engine.model.kv import Arena, KvDtype, plan_layout
from engine.model.layers import WeightMap
from engine.model.rows import RowBatch
from engine.model.shapes import ModelShape, shape_from_config
from engine.model.transformer import PagedTransformer, Probe

ORACLE = Path(__file__).parent.parent / "oracle"
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a paged model is made from."""

    shape: ModelShape
    weights: WeightMap
    tables: EngramTables | None


def small_v4_config() -> dict[str, Any]:
    """The same for V4: the fast golden model's configuration with window 20, top-k 12, 16 experts top-4, no drafter."""
    config: dict[str, Any] = json.loads((ORACLE / "v4-tiny-fast" / "config.json").read_text())
    config.update(
        vocab_size=320,
        sliding_window=20,
        index_topk=12,
        n_routed_experts=16,
        num_experts_per_tok=4,
        num_nextn_predict_layers=0,
        compress_ratios=config["compress_ratios"][:5],
    )
    return config


def small_config() -> dict[str, Any]:
    """The tiny golden model's configuration with roomier sets: window 20, top-k 12, 16 experts top-4."""
    config: dict[str, Any] = json.loads((ORACLE / "v41-tiny" / "config.json").read_text())
    config["text_config"].update(
        vocab_size=320,
        sliding_window=20,
        index_topk=12,
        candidate_topk_blocks=7,
        n_routed_experts=16,
        num_experts_per_tok=4,
        engram_compressed_vocab_size=320,
        dspark_noise_token_id=319,
    )
    config["image_token_id"] = 318
    return config


def random_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Random tensors under the vendor's names, one per expert, of magnitudes that keep activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, spec in tensor_specs(shape).items():
        if spec.store == "ids":
            drawn = torch.rand((spec.shape[0], shape.num_experts), generator=generator)
            weights[name] = drawn.topk(spec.shape[1]).indices
            continue
        drawn = torch.randn(spec.shape, generator=generator)
        if len(spec.shape) >= 2:
            drawn /= spec.shape[-1] ** 0.5
        if name.endswith("norm.weight"):
            drawn = 1 + 0.1 * drawn
        weights[name] = drawn
    return weights


def random_model(seed: int = 0, config: dict[str, Any] | None = None) -> Source:
    """A random model, in memory; of `small_config` if none is given."""
    shape = shape_from_config(small_config() if config is None else config)
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in random_weights(shape, seed).items():
        parts = name.split(".experts.")
        if len(parts) == 2:
            number, matrix, _ = parts[1].split(".")
            experts.setdefault(f"{parts[0]}.experts.{matrix}", {})[int(number)] = tensor
        else:
            stacked[name] = tensor
    for name, by_number in experts.items():
        stacked[name] = torch.stack([by_number[number] for number in sorted(by_number)])
    tables = engram_tables(shape, np.arange(shape.vocab_size)) if shape.engram is not None else None
    return Source(shape, stacked, tables)


def write_checkpoint(directory: Path, seed: int = 0) -> None:
    """A random model as a vendor would ship it: config.json, model.safetensors, tokenizer.json."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = small_config()
    shape = shape_from_config(config)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in random_weights(shape, seed).items()},
        directory / "model.safetensors",
    )
    vocabulary = {f"w{token}": token for token in range(shape.vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(directory / "tokenizer.json"))


def smallest_page(shape: ModelShape) -> int:
    """Tokens of a page that every ratio divides."""
    return math.lcm(8, *(role.ratio for role in shape.layer_roles if role.ratio))


def make_model(
    source: Source,
    *,
    page_tokens: int | None = None,
    pages: int = 96,
    slabs: int = 8,
    chunk: int = 320,
    max_tokens: int = 512,
    replay_rows: int = 0,
    poison: bool = True,
    dtype: KvDtype = "float32",
    choices: bool = False,
) -> PagedTransformer:
    """A paged model over an arena of its own, poisoned unless told otherwise. Pages are as small as they may be."""
    if page_tokens is None:
        page_tokens = smallest_page(source.shape)
    arena = Arena(
        plan_layout(source.shape, page_tokens, dtype), pages, slabs, chunk + source.shape.window - 1, poison=poison
    )
    probe = Probe([0] * source.shape.num_layers, choices=choices)
    return PagedTransformer(
        source.shape, source.weights, source.tables, arena, max_tokens=max_tokens, replay_rows=replay_rows, probe=probe
    )


@dataclasses.dataclass
class Sequence:
    """One sequence on one model: its slab, its pages, and how to run stretches of it."""

    model: PagedTransformer
    slab: int
    pages: Ints

    def batch(self, ids: Ints, start: int) -> RowBatch:
        return RowBatch(np.array([self.slab]), np.array([start]), ids[None], self.pages[None])

    def run(self, ids: Ints, start: int = 0) -> Tensor:
        """Logits of every row of ids at positions start.."""
        return self.model.forward(self.batch(ids, start))

    def run_chunks(self, ids: Ints, sizes: list[int]) -> Tensor:
        """Logits of all rows, computed in chunks of the given sizes, the last one repeated to the end."""
        parts, start, sizes = [], 0, list(sizes)
        while start < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            parts.append(self.run(ids[start : start + size], start))
            start += size
        return torch.cat(parts)


def open_sequence(model: PagedTransformer, length: int, *, slab: int = 0, seed: int = 0) -> Sequence:
    """A sequence on shuffled pages; different seeds share no page while they ask for at most a quarter of them."""
    page_tokens, total = model.arena.layout.page_tokens, model.arena.num_pages
    count = -(-length // page_tokens)
    order = np.random.default_rng(99).permutation(total)
    first = seed % 4 * (total // 4)
    assert count <= total // 4 or seed == 0
    return Sequence(model, slab, order[first : first + count].astype(np.int64))


def join(batches: list[RowBatch]) -> RowBatch:
    """Several sequences in one pass."""
    widest = max(batch.tables.shape[1] for batch in batches)
    tables = np.zeros((len(batches), widest), np.int64)
    spans = np.array([batch.span for batch in batches])
    tokens = np.zeros((len(batches), spans.max()), np.int64)
    for index, batch in enumerate(batches):
        tables[index, : batch.tables.shape[1]] = batch.tables[0]
        tokens[index, : batch.span] = batch.tokens[0]
    return RowBatch(
        np.concatenate([batch.slabs for batch in batches]),
        np.concatenate([batch.starts for batch in batches]),
        tokens,
        tables,
        None if len(set(spans.tolist())) == 1 else spans,
    )


def random_ids(length: int, vocab: int, seed: int = 0) -> Ints:
    """int64[length], from 3 upwards and clear of special ids."""
    return np.random.default_rng(seed).integers(3, vocab - 3, length).astype(np.int64)
