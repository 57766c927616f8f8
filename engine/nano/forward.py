"""The training forward: the same mathematics as `engine.model.reference`, shaped for one large GPU.

Owns the order of the regions (regions.py), the selections, and what training needs and serving does not: the loss of
the indexer on a part of the rows. It exists beside the reference because the reference, written to be read, is several
times slower here: attention over whole masks, no region that a compiler can take. Tests hold values, index loss and
gradients equal to the reference's.

Invariants: sequence length is a multiple of the window. Streams are kept in `stream_dtype`. The indexer sees detached
inputs: its loss moves nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.engram import EngramTables, folded_context, table_rows
from engine.model.hyper import first_pre
from engine.model.layers import Rotary, WeightMap, rope_table
from engine.model.shapes import LayerRole, ModelShape
from engine.nano.regions import COMPRESS, INDEX, KEYS, MEMORY, MIX, OUTPUT, PROJECT, make_regions
from engine.nano.sinkhorn import sinkhorn


@dataclass
class Pass:
    """What one forward gives back.

    Attributes:
        hidden: float[N, hidden], normed, ready for the head.
        features: float[N, targets * hidden], the drafter's context, detached; no columns when not asked for.
        index_loss: float32 scalar, sum over index sources; zero when not asked for.
        loads: float32[layers, experts], rows per expert.
        index_gap: index source -> its own loss, detached.
    """

    hidden: Tensor
    features: Tensor
    index_loss: Tensor
    loads: Tensor
    index_gap: dict[int, Tensor] = field(default_factory=dict)


class Forward:
    """The forward of one shape on one device.

    Args:
        shape: the model.
        tables: constants of its n-gram memory.
        device: where tokens and weights live.
        compiled: compile the regions.
        stream_dtype: dtype of the residual streams.
    """

    def __init__(
        self,
        shape: ModelShape,
        tables: EngramTables | None,
        device: torch.device,
        *,
        compiled: bool,
        stream_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape
        self.tables = tables
        self.device = device
        self.stream_dtype = stream_dtype
        self._rope: dict[tuple[int, int, bool], Rotary] = {}
        self._plain = make_regions(shape)
        self.regions = (
            {name: torch.compile(fn, dynamic=False) for name, fn in self._plain.items()} if compiled else self._plain
        )

    def rope(self, length: int, step: int, compressed: bool) -> Rotary:
        """Tables at positions 0, step, 2 * step ..: [length, rope_dim / 2]."""
        key = (length, step, compressed)
        if key not in self._rope:
            positions = torch.arange(length, device=self.device) * step
            self._rope[key] = rope_table(self.shape, positions, compressed=compressed)
        return self._rope[key]

    def trunk(
        self,
        weights: WeightMap,
        tokens: Tensor,
        *,
        select: bool,
        index_rows: int = 0,
        features: bool = False,
        random_index: bool = False,
    ) -> Pass:
        """All layers and the final norm.

        Args:
            weights: vendor-named tensors with stacked experts.
            tokens: int64[batch, length].
            select: attend to the indexer's choice; otherwise to every visible entry.
            index_rows: sequences of the batch that the indexer learns from.
            features: keep the drafter's context.
            random_index: choose entries by chance (an evaluation of what the indexer is worth).
        """
        shape, run = self.shape, self.regions
        batch, length = tokens.shape
        n, d = shape.num_streams, shape.hidden
        streams = F.embedding(tokens.reshape(-1), weights["embed.weight"]).to(self.stream_dtype)
        streams = streams.unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = first_pre(streams)
        context = folded_context(self.tables, tokens) if self.tables is not None else None
        kept: list[Tensor] = []
        loads: list[Tensor] = []
        groups: list[_Selection] = []
        entries: Tensor | None = None
        keys: Tensor | None = None
        for role in shape.layer_roles:
            i = role.index
            if role.has_engram:
                assert self.tables is not None and context is not None
                rows = table_rows(self.tables, i, context)
                table = weights[f"layers.{i}.engram.embed.weight"]
                memory = F.embedding(rows, table).flatten(-2).flatten(0, 1)
                streams = run["memory"](streams, memory, *_named(weights, f"layers.{i}.engram", MEMORY))
            if features and shape.drafter is not None and i in shape.drafter.target_layers:
                kept.append(streams.float().mean(1).to(self.stream_dtype).detach())
            prefix = f"layers.{i}.attn"
            x, next_pre, post, logits = run["enter"](
                streams, pre, weights[f"layers.{i}.attn_norm.weight"], *_hyper(weights, f"layers.{i}.hc_attn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            x = x.view(batch, length, d)
            rope = self.rope(length, 1, role.ratio > 0)
            q, low, window = run["project"](x, *rope, *_named(weights, prefix, PROJECT))
            if role.is_kv_source:
                at = self.rope(length // role.ratio, role.ratio, True)
                gate = weights.get(f"{prefix}.compressor.wgate.weight")
                entries, latent = run["compress"](x, *at, gate, *_named(weights, prefix, COMPRESS))
                keys = run["keys"](latent.detach(), *at, *_named(weights, prefix, KEYS))
            if role.is_index_source:
                assert keys is not None
                candidates = groups[-1].candidates if role.candidate_source is not None else None
                groups.append(_Selection(role, x.detach(), low.detach(), keys, candidates))
                if select:
                    groups[-1].choose(self, weights, random_index)
            sink = weights[f"{prefix}.attn_sink"]
            if role.ratio == 0:
                o = run["attend"](q, window, sink, None, None, 0)
            else:
                assert entries is not None
                o = run["attend"](q, window, sink, entries, groups[-1].allowed, role.ratio)
                if index_rows:
                    k = index_rows
                    with torch.no_grad():
                        groups[-1].masses.append(run["mass"](q[:k], window[:k], sink, entries[:k], role.ratio))
            y = run["output"](o, *rope, *_named(weights, prefix, OUTPUT))
            streams = run["leave"](streams, y.reshape(-1, d), post, mix)
            x, final_pre, post, logits = run["enter"](
                streams, next_pre, weights[f"layers.{i}.ffn_norm.weight"], *_hyper(weights, f"layers.{i}.hc_ffn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            y, load = run["mix"](x, shape.top_k, *_named(weights, f"layers.{i}.ffn", MIX))
            loads.append(load)
            streams = run["leave"](streams, y, post, mix)
            pre = final_pre
        hidden = run["finish"](streams, pre, weights["norm.weight"])
        losses = {group.role.index: group.loss(self, weights, index_rows) for group in groups} if index_rows else {}
        return Pass(
            hidden=hidden,
            features=torch.cat(kept, -1) if kept else hidden.new_empty(hidden.shape[0], 0),
            index_loss=sum(losses.values(), hidden.new_zeros((), dtype=torch.float32)),
            loads=torch.stack(loads),
            index_gap={layer: value.detach() for layer, value in losses.items()},
        )

    def nll(self, weights: WeightMap, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood float32[N] of int64[N] targets."""
        losses: Tensor = self.regions["nll"](hidden, weights["head.weight"], targets)
        return losses

    def draft(self, weights: WeightMap, features: Tensor, tokens: Tensor, anchors: Tensor) -> Draft:
        """Run the drafter over blocks that start at `anchors`; equal to `engine.model.drafter.forward_blocks`.

        Args:
            weights: vendor-named tensors.
            features: float[N, targets * hidden] of `trunk`, detached.
            tokens: int64[batch, length].
            anchors: int64[batch, A], at most length - block - 1.
        """
        # Never compiled: the rows are few, and regions compiled for them would cost more time than they save.
        shape, run = self.shape, self._plain
        drafter = shape.drafter
        assert drafter is not None
        n, d, block, window = shape.num_streams, shape.hidden, drafter.block_size, shape.window
        batch, length = tokens.shape
        count = batch * anchors.shape[1]
        main = run["context"](features, weights["mtp.0.main_proj.weight"], weights["mtp.0.main_norm.weight"])
        main = main.view(batch, length, d)
        reach = anchors.unsqueeze(-1) + torch.arange(-window, 0, device=tokens.device)
        seen = (reach >= 0).view(count, window)
        at = (torch.arange(batch, device=tokens.device).view(-1, 1, 1) * length + reach.clamp(min=0)).view(
            count, window
        )
        positions = (anchors.unsqueeze(-1) + torch.arange(block, device=tokens.device)).view(count, block)
        everywhere = self.rope(length, 1, False)
        own = (everywhere[0][positions], everywhere[1][positions])
        rows = torch.full_like(positions, drafter.noise_token_id)
        rows[:, 0] = tokens.gather(1, anchors).view(-1)
        streams = F.embedding(rows.view(-1), weights["embed.weight"]).to(self.stream_dtype)
        streams = streams.unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = first_pre(streams)
        loads = []
        for stage in range(drafter.num_stages):
            prefix = f"mtp.{stage}.attn"
            entry = run["entry"](
                main, *everywhere, weights[f"{prefix}.wkv.weight"], weights[f"{prefix}.kv_norm.weight"]
            )
            context = entry.reshape(batch * length, -1)[at]
            x, next_pre, post, logits = run["enter"](
                streams, pre, weights[f"mtp.{stage}.attn_norm.weight"], *_hyper(weights, f"mtp.{stage}.hc_attn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            q, _, window_kv = run["project"](x.view(count, block, d), *own, *_named(weights, prefix, PROJECT))
            o = run["attend_block"](q, window_kv, context, seen, weights[f"{prefix}.attn_sink"])
            y = run["output"](o, *own, *_named(weights, prefix, OUTPUT))
            streams = run["leave"](streams, y.reshape(-1, d), post, mix)
            x, pre, post, logits = run["enter"](
                streams, next_pre, weights[f"mtp.{stage}.ffn_norm.weight"], *_hyper(weights, f"mtp.{stage}.hc_ffn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            y, load = run["mix"](x, drafter.top_k, *_named(weights, f"mtp.{stage}.ffn", MIX))
            loads.append(load)
            streams = run["leave"](streams, y, post, mix)
        last = f"mtp.{drafter.num_stages - 1}"
        batch_row = torch.arange(batch, device=tokens.device).repeat_interleave(anchors.shape[1]).view(-1, 1)
        previous = tokens[batch_row, positions].view(-1)
        logits, confidence = run["speak"](
            streams,
            pre,
            previous,
            weights[f"{last}.norm.weight"],
            weights["head.weight"],
            weights[f"{last}.markov_head.embed.weight"],
            weights[f"{last}.markov_head.head.weight"],
            weights[f"{last}.confidence_head.proj.weight"],
        )
        return Draft(logits, confidence, torch.stack(loads))


@dataclass
class Draft:
    """A teacher-forced drafting pass, rows flattened: R = batch * anchors * block.

    Attributes:
        logits: float[R, vocab], Markov bias included.
        confidence: float32[R], logit of the chance of acceptance.
        loads: float32[stages, experts].
    """

    logits: Tensor
    confidence: Tensor
    loads: Tensor


class _Selection:
    """The choice of one index source, the attention mass of the layers that use it, and its loss.

    Args:
        role: the source.
        x: float[B, L, hidden], its attention's input, detached.
        low: float[B, L, q_rank], its low-rank query, detached.
        keys: float[B, W, index_dim].
        candidates: bool[B, L, W] of an earlier source, for one that chooses among them.
    """

    def __init__(self, role: LayerRole, x: Tensor, low: Tensor, keys: Tensor, candidates: Tensor | None) -> None:
        self.role, self.x, self.low, self.keys, self.candidates = role, x, low, keys, candidates
        self.allowed: Tensor | None = None
        self.masses: list[Tensor] = []

    def choose(self, forward: Forward, weights: WeightMap, random_index: bool) -> None:
        """Fill `allowed` and, at a candidate source, `candidates`."""
        with torch.no_grad():
            if random_index:
                scores = torch.rand(*self.x.shape[:2], self.keys.shape[1], device=self.x.device)
            else:
                scores = forward.regions["scores"](self.low, self.x, self.keys, *self._named(forward, weights))
            self.allowed = forward.regions["choose"](scores, self.candidates, self.role.ratio)
            if self.role.is_candidate_source:
                self.candidates = forward.regions["candidates"](scores, self.role.ratio)

    def loss(self, forward: Forward, weights: WeightMap, rows: int) -> Tensor:
        """Divergence of the indexer's choice from the mean mass of its layers over the first `rows` sequences."""
        target = sum(self.masses[1:], self.masses[0]) / len(self.masses)
        cos, sin, *named = self._named(forward, weights)
        gap: Tensor = forward.regions["index_loss"](
            self.low[:rows], self.x[:rows], self.keys[:rows], cos, sin, target, self.role.ratio, *named
        )
        return gap

    def _named(self, forward: Forward, weights: WeightMap) -> list[Tensor]:
        rope = forward.rope(self.x.shape[1], 1, True)
        return [*rope, *_named(weights, f"layers.{self.role.index}.attn", INDEX)]


def _named(weights: WeightMap, prefix: str, names: tuple[str, ...]) -> list[Tensor]:
    return [weights[f"{prefix}.{name}"] for name in names]


def _hyper(weights: WeightMap, prefix: str) -> list[Tensor]:
    return [weights[f"{prefix}_{name}"] for name in ("fn", "base", "scale")]
