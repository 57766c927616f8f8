"""Attention over a fixed set: choosing entries by index score, and attending to window, selection and sink.

Every row attends to the same number of places: `window` ring rows, oldest first, `top_k` selected entries in ascending
order, one sink and padding; places without content read a row of zeros and get a logit of -inf. So a row is computed by
calls of one size, whatever its length, its batch or its chunk. The sink is a place with value zero whose logit is
learned: that *is* a term in the denominator only.

Scores are computed page by page, with calls of one page's size. Equal scores go to the lowest index everywhere.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.kv import Arena, Plane
from engine.model.rows import StepTables
from engine.model.shapes import ModelShape

BLOCK_BYTES = 1 << 20
"""Gathered entries of so many bytes are attended to at a time: what stays in the second-level cache."""
SET_ALIGN = 16
"""Places of a set are padded to a whole number of vectors."""
NO_CHOICE = 1e9


@dataclasses.dataclass
class Gaps:
    """Smallest distance to a tie among the choices of each row: float32[rows], NO_CHOICE where there was none."""

    smallest: Tensor

    def note(self, ranked: Tensor, top_k: int) -> None:
        """Take in a choice of `top_k` from float32[rows, n]; -inf never competes."""
        if ranked.shape[-1] <= top_k:
            return
        best = ranked.topk(top_k + 1, -1).values
        gap = torch.where(best[:, -1].isneginf(), NO_CHOICE, best[:, -2] - best[:, -1])
        self.smallest = torch.minimum(self.smallest, gap)


def choose_top(scores: Tensor, count: int) -> Tensor:
    """The best `count` finite scores of each row; equal scores go to the lowest index.

    Args:
        scores: float32[rows, n], -inf where an index may not be chosen.
        count: places to fill.

    Returns:
        int64[rows, count], ascending, n where a place stays empty.
    """
    values = scores.numpy()
    rows, n = values.shape
    kept = values > -np.inf
    if n > count:
        # numpy selects with vector instructions: 8 times faster than torch.topk at 64 of 4,096.
        edge: npt.NDArray[np.float32] = np.partition(values, n - count, axis=1)[:, n - count, None]
        kept &= values >= edge
        # More than `count` only where several scores equal the edge: drop the last of those.
        surplus = np.count_nonzero(kept, axis=1) - count
        for row in np.nonzero(surplus > 0)[0].tolist():
            level = np.nonzero(values[row] == edge[row])[0]
            kept[row, level[-int(surplus[row]) :]] = False
    # One flat search is several times faster than one over two dimensions.
    at = np.flatnonzero(kept)
    owner, column = np.divmod(at, n)
    firsts = np.searchsorted(owner, np.arange(rows))
    chosen = np.full((rows, count), n, np.int64)
    chosen[owner, np.arange(len(at)) - firsts[owner]] = column
    return torch.from_numpy(chosen)


def score_entries(arena: Arena, tables: StepTables, plane: Plane, query: Tensor, share: Tensor, limit: int) -> Tensor:
    """Index scores of every row against its sequence's entries.

    Args:
        arena: holds the keys.
        tables: the pass.
        plane: the index keys.
        query: float32[rows, heads, index_dim], rotated.
        share: float32[rows, heads], the heads' weights.
        limit: entries to score, at least what any row sees.

    Returns:
        float32[rows, whole pages of entries >= limit], -inf where not visible.
    """
    batch = tables.batch
    pages = -(-limit // plane.rows)
    page_ids = torch.from_numpy(batch.tables[:, :pages].ravel())
    keys = arena.read_keys(plane, page_ids).float().view(batch.sequences, pages, -1, plane.rows)
    if batch.span == 1:
        scores = _score_by_row(keys, query, share)
    else:
        scores = _score_by_page(keys, query, share, tables, plane.ratio)
    hidden = torch.arange(scores.shape[1]) >= tables.visible[plane.ratio]
    # Rows of a page that were never written may hold anything, NaN included: they are all hidden.
    return scores.masked_fill_(hidden, -torch.inf)


def _score_by_row(keys: Tensor, query: Tensor, share: Tensor) -> Tensor:
    """One row per sequence: all pages of some rows in one batch of page-sized products."""
    rows, pages, width, page_rows = keys.shape
    heads = query.shape[1]
    block = max(1, BLOCK_BYTES // (heads * pages * page_rows * 4))
    parts = []
    for low in range(0, rows, block):
        part = slice(low, low + block)
        asked = query[part].unsqueeze(1).expand(-1, pages, -1, -1).reshape(-1, heads, width)
        weights = share[part].unsqueeze(1).expand(-1, pages, -1).reshape(-1, 1, heads)
        match = torch.bmm(asked, keys[part].view(-1, width, page_rows)).relu_()
        parts.append(torch.bmm(weights, match).view(-1, pages * page_rows))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _score_by_page(keys: Tensor, query: Tensor, share: Tensor, tables: StepTables, ratio: int) -> Tensor:
    """Several rows per sequence: the same products page by page, the rows of a sequence sharing its keys."""
    _, pages, width, page_rows = keys.shape
    rows, heads = query.shape[:2]
    scores = query.new_full((rows, pages, page_rows), -torch.inf)
    weights = share.unsqueeze(1)
    visible = tables.visible[ratio]
    block = max(1, BLOCK_BYTES // (heads * page_rows * 4))
    owner = torch.from_numpy(tables.batch.owner)
    for page in range(pages):
        if not tables.staged:
            # A verify step: few rows of many sequences, so a copy of the keys is cheaper than a product for each.
            match = torch.bmm(query, keys[:, page].index_select(0, owner)).relu_()
            scores[:, page] = torch.bmm(weights, match)[:, 0]
            continue
        for sequence, (first, count) in enumerate(zip(tables.batch.firsts, tables.batch.spans, strict=True)):
            page_keys = keys[sequence, page].expand(block, width, page_rows)
            for low in range(first, first + count, block):
                part = slice(low, min(first + count, low + block))
                if int(visible[part.stop - 1]) <= page * page_rows:
                    continue
                match = torch.bmm(query[part], page_keys[: part.stop - part.start]).relu_()
                scores[part, page] = torch.bmm(weights[part], match)[:, 0]
    return scores.flatten(1)


def rank_blocks(scores: Tensor, visible: Tensor, size: int) -> Tensor:
    """Rank of each block of `size` neighbouring entries; the newest visible block always stays.

    Args:
        scores: float32[rows, entries], -inf where not visible.
        visible: int64[rows, 1], entries each row sees.
        size: entries in a block.

    Returns:
        float32[rows, blocks], the block's best score, inf for the newest block.
    """
    rows, entries = scores.shape
    blocks = -(-entries // size)
    padding = blocks * size - entries
    if padding:
        scores = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    ranked = scores.view(rows, blocks, size).amax(-1)
    newest = torch.div(visible - 1, size, rounding_mode="floor")
    return ranked.masked_fill_(torch.arange(blocks) == newest, torch.inf)


@dataclasses.dataclass
class Candidates:
    """Blocks that limit later index sources: int64[rows, blocks], ascending, `count` for an empty place."""

    blocks: Tensor
    count: int
    size: int

    def restrict(self, scores: Tensor) -> Tensor:
        """Set float32[rows, entries] to -inf outside the blocks, in place."""
        kept = torch.zeros((scores.shape[0], self.count + 1), dtype=torch.bool)
        kept.scatter_(1, self.blocks, True)
        allowed = kept[:, : self.count].repeat_interleave(self.size, 1)[:, : scores.shape[1]]
        return scores.masked_fill_(~allowed, -torch.inf)


class PlaceSet:
    """What the rows of a pass attend to: row numbers in the arena and their bias.

    Attributes:
        reads: int64[rows, places].
        bias: float32[rows, 1, places].
        sink: the sink's place.
    """

    def __init__(self, arena: Arena, tables: StepTables, shape: ModelShape, *, selected: int) -> None:
        """Lay out window, `selected` places for entries (0 in window-only layers), sink and padding."""
        self._window = shape.window
        self.sink = shape.window + selected
        places = -(-(self.sink + 1) // SET_ALIGN) * SET_ALIGN
        rows = tables.batch.rows
        self.reads = torch.full((rows, places), arena.zero_row)
        self.bias = torch.full((rows, 1, places), -torch.inf)
        self.bias[:, 0, : self._window] = tables.window_bias
        self._tables = tables
        self._arena = arena
        self._settled = False

    def set_window(self, layer: int) -> None:
        """Point the window places at a layer's rows."""
        if not (self._settled and self._tables.staged):
            self._tables.window_reads(layer, self.reads[:, : self._window])
            self._settled = True

    def set_entries(self, plane: Plane, chosen: Tensor) -> None:
        """Point the entry places at chosen entries of a plane.

        Args:
            plane: the entries.
            chosen: int64[rows, selected], ascending; a number the row does not see marks an empty place.
        """
        tables = self._tables
        absent = chosen >= tables.visible[plane.ratio]
        inside = chosen.masked_fill(absent, 0)
        page_rows = tables.entry_rows(plane)
        if tables.batch.span > 1:
            page_rows = page_rows.index_select(0, torch.from_numpy(tables.batch.owner))
        reads = page_rows.gather(1, inside // plane.rows).add_(inside % plane.rows)
        part = slice(self._window, self.sink)
        self.reads[:, part] = reads.masked_fill_(absent, self._arena.zero_row)
        self.bias[:, 0, part].zero_().masked_fill_(absent, -torch.inf)


def attend(arena: Arena, query: Tensor, places: PlaceSet, sink: Tensor, out: Tensor) -> None:
    """Attention of every row over its places.

    Args:
        arena: holds the rows.
        query: float32[rows, heads, head_dim], rotated and scaled.
        places: the set.
        sink: float32[heads], logits of the sink.
        out: float32[rows, heads, head_dim], written; still rotated.
    """
    rows, _, width = query.shape
    count = places.reads.shape[1]
    block = max(1, BLOCK_BYTES // (count * width * 4))
    for low in range(0, rows, block):
        part = slice(low, min(rows, low + block))
        reads = places.reads[part]
        kv = arena.rows.index_select(0, reads.flatten()).float().view(len(reads), count, width)
        logits = torch.bmm(query[part], kv.transpose(1, 2)).add_(places.bias[part])
        logits[:, :, places.sink] = sink
        torch.bmm(logits.softmax(-1), kv, out=out[part])
