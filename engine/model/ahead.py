"""AheadProposer: the layer that predicts ahead (MTP) on the paged path; `predictor.py` is the truth for it.

Slot p needs the target's streams at position p and the token of p + 1. Its window row depends on nothing else, so that
row is all that has to be kept, and no expert works for it. When a slot is made:

- its token is in the same pass (a prompt's next id, an accepted draft), or the pass has drawn it: at the pass's end.
  So the last slot of a prompt, whose token is the first one sampled, is in the slab before the slab is handed over.
- the token comes with a prompt's next chunk: the streams wait in the slab (`Arena.streams`), and that chunk's pass
  makes the slot.

The streams of a sequence's last position stay in the slab: drafting begins with that slot, in full, and goes on with
the layer's own streams and tokens. Slots of drafts are written into the ring too, where slots of real tokens overwrite
them before any of those is read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.model.attention import PlaceSet, attend
from engine.model.drafting import DRAFT_PART, Ints, Pick, Proposal, make_stage_role, pick_likeliest, take_turns
from engine.model.fused import Layer
from engine.model.kv import SPARE_ROWS
from engine.model.layers import WeightMap
from engine.model.mixing import HeadCollapse
from engine.model.rows import RowBatch, StepTables
from engine.model.tiles import TileLinear, norm_rows, pad_rows, padded
from engine.model.transformer import PagedTransformer
from engine.model.watch import Watch

PREFIX = "mtp.0"


class AheadProposer:
    """See the module and `drafting.Proposer`."""

    def __init__(self, model: PagedTransformer, weights: WeightMap) -> None:
        """Fuses the layer's weights into float32 copies, and makes the model show its streams.

        Args:
            model: borrowed; its `mixture` evaluates the layer's experts if it has one.
            weights: vendor-named tensors with `mtp.0.*`. Not kept.
        """
        shape = model.shape
        self._model = model
        self._layer = Layer(
            weights, shape, make_stage_role(shape, 0), model.arena.layout, with_experts=model.mixture is None, stage=0
        )
        before, after = (weights[f"{PREFIX}.{name}.weight"].float() for name in ("hnorm", "enorm"))
        self._from_streams = TileLinear(weights[f"{PREFIX}.h_proj.weight"].float() * before)
        self._from_token = TileLinear(weights[f"{PREFIX}.e_proj.weight"].float() * after)
        self._collapse = HeadCollapse(weights, f"{PREFIX}.", shape)
        self._head = TileLinear(weights["head.weight"].float() * weights[f"{PREFIX}.norm.weight"].float())
        self._watch = Watch((shape.num_layers - 1,), leaving=True, averages=False, ring=model.arena.layout.ring)
        model.watch = self._watch

    @property
    def max_drafts(self) -> int:
        """See `Proposer.max_drafts`: a ring has no room for more."""
        return SPARE_ROWS - 1

    @torch.inference_mode()
    def keep(self, counts: Ints | None, nexts: Ints, *, reopens: bool = False) -> None:
        """See `Proposer.keep`."""
        seen = self._watch.take(counts)
        if seen is None or not len(seen.rows):
            return
        arena, batch, rows = self._model.arena, seen.batch, seen.rows
        owner = batch.owner[rows]
        slabs, positions = batch.slabs[owner], batch.positions[rows]
        is_end = rows == seen.ends[owner]
        tokens = np.where(is_end, nexts[owner], batch.ids[np.minimum(rows + 1, batch.rows - 1)])
        known = tokens >= 0
        streams, ends = seen.values[torch.from_numpy(known)], seen.values[torch.from_numpy(is_end)]
        slabs, positions, tokens = slabs[known], positions[known], tokens[known]
        if reopens and not self._model.replay_rows:
            # A ring that the pass goes round has no place for them.
            lengths = seen.ends - batch.firsts + 1
            open_ones = np.flatnonzero((batch.starts > 0) & (lengths < arena.layout.ring))
            streams = torch.cat((_read_streams(self._model, batch.slabs[open_ones]), streams))
            slabs = np.concatenate((batch.slabs[open_ones], slabs))
            positions = np.concatenate((batch.starts[open_ones] - 1, positions))
            tokens = np.concatenate((batch.ids[batch.firsts[open_ones]], tokens))
        with np.errstate(over="ignore"):
            self._write_slots(slabs, positions, tokens, streams)
        arena.streams[torch.from_numpy(batch.slabs)] = ends.flatten(1)

    @torch.inference_mode()
    def propose(
        self, slabs: Ints, anchors: Ints, positions: Ints, count: int, *, pick: Pick | None = None, rounds: int = 0
    ) -> Proposal:
        """See `Proposer.propose`."""
        count = min(count, self.max_drafts)
        mixture, n = self._model.mixture, len(slabs)
        drafts = np.empty((n, count), np.int64)
        streams, tokens, slots = _read_streams(self._model, slabs), anchors, positions - 1
        choose = pick or pick_likeliest
        with np.errstate(over="ignore"):
            for row in range(max(rounds, count) if mixture is not None else count):
                has_rows = n > 0 and row < count
                if mixture is not None:
                    some = slice(None) if has_rows else slice(0, 0)
                    mixture.open_pass(slots[some], tokens[some], DRAFT_PART)
                if has_rows:
                    logits, streams = self._run(RowBatch(slabs, slots, tokens[:, None], _no_pages(n)), streams)
                    tokens = drafts[:, row] = choose(logits, slots + 2)
                    slots = slots + 1
                elif mixture is not None:
                    self._layer.mix_nothing(mixture)
            if mixture is not None:
                mixture.close_pass()
        return Proposal(drafts)

    def _enter(self, streams: Tensor, tokens: Ints) -> Tensor:
        """Lines that slots enter the layer with: float32[padded rows, streams + 1, hidden]; the last is unset.

        Args:
            streams: float32[rows, streams, hidden].
            tokens: int64[rows].
        """
        shape = self._model.shape
        held = pad_rows(streams)
        ids = torch.from_numpy(np.pad(tokens, (0, len(held) - len(tokens))))
        after = self._from_token(norm_rows(self._model.embed.index_select(0, ids), shape.norm_eps))
        before = norm_rows(held, shape.norm_eps).view(-1, shape.hidden)
        lines = held.new_zeros((len(held), shape.num_streams + 1, shape.hidden))
        lines[:, :-1] = self._from_streams(before).view(len(held), shape.num_streams, -1)
        lines[:, :-1] += after.unsqueeze(1)
        return lines

    def _write_slots(self, slabs: Ints, positions: Ints, tokens: Ints, streams: Tensor) -> None:
        """Only the window rows of slots."""
        rows, arena = len(tokens), self._model.arena
        if not rows:
            return
        lines = self._enter(streams, tokens)
        self._layer.mix_attn.predict(lines).collapse(lines)
        turn = take_turns(self._model.turns[False], np.pad(positions, (0, padded(rows) - rows)))
        _, window_kv = self._layer.project_window(lines, turn)
        first, stride = arena.window_row(self._layer.role.index)
        places = first + slabs * stride + positions % arena.layout.ring
        arena.rows.index_copy_(0, torch.from_numpy(places), window_kv[:rows].to(arena.rows.dtype))

    def _run(self, batch: RowBatch, streams: Tensor) -> tuple[Tensor, Tensor]:
        """One slot of each sequence in full: logits float32[n, vocab], its own streams float32[n, streams, hidden]."""
        model, shape, layer, rows = self._model, self._model.shape, self._layer, batch.rows
        number = layer.role.index
        tables = StepTables(model.arena, shape.window, (), batch, layers=range(number, number + 1))
        turn = take_turns(model.turns[False], tables.flat_positions)
        lines = self._enter(streams, batch.ids)
        mixing = layer.mix_attn.predict(lines)
        mixing.collapse(lines)
        asked = layer.project(lines, turn)
        tables.write_window(number, asked.window_kv[:rows])
        places = PlaceSet(model.arena, tables, shape, selected=0)
        places.set_window(number)
        mixed = torch.zeros_like(asked.query, memory_format=torch.contiguous_format)
        attend(model.arena, asked.query[:rows], places, layer.sink, mixed[:rows])
        lines[:, -1] = layer.project_back(mixed, turn)
        lines = mixing.apply(lines)
        mixing = layer.mix_ffn.predict(lines)
        mixing.collapse(lines)
        layer.mix_experts(lines, batch.ids, model.mixture)
        lines = mixing.apply(lines)
        hidden = norm_rows(self._collapse(lines[:, :-1]), shape.norm_eps)
        return self._head(hidden)[:rows], lines[:rows, :-1]


def _no_pages(sequences: int) -> Ints:
    return np.empty((sequences, 0), np.int64)


def _read_streams(model: PagedTransformer, slabs: Ints) -> Tensor:
    """float32[n, streams, hidden], a copy of what the slabs hold."""
    shape = model.shape
    return model.arena.streams[torch.from_numpy(slabs)].unflatten(1, (shape.num_streams, shape.hidden))
