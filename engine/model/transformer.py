"""PagedTransformer: the incremental forward of a batch of rows over the paged arena.

One pass serves decode (n sequences x 1 row), verify (n x (k + 1)) and prefill chunks (whatever each of n prompts has
left). In each layer the rows first write what later rows may read (window rows, raw compressor rows, the entries they
close), then attend with their own visibility, so earlier rows of a pass are visible to later ones. All writes are
addressed by position and repeat harmlessly.

The property everything here serves: a row's result is the same, bit for bit, whatever else is in its pass and however
the prompt was cut. Products run on fixed tiles (tiles.py), attention on fixed sets (attention.py), element-wise work
has one rounding per operation.

`reference.py` is the truth for what is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.attention import NO_CHOICE, Candidates, Gaps, PlaceSet, attend, choose_top, rank_blocks, score_entries
from engine.model.compressor import rotate
from engine.model.engram import EngramTables
from engine.model.fused import Layer, Mixture
from engine.model.kv import Arena
from engine.model.layers import WeightMap, rope_table
from engine.model.memory import hash_rows
from engine.model.mixing import HeadCollapse
from engine.model.rows import RowBatch, StepTables, load_ids, store_ids
from engine.model.shapes import ModelShape
from engine.model.tiles import TileLinear, norm_rows, pad_rows, padded
from engine.model.watch import Watch


@dataclasses.dataclass
class Probe:
    """What a test or a tool asks to see of passes; filled in place, row numbers as in the pass.

    Attributes:
        rows_entered: per layer, rows that ran through it in full, added up over passes.
        choices: whether to fill the rest (of the latest pass).
        gaps: smallest distance to a tie per row.
        experts: per layer int64[rows, k].
        entries: per index source int64[rows, top_k], ascending; a number the row does not see is an empty place.
        blocks: int64[rows, blocks] of the candidate source; None where it had no need to choose.
    """

    rows_entered: list[int]
    choices: bool = False
    gaps: Gaps = dataclasses.field(default_factory=lambda: Gaps(torch.empty(0)))
    experts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    entries: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    blocks: Tensor | None = None


@dataclasses.dataclass
class _Pass:
    """What the layers of one pass hand down."""

    tables: StepTables
    near: PlaceSet
    far: PlaceSet | None
    whole: dict[int, PlaceSet]
    turns: dict[bool, Tensor]
    memory_rows: dict[int, Tensor]
    writes_entries: bool = True
    candidates: Candidates | None = None


@dataclasses.dataclass
class _Tail:
    """Bounded replay: the last rows of a prompt so far, as they entered the last KV source.

    Attributes:
        start: position of the first row.
        ids: int64[rows].
        lines: float32[rows, streams + 1, hidden].
        pre: float32[rows, streams].
    """

    start: int
    ids: np.ndarray
    lines: Tensor
    pre: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.pre)


class PagedTransformer:
    """The target model over an arena. Not thread-safe; one pass at a time, on one torch thread."""

    def __init__(
        self,
        shape: ModelShape,
        weights: WeightMap,
        engram: EngramTables | None,
        arena: Arena,
        *,
        max_tokens: int,
        replay_rows: int = 0,
        probe: Probe | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Fuses the weights into float32 copies.

        Args:
            shape: the model.
            weights: vendor-named tensors, experts stacked. Not kept.
            engram: hash constants; required when the model has an n-gram memory.
            arena: borrowed; written by every pass.
            max_tokens: positions that rotary tables are made for.
            replay_rows: rows before a prompt's end that run through the layers past the last KV source; 0 runs all rows
                through all layers, which is exact. An approximation otherwise (truncated windows).
            probe: filled by passes.
            mixture: evaluates the routed experts, which `weights` need not hold then. Borrowed; may be changed between
                passes.

        Raises:
            ConfigError: n-gram constants are missing, or `replay_rows` would leave decode rows a window that was never
                written, or can not be had with a `mixture`: its layers would run in another order.
        """
        if shape.engram is not None and engram is None:
            raise ConfigError("the model has an n-gram memory; pass the tables made by engram_tables")
        if 0 < replay_rows < shape.window:
            raise ConfigError(f"replay_rows must be 0 or at least the window ({shape.window}), found {replay_rows}")
        self.shape = shape
        self.arena = arena
        self.replay_rows = replay_rows
        self.probe = probe
        self.mixture = mixture
        self.watch: Watch | None = None
        """Looks at rows on their way through the layers, for the drafter."""
        self.max_chunk = arena.staging_rows - (shape.window - 1)
        self.last_source = max(shape.kv_sources, default=shape.num_layers - 1)
        if replay_rows:
            if mixture is not None:
                raise ConfigError(f"replay_rows must be 0 for ranks of a group, found {replay_rows}")
            if not shape.kv_sources:
                raise ConfigError("replay_rows needs a model with compressed entries")
            if replay_rows > self.max_chunk:
                raise ConfigError(f"replay_rows must be at most a chunk ({self.max_chunk} rows), found {replay_rows}")
            if shape.engram is not None and max(shape.engram.layers) > self.last_source:
                raise ConfigError(f"replay_rows needs every n-gram memory at or before layer {self.last_source}")
        self._engram = engram
        self._own_layers = range(shape.num_layers)
        self._ratios = tuple(sorted({role.ratio for role in shape.layer_roles if role.ratio}))
        self._selects = bool(shape.index_sources)
        # A row attends to the same number of places whatever its length, so to as many as the longest one sees.
        everything = {role.ratio for role in shape.layer_roles if role.attends_to_all}
        self._whole = {ratio: max_tokens // ratio for ratio in sorted(everything)}
        self._collapse = None if shape.shifts_pre else HeadCollapse(weights, "", shape)
        self.embed = weights["embed.weight"].float()
        self._layers = [
            Layer(weights, shape, role, arena.layout, with_experts=mixture is None) for role in shape.layer_roles
        ]
        self._head = TileLinear(weights["head.weight"].float() * weights["norm.weight"].float())
        everywhere = torch.arange(max_tokens)
        self.turns = {
            compressed: torch.complex(*rope_table(shape, everywhere, compressed=compressed))
            for compressed in (False, True)
        }
        self._tails: dict[int, _Tail] = {}

    @torch.inference_mode()
    def forward(self, batch: RowBatch, wanted: Sequence[int] | None = None) -> Tensor:
        """Run rows through all layers, writing their state.

        Args:
            batch: the rows.
            wanted: row numbers whose logits are returned; None for all.

        Returns:
            float32[wanted, vocab].

        Raises:
            ConfigError: the span does not fit the staging rows.
        """
        with np.errstate(over="ignore"):
            tables, lines, pre = self._enter(batch)
            state = self._open_pass(tables)
            if self.watch is not None:
                self.watch.open_pass(batch)
            if self.mixture is not None:
                self.mixture.open_pass(batch.positions, batch.ids)
            for layer in self._layers:
                lines, pre = self._run_layer(layer, state, lines, pre)
            if self.mixture is not None:
                self.mixture.close_pass()
            return self._logits(lines, range(batch.rows) if wanted is None else wanted)

    @torch.inference_mode()
    def forward_nothing(self) -> None:
        """A pass without rows, for a rank of a group whose peers have some: only its experts work."""
        assert self.mixture is not None
        nothing = np.empty(0, np.int64)
        with np.errstate(over="ignore"):
            self.mixture.open_pass(nothing, nothing)
            for layer in self._layers:
                layer.mix_nothing(self.mixture)
            self.mixture.close_pass()

    def settle(self) -> None:
        """See `RowModel`: nothing is under way on a CPU."""

    @torch.inference_mode()
    def forward_prompt(self, batch: RowBatch, *, last: bool, wanted: Sequence[int] | None = None) -> Tensor:
        """Run a chunk of one prompt; with `replay_rows`, only the prompt's last rows through the last layers.

        Args:
            batch: one sequence. Position 0 starts a prompt.
            last: whether the prompt ends here. Before that, a bounded replay returns no logits.
            wanted: as in `forward`; in a bounded replay these must be among the replayed rows.

        Returns:
            float32[wanted, vocab].

        Raises:
            ConfigError: the span does not fit the staging rows.
        """
        if self.replay_rows == 0:
            return self.forward(batch, wanted)
        slab, start = int(batch.slabs[0]), int(batch.starts[0])
        with np.errstate(over="ignore"):
            tables, lines, pre = self._enter(batch)
            state = self._open_pass(tables)
            for layer in self._layers[: self.last_source]:
                lines, pre = self._run_layer(layer, state, lines, pre)
            source = self._layers[self.last_source]
            self._add_memory(source, state, lines, pre)
            self._write_source(source, state, lines)
            tail = self._extend_tail(slab, start, batch.ids, lines[: batch.rows], pre[: batch.rows])
            if not last:
                return lines.new_empty((0, self.shape.vocab_size))
            del self._tails[slab]
            replayed = RowBatch(batch.slabs, np.array([tail.start]), tail.ids[None], batch.tables)
            if self.watch is not None:
                self.watch.open_pass(replayed)
            tables = StepTables(
                self.arena, self.shape.window, self._ratios, replayed, tail.start, layers=self._own_layers
            )
            state = self._open_pass(tables, with_memory=False)
            # Written already, and the ring may no longer hold the raw rows of the first entry.
            state.writes_entries = False
            lines, pre = pad_rows(tail.lines), pad_rows(torch.from_numpy(tail.pre)).numpy()
            for layer in self._layers[self.last_source :]:
                lines, pre = self._run_layer(layer, state, lines, pre)
            skipped = tail.start - start
            rows = range(batch.rows) if wanted is None else wanted
            return self._logits(lines, [row - skipped for row in rows])

    def _extend_tail(self, slab: int, start: int, ids: np.ndarray, lines: Tensor, pre: np.ndarray) -> _Tail:
        """Append a chunk to the rows kept for the replay, and forget those too far from the end."""
        tail = self._tails.get(slab)
        if tail is None or start == 0 or tail.start + tail.rows != start:
            tail = _Tail(start, ids[:0], lines[:0], pre[:0])
        joined = torch.cat((tail.lines, lines))
        both = np.concatenate((tail.pre, pre))
        dropped = max(0, len(joined) - self.replay_rows)
        held = np.concatenate((tail.ids, ids))[dropped:]
        self._tails[slab] = _Tail(tail.start + dropped, held, joined[dropped:].clone(), both[dropped:].copy())
        return self._tails[slab]

    def _enter(self, batch: RowBatch) -> tuple[StepTables, Tensor, np.ndarray]:
        """Embed the rows: tables, lines float32[padded rows, streams + 1, hidden], and the first pre."""
        if batch.span > self.max_chunk:
            raise ConfigError(f"a chunk may have at most {self.max_chunk} rows, found {batch.span}")
        tables = StepTables(self.arena, self.shape.window, self._ratios, batch, layers=self._own_layers)
        if tables.staging_rows > self.arena.staging_rows:
            raise ConfigError(
                f"the chunks of a pass need {tables.staging_rows} staging rows, there are {self.arena.staging_rows}"
            )
        ids = torch.zeros(padded(batch.rows), dtype=torch.int64)
        ids[: batch.rows] = torch.from_numpy(batch.ids)
        # Every stream starts as the embedding, and so does the first input, which is all of stream 0.
        lines = self.embed.index_select(0, ids).unsqueeze(1).repeat(1, self.shape.num_streams + 1, 1)
        pre = np.zeros((len(ids), self.shape.num_streams), np.float32)
        pre[:, 0] = 1
        if self.probe is not None and self.probe.choices:
            self.probe.gaps = Gaps(torch.full((batch.rows,), NO_CHOICE))
        return tables, lines, pre

    def _open_pass(self, tables: StepTables, *, with_memory: bool = True) -> _Pass:
        """What is shared by all layers: places, rotary rows, memory rows. Stores the pass's trailing ids."""
        shape, batch = self.shape, tables.batch
        positions = torch.from_numpy(tables.flat_positions)
        turns = {key: table.index_select(0, positions) for key, table in self.turns.items()}
        memory_rows: dict[int, Tensor] = {}
        if with_memory:
            if self._engram is not None:
                earlier = load_ids(self.arena, batch.slabs, batch.starts, self._engram.history)
                found = hash_rows(self._engram, batch, earlier)
                memory_rows = dict(zip(self._engram.layers, found, strict=True))
            store_ids(self.arena, batch)
        near = PlaceSet(self.arena, tables, shape, selected=0)
        far = PlaceSet(self.arena, tables, shape, selected=shape.index_topk) if self._selects else None
        whole = {ratio: PlaceSet(self.arena, tables, shape, selected=entries) for ratio, entries in self._whole.items()}
        return _Pass(tables, near, far, whole, turns, memory_rows)

    def _run_layer(self, layer: Layer, state: _Pass, lines: Tensor, pre: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """One whole layer: new lines, and the pre of its last sublayer."""
        rows = state.tables.batch.rows
        if self.probe is not None:
            self.probe.rows_entered[layer.role.index] += rows
        self._add_memory(layer, state, lines, pre)
        if self.watch is not None:
            self.watch.see(layer.role.index, lines, leaving=False)
        mixing = layer.mix_attn.predict(lines)
        if not self.shape.shifts_pre:
            mixing.collapse(lines)
        self._attend(layer, state, lines)
        lines = mixing.apply(lines)
        mixing = layer.mix_ffn.predict(lines)
        if not self.shape.shifts_pre:
            mixing.collapse(lines)
        self._feed_forward(layer, state.tables.batch, lines)
        lines = mixing.apply(lines)
        if self.watch is not None:
            self.watch.see(layer.role.index, lines, leaving=True)
        return lines, mixing.pre

    def _add_memory(self, layer: Layer, state: _Pass, lines: Tensor, pre: np.ndarray) -> None:
        if layer.memory is not None and layer.role.index in state.memory_rows:
            layer.memory.add(lines, state.memory_rows[layer.role.index], pre)

    def _write_source(self, layer: Layer, state: _Pass, lines: Tensor) -> None:
        """Only what the last KV source writes for the long term: its compressed entries and index keys."""
        assert layer.compressor is not None
        wide = layer.project_in(norm_rows(lines[:, -1], self.shape.norm_eps))
        at = self.shape.q_rank + self.shape.head_dim
        raw = wide[: state.tables.batch.rows, at : at + layer.raw_width + layer.key_raw_width]
        raw, key_raw = raw.tensor_split([layer.raw_width], 1)
        layer.compressor.write(self.arena, state.tables, raw, key_raw, self.turns[True])

    def _attend(self, layer: Layer, state: _Pass, lines: Tensor) -> None:
        """Attention sublayer: reads the last line of every row and overwrites it with the output."""
        shape, role, tables = self.shape, layer.role, state.tables
        rows = tables.batch.rows
        turn = state.turns[role.ratio > 0]
        at = layer.raw_width + layer.key_raw_width
        asked = layer.project(lines, turn)
        tables.write_window(role.index, asked.window_kv[:rows])
        if layer.compressor is not None and state.writes_entries:
            raw, key_raw = asked.rest[:rows, :at].tensor_split([layer.raw_width], 1)
            layer.compressor.write(self.arena, tables, raw, key_raw, self.turns[True])
        places = state.near
        if role.attends_to_all:
            places = state.whole[role.ratio]
            places.set_entries(layer.entry_plane, torch.arange(self._whole[role.ratio]).expand(rows, -1))
        elif role.ratio:
            assert state.far is not None
            places = state.far
            if role.is_index_source:
                query = asked.index_query.unflatten(1, (shape.index_heads, shape.index_dim))
                rotate(query, turn.unsqueeze(1))
                self._select(layer, state, query[:rows], asked.rest[:rows, at:])
        places.set_window(role.index)
        mixed = torch.zeros_like(asked.query, memory_format=torch.contiguous_format)
        attend(self.arena, asked.query[:rows], places, layer.sink, mixed[:rows])
        lines[:, -1] = layer.project_back(mixed, turn)

    def _select(self, layer: Layer, state: _Pass, query: Tensor, share: Tensor) -> None:
        """Choose entries for this layer and those that reuse its selection."""
        shape, role, tables = self.shape, layer.role, state.tables
        assert state.far is not None
        most = tables.max_visible[role.ratio]
        held = shape.candidate_blocks * shape.candidate_block_size
        limited = role.candidate_source is not None and state.candidates is not None
        if role.is_candidate_source:
            state.candidates = None
        if most <= shape.index_topk and not limited and not (role.is_candidate_source and most > held):
            # Everything visible is selected, whatever the scores.
            chosen = torch.arange(shape.index_topk).expand(len(query), -1)
        else:
            scores = score_entries(self.arena, tables, layer.key_plane, query, share, most)
            if limited and state.candidates is not None:
                state.candidates.restrict(scores)
            if role.is_candidate_source:
                state.candidates = self._choose_blocks(scores, tables.visible[role.ratio])
            if self.probe is not None and self.probe.choices:
                self.probe.gaps.note(scores, shape.index_topk)
            chosen = choose_top(scores, shape.index_topk)
        if self.probe is not None and self.probe.choices:
            self.probe.entries[role.index] = chosen
        state.far.set_entries(layer.entry_plane, chosen)

    def _choose_blocks(self, scores: Tensor, visible: Tensor) -> Candidates | None:
        """Candidate blocks of every row; None where all blocks are kept."""
        shape = self.shape
        ranked = rank_blocks(scores, visible, shape.candidate_block_size)
        blocks = ranked.shape[1]
        if blocks <= shape.candidate_blocks:
            return None
        if self.probe is not None and self.probe.choices:
            self.probe.gaps.note(ranked, shape.candidate_blocks)
        chosen = choose_top(ranked, shape.candidate_blocks)
        if self.probe is not None and self.probe.choices:
            self.probe.blocks = chosen
        return Candidates(chosen, blocks, shape.candidate_block_size)

    def _feed_forward(self, layer: Layer, batch: RowBatch, lines: Tensor) -> None:
        """Mixture sublayer: reads the last line of every row and overwrites it with the output."""
        choice, ranked = layer.mix_experts(lines, batch.ids, self.mixture)
        if self.probe is not None and self.probe.choices:
            self.probe.experts[layer.role.index] = choice.ids
            if ranked is not None:
                self.probe.gaps.note(torch.from_numpy(ranked), self.shape.top_k)

    def _logits(self, lines: Tensor, wanted: Sequence[int]) -> Tensor:
        if len(wanted) == 0:
            return lines.new_empty((0, self.shape.vocab_size))
        rows = torch.tensor(list(wanted))
        if self._collapse is None:
            last = pad_rows(lines[:, -1].index_select(0, rows))
        else:
            last = self._collapse(pad_rows(lines[:, :-1].index_select(0, rows)))
        return self._head(norm_rows(last, self.shape.norm_eps))[: len(wanted)]
