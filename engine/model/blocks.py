"""BlockProposer: the block drafter (DSpark) on the paged path; `drafter.py` is the truth for what it computes.

A block has the anchor in row 0 and noise tokens after it, at the anchor's position and the ones that follow. Its rows
see the context entries of the `window` positions before the anchor, and each other: these own rows are nobody's state
and never reach a slab. The context comes from features of the target, row by row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.attention import BLOCK_BYTES, SET_ALIGN
from engine.model.checkpoint import markov_names
from engine.model.compressor import rotate
from engine.model.drafting import DRAFT_PART, Ints, Pick, Proposal, make_stage_role, pick_likeliest, take_turns
from engine.model.fused import Layer
from engine.model.layers import WeightMap
from engine.model.mixing import HeadCollapse
from engine.model.shapes import DrafterShape
from engine.model.tiles import TileLinear, norm_rows, pad_rows, padded
from engine.model.transformer import PagedTransformer
from engine.model.watch import Watch

CONFIDENCE_COLUMNS = 8


class BlockProposer:
    """See the module and `drafting.Proposer`."""

    def __init__(self, model: PagedTransformer, weights: WeightMap, drafter: DrafterShape) -> None:
        """Fuses the stages' weights into float32 copies, and makes the model show the features.

        Args:
            model: borrowed; its `mixture` evaluates the stages' experts if it has one.
            weights: vendor-named tensors with `mtp.*`. Not kept.

        Raises:
            ConfigError: with a bounded replay, a feature would not be there for every row that is replayed.
        """
        shape = model.shape
        if model.replay_rows and min(drafter.target_layers) < model.last_source:
            raise ConfigError(
                f"replay_rows needs the drafter's features at or after layer {model.last_source}, they are of layers "
                f"{list(drafter.target_layers)}"
            )
        self._model = model
        self._drafter = drafter
        stages = range(drafter.num_stages)
        self._stages = [
            Layer(
                weights, shape, make_stage_role(shape, stage), model.arena.layout,
                with_experts=model.mixture is None, stage=stage,
            )
            for stage in stages
        ]  # fmt: skip
        self._main = TileLinear(weights["mtp.0.main_proj.weight"])
        wkv = torch.cat([weights[f"mtp.{stage}.attn.wkv.weight"].float() for stage in stages])
        self._context = TileLinear(wkv * weights["mtp.0.main_norm.weight"].float())
        last = f"mtp.{drafter.num_stages - 1}"
        self._collapse = None if shape.shifts_pre else HeadCollapse(weights, f"{last}.", shape)
        self._head = TileLinear(weights["head.weight"].float() * weights[f"{last}.norm.weight"].float())
        before, after = markov_names(shape)
        self._markov = weights[before].float()
        self._bias = TileLinear(weights[after])
        # One column alone would be a product of another kind, whose rows are not alike.
        confidence = weights[f"{last}.confidence_head.proj.weight"].float()
        self._confidence = TileLinear(torch.nn.functional.pad(confidence, (0, 0, 0, CONFIDENCE_COLUMNS - 1)))
        self._watch = Watch(
            drafter.target_layers, leaving=drafter.takes_leaving, averages=True, ring=model.arena.layout.ring
        )
        model.watch = self._watch

    @property
    def max_drafts(self) -> int:
        """See `Proposer.max_drafts`."""
        return self._drafter.block_size

    @torch.inference_mode()
    def keep(self, counts: Ints | None, nexts: Ints, *, reopens: bool = False) -> None:
        """See `Proposer.keep`. Context entries depend on their own row only."""
        seen = self._watch.take(counts)
        if seen is None or not len(seen.rows):
            return
        shape, arena = self._model.shape, self._model.arena
        batch, rows = seen.batch, len(seen.rows)
        main = norm_rows(self._main(pad_rows(seen.values)), shape.norm_eps)
        wide = self._context(main)
        positions = np.zeros(len(wide), np.int64)
        positions[:rows] = batch.positions[seen.rows]
        turn = take_turns(self._model.turns[False], positions)
        slabs = batch.slabs[batch.owner[seen.rows]]
        for stage, columns in zip(self._stages, wide.split(shape.head_dim, 1), strict=True):
            entries = norm_rows(columns, shape.norm_eps, stage.kv_norm)
            rotate(entries, turn)
            first, stride = arena.window_row(stage.role.index)
            places = first + slabs * stride + positions[:rows] % arena.layout.ring
            arena.rows.index_copy_(0, torch.from_numpy(places), entries[:rows].to(arena.rows.dtype))

    @torch.inference_mode()
    def propose(
        self, slabs: Ints, anchors: Ints, positions: Ints, count: int, *, pick: Pick | None = None, rounds: int = 0
    ) -> Proposal:
        """See `Proposer.propose`."""
        count = min(count, self._drafter.block_size)
        mixture, n = self._model.mixture, len(slabs)
        places = (positions[:, None] + np.arange(count)).ravel()
        ids = np.full((n, count), self._drafter.noise_token_id, np.int64)
        ids[:, 0] = anchors
        with np.errstate(over="ignore"):
            if mixture is not None:
                mixture.open_pass(places, ids.ravel(), DRAFT_PART)
            if n:
                hidden = self._run(slabs, positions, places, ids)
            elif mixture is not None:
                for stage in self._stages:
                    stage.mix_nothing(mixture)
            if mixture is not None:
                mixture.close_pass()
            if not n:
                return Proposal(ids, np.zeros((0, count), np.float32))
            return self._draw(hidden.view(n, count, -1), anchors, positions, pick or pick_likeliest)

    def _run(self, slabs: Ints, anchors_at: Ints, places: Ints, ids: Ints) -> Tensor:
        """All stages over the rows of all blocks: float32[n * count, hidden], collapsed, before the norm."""
        model, shape, rows = self._model, self._model.shape, ids.size
        padding = padded(rows) - rows
        flat = np.pad(ids.ravel(), (0, padding))
        turn = take_turns(model.turns[False], np.pad(places, (0, padding)))
        lines = model.embed.index_select(0, torch.from_numpy(flat)).unsqueeze(1).repeat(1, shape.num_streams + 1, 1)
        before = anchors_at[:, None] + np.arange(-shape.window, 0)
        for stage in self._stages:
            mixing = stage.mix_attn.predict(lines)
            if not shape.shifts_pre:
                mixing.collapse(lines)
            self._attend(stage, lines, turn, slabs, before, ids.shape[1])
            lines = mixing.apply(lines)
            mixing = stage.mix_ffn.predict(lines)
            if not shape.shifts_pre:
                mixing.collapse(lines)
            stage.mix_experts(lines, flat[:rows], model.mixture)
            lines = mixing.apply(lines)
        if self._collapse is None:
            return lines[:rows, -1]
        return self._collapse(lines[:, :-1])[:rows]

    def _attend(self, stage: Layer, lines: Tensor, turn: Tensor, slabs: Ints, before: Ints, count: int) -> None:
        """Attention sublayer over a set of one size: the context before the anchor, the block, the sink, padding."""
        arena, heads = self._model.arena, self._model.shape.num_heads
        n, window = before.shape
        asked = stage.project(lines, turn)
        own = asked.window_kv[: n * count].view(n, count, -1)
        query = asked.query[: n * count].reshape(n, count * heads, -1)
        first, stride = arena.window_row(stage.role.index)
        reads = np.where(before >= 0, (first + slabs * stride)[:, None] + before % arena.layout.ring, arena.zero_row)
        places = -(-(window + count + 1) // SET_ALIGN) * SET_ALIGN
        bias = torch.full((n, 1, places), -torch.inf)
        bias[:, 0, :window] = torch.from_numpy(np.where(before >= 0, np.float32(0), np.float32(-np.inf)))
        bias[:, 0, window : window + count] = 0
        mixed = torch.zeros_like(asked.query, memory_format=torch.contiguous_format)
        out = mixed[: n * count].view(n, count * heads, -1)
        block = max(1, BLOCK_BYTES // (places * own.shape[2] * 4))
        for low in range(0, n, block):
            part = slice(low, min(n, low + block))
            some = part.stop - low
            kv = torch.zeros((some, places, own.shape[2]))
            kv[:, :window] = arena.rows.index_select(0, torch.from_numpy(reads[part].ravel())).view(some, window, -1)
            kv[:, window : window + count] = own[part]
            logits = torch.bmm(query[part], kv.transpose(1, 2)).add_(bias[part])
            logits.view(some, count, heads, places)[..., window + count] = stage.sink
            torch.bmm(logits.softmax(-1), kv, out=out[part])
        lines[:, -1] = stage.project_back(mixed, turn)

    def _draw(self, hidden: Tensor, anchors: Ints, positions: Ints, pick: Pick) -> Proposal:
        """Tokens one after the other, each biasing the next row; hidden float32[n, count, hidden]."""
        n, count, width = hidden.shape
        base = self._head(norm_rows(pad_rows(hidden.reshape(n * count, width)), self._model.shape.norm_eps))
        base = base[: n * count].view(n, count, -1)
        tokens = np.empty((n, count), np.int64)
        confidence = np.empty((n, count), np.float32)
        previous = anchors
        for row in range(count):
            embedded = pad_rows(self._markov.index_select(0, torch.from_numpy(previous)))
            logits = base[:, row] + self._bias(embedded)[:n]
            joined = torch.cat((pad_rows(hidden[:, row]), embedded), -1)
            # In float64, whose exponentials may differ in the last bit by where a number stands.
            confidence[:, row] = 1 / (1 + np.exp(-self._confidence(joined)[:n, 0].double().numpy()))
            previous = tokens[:, row] = pick(logits, positions + row + 1)
        return Proposal(tokens, confidence)
