"""RowBatch: the host-side arithmetic of one pass, from positions and page tables to row numbers in the arena.

A pass computes consecutive positions of several sequences: one of each in a decode step, k + 1 in a verify step, as
many as each has left in a prefill step. Rows are numbered sequence by sequence. Everything here is integer arithmetic
on numpy, done once per pass and shared by all layers; `StepTables` turns it into the tensors that layers index with.

Two ways to see the window: up to SPARE_ROWS positions at a time, rows go into the rings first and are read back from
there ("ringed"); a longer span would overwrite ring rows that its own first rows still need, so every sequence of such
a pass is laid out behind its look-back in the arena's staging rows, and only its last rows go to the rings ("staged").
Both read the same numbers in the same order.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.kv import ID_RING, SPARE_ROWS, Arena, Plane, Pool
from engine.model.tiles import padded

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """The rows of one pass.

    Attributes:
        slabs: int64[sequences].
        starts: int64[sequences], position of each sequence's first row.
        tokens: int64[sequences, span]; a sequence with fewer rows fills the front of its line.
        tables: int64[sequences, pages], page ids in order; padded with any valid page id where shorter.
        counts: int64[sequences], rows of each sequence; None where all have `span`.
    """

    slabs: Ints
    starts: Ints
    tokens: Ints
    tables: Ints
    counts: Ints | None = None

    @property
    def sequences(self) -> int:
        return len(self.slabs)

    @property
    def span(self) -> int:
        """Most rows of a sequence."""
        return int(self.tokens.shape[1])

    @functools.cached_property
    def spans(self) -> Ints:
        """int64[sequences], rows of each sequence."""
        return np.full(self.sequences, self.span) if self.counts is None else self.counts

    @functools.cached_property
    def rows(self) -> int:
        return int(self.spans.sum())

    @functools.cached_property
    def firsts(self) -> Ints:
        """int64[sequences], number of each sequence's first row."""
        return np.cumsum(self.spans) - self.spans

    @functools.cached_property
    def owner(self) -> Ints:
        """int64[rows], the sequence of each row."""
        return np.repeat(np.arange(self.sequences), self.spans)

    @functools.cached_property
    def positions(self) -> Ints:
        """int64[rows]."""
        return np.arange(self.rows) + (self.starts - self.firsts)[self.owner]

    @functools.cached_property
    def ids(self) -> Ints:
        """int64[rows]."""
        if self.counts is None:
            return self.tokens.ravel()
        return self.tokens[np.arange(self.span) < self.counts[:, None]]

    def last_rows(self, count: int) -> Ints:
        """int64[n], numbers of the rows that are among the last `count` of their sequence."""
        if self.span <= count:
            return np.arange(self.rows)
        return np.nonzero(np.arange(self.rows) >= (self.firsts + self.spans - count)[self.owner])[0]


class Closing:
    """The entries of one ratio that rows of a pass close.

    Attributes:
        rows: int64[closing], numbers of the closing rows.
        first: int64[closing], position of each entry's first token.
    """

    def __init__(self, batch: RowBatch, ratio: int, page_tokens: int) -> None:
        self.rows: Ints = np.nonzero((batch.positions + 1) % ratio == 0)[0]
        last = batch.positions[self.rows]
        entry = last // ratio
        self.first: Ints = entry * ratio
        per_page = page_tokens // ratio
        self._page: Ints = batch.tables[batch.owner[self.rows], entry // per_page]
        self._within: Ints = entry % per_page

    def __len__(self) -> int:
        return len(self.rows)

    def entry_places(self, arena: Arena, plane: Plane) -> Tensor:
        """int64[closing], row numbers of the entries."""
        first, stride = arena.entry_row(plane)
        return torch.from_numpy(first + self._page * stride + self._within)

    def key_places(self, arena: Arena, plane: Plane, width: int) -> Tensor:
        """int64[closing, width], cells of the index keys."""
        first, stride = arena.key_cell(plane)
        keys = first + self._page * stride + self._within
        return torch.from_numpy(keys[:, None] + np.arange(width) * plane.rows)


class StepTables:
    """Row numbers of one pass.

    Attributes:
        batch: the rows.
        flat_positions: int64[rows padded to tiles]; padding rows stand at position 0.
        staged: whether the window goes through the staging rows.
        staging_rows: how many of those it takes.
        visible: per ratio, int64[rows, 1] entries that each row sees.
        closing: per ratio, the entries that rows close.
        window_bias: float32[rows, window], 0 where the window row exists, else -inf.
    """

    def __init__(self, arena: Arena, window: int, ratios: tuple[int, ...], batch: RowBatch, floor: int = 0) -> None:
        """Does the arithmetic.

        Args:
            arena: where rows are.
            window: tokens a row sees, itself included.
            ratios: compression ratios of the model.
            batch: the rows.
            floor: lowest position that has window rows; above 0 in a bounded replay, which starts with none.
        """
        self.batch = batch
        self._arena = arena
        self._window = window
        layout = arena.layout
        flat = batch.positions
        self.flat_positions = np.zeros(padded(len(flat)), np.int64)
        self.flat_positions[: len(flat)] = flat
        self.staged = batch.span > SPARE_ROWS
        self.staging_rows = 0
        self.visible = {ratio: torch.from_numpy((flat[:, None] + 1) // ratio) for ratio in ratios}
        self.max_visible = {ratio: int(flat.max() + 1) // ratio for ratio in ratios}
        self.closing = {ratio: Closing(batch, ratio, layout.page_tokens) for ratio in ratios}

        seen = flat[:, None] + np.arange(1 - window, 1)
        self.window_bias = torch.from_numpy(np.where(seen >= floor, np.float32(0), np.float32(-np.inf)))
        _, slab_stride = arena.window_row(0)
        ring = layout.ring
        base = (batch.slabs * slab_stride)[batch.owner]
        if self.staged:
            # Every sequence's look-back, as far as there is one, and then its rows.
            behind = np.clip(batch.starts - floor, 0, window - 1)
            begins = np.cumsum(behind + batch.spans) - batch.spans
            self.staging_rows = int(behind.sum()) + batch.rows
            back = np.arange(behind.max(), 0, -1)
            sequence, place = np.nonzero(back <= behind[:, None])
            self._past_at = arena.staging_row + begins[sequence] - back[place]
            self._past = (batch.slabs * slab_stride)[sequence] + (batch.starts[sequence] - back[place]) % ring
            self._staging_at = arena.staging_row + np.arange(batch.rows) + (begins - batch.firsts)[batch.owner]
            reads = np.where(seen >= floor, self._staging_at[:, None] + np.arange(1 - window, 1), arena.zero_row)
            self._staging_read = torch.from_numpy(reads)
            kept = batch.last_rows(ring)
            self._kept = torch.from_numpy(kept)
            self._ring_write = base[kept] + flat[kept] % ring
        else:
            self._ring_write = base + flat % ring
            firsts = np.array([arena.window_row(layer)[0] for layer in range(layout.window_layers)])
            reads = np.where(seen >= floor, base[:, None] + seen % ring + firsts[:, None, None], arena.zero_row)
            self._ring_read = torch.from_numpy(reads)

    def window_reads(self, layer: int, out: Tensor) -> None:
        """Write int64[rows, window] row numbers, oldest first, into `out`. In a staged pass they are every layer's."""
        out.copy_(self._staging_read if self.staged else self._ring_read[layer])

    def write_window(self, layer: int, window_kv: Tensor) -> None:
        """Store float[rows, head_dim] window rows; in a staged pass lay out the staging rows as well."""
        first, _ = self._arena.window_row(layer)
        table = self._arena.rows
        window_kv = window_kv.to(table.dtype)
        if self.staged:
            past = table.index_select(0, torch.from_numpy(first + self._past))
            table.index_copy_(0, torch.from_numpy(self._past_at), past)
            table.index_copy_(0, torch.from_numpy(self._staging_at), window_kv)
            window_kv = window_kv.index_select(0, self._kept)
        table.index_copy_(0, torch.from_numpy(first + self._ring_write), window_kv)

    def pool_rows(self, pool: Pool, raw: Tensor) -> Tensor:
        """Store raw compressor rows and return those of every entry that is closed.

        Args:
            pool: the ring.
            raw: float32[rows, width].

        Returns:
            float32[closing, pooled, width], each entry's rows, oldest first. Rows before position 0 hold anything.
        """
        arena, batch, pooled = self._arena, self.batch, pool.pooled
        table = arena.raw[pool.width]
        first, stride = arena.pool_row(pool)
        flat, owner = batch.positions, batch.owner
        slot = first + batch.slabs * stride
        closing = self.closing[pool.ratio].rows
        back = np.arange(1 - pooled, 1)
        if not self.staged:
            table.index_copy_(0, torch.from_numpy(slot[owner] + flat % pool.ring), raw)
            reads = slot[owner[closing], None] + (flat[closing, None] + back) % pool.ring
            return table.index_select(0, torch.from_numpy(reads.ravel())).view(-1, pooled, pool.width)
        past = batch.starts[:, None] + back[:-1]
        # What a clamped read returns is not used: it would stand before position 0.
        places = slot[:, None] + np.maximum(past, 0) % pool.ring
        joined = torch.cat((table.index_select(0, torch.from_numpy(places.ravel())), raw))
        # Every sequence's `pooled - 1` rows before its first stand in front, sequence by sequence; then all rows.
        place = (closing - batch.firsts[owner[closing]])[:, None] + back
        inside = past.size + closing[:, None] + back
        reads = np.where(place >= 0, inside, (owner[closing, None] + 1) * (pooled - 1) + place)
        kept = batch.last_rows(pool.ring)
        places = slot[owner[kept]] + flat[kept] % pool.ring
        table.index_copy_(0, torch.from_numpy(places), raw.index_select(0, torch.from_numpy(kept)))
        return joined.index_select(0, torch.from_numpy(reads.ravel())).view(-1, pooled, pool.width)

    def entry_rows(self, plane: Plane) -> Tensor:
        """int64[sequences, pages], the row number of the plane's first entry in every page of the tables."""
        first, stride = self._arena.entry_row(plane)
        return torch.from_numpy(first + self.batch.tables * stride)


def load_ids(arena: Arena, slabs: Ints, starts: Ints, history: int) -> Ints:
    """The ids just before each sequence's first row: int64[sequences, history], -1 where there is none."""
    first, stride = arena.id_cell()
    past = starts[:, None] + np.arange(-history, 0)
    cells = first + slabs[:, None] * stride + past % ID_RING
    ids = arena.ints.numpy()[cells].astype(np.int64)
    return np.where(past >= 0, ids, -1)


def store_ids(arena: Arena, batch: RowBatch) -> None:
    """Keep each sequence's trailing ids for later passes."""
    first, stride = arena.id_cell()
    kept = batch.last_rows(ID_RING)
    cells = first + batch.slabs[batch.owner[kept]] * stride + batch.positions[kept] % ID_RING
    arena.ints.numpy()[cells] = batch.ids[kept]
