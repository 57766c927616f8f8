"""Steps that consist of exchanges between two ranks, and what must come of them, computed from what NCCL gathers.

A part of `exchange_two_ranks.py`.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from engine.model.nvlink import NvlinkRows
from kernels import reference
from kernels.forms import PairSums
from kernels.mailbox import MailboxLayout

HIDDEN, TOP_K, EXPERTS = 4096, 6, 256
LAYERS = 3


@triton.jit
def _nap_kernel(durations, index):
    """Holds the stream up for so many nanoseconds."""
    began = globaltimer()
    limit = tl.load(durations + index)
    while globaltimer() - began < limit:
        pass


class Inputs:
    """Rows of a step of each rank, and what must come of them."""

    def __init__(
        self, rank: int, counts: tuple[int, int], rows: int, layout: MailboxLayout, seed: int, is_routed: bool
    ) -> None:
        device = torch.device("cuda", rank)
        generator = torch.Generator(device).manual_seed(10 * seed + rank)
        own = counts[rank]
        shape = (LAYERS, rows, HIDDEN)
        x = torch.randn(shape, generator=generator, device=device).bfloat16()
        ids = torch.rand((LAYERS, rows, EXPERTS), generator=generator, device=device).topk(TOP_K, -1).indices
        ids = ids.sort(-1).values.int()
        if own > 4:
            ids[:, own - 1] = -1
        weights = torch.rand((LAYERS, rows, TOP_K), generator=generator, device=device)
        base = torch.randn(shape, generator=generator, device=device).bfloat16()
        self.own = tuple(part[:, :own].contiguous() for part in (x, ids, weights, base))
        gathered = []
        for part in (x, ids, weights):
            both = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(both, part)
            gathered.append(both)
        self.joined, self.sums = [], []
        for layer in range(LAYERS):
            lists = [[part[r][layer, : counts[r]] for r in range(2)] for part in gathered]
            joined_by_rank = []
            for member in range(2):
                kept = lists[1]
                if is_routed:
                    kept = [reference.keep_ids(kept[r], table_of(r, device), member) for r in range(2)]
                joined_by_rank.append(reference.dispatch_rows(lists[0], kept, lists[2], rows, narrow=layout.narrow))
            joined = joined_by_rank[rank]
            parts = [reference.add_pairs(make_pairs(*joined_by_rank[member], member, is_routed)) for member in range(2)]
            mine = slice(rank * rows, rank * rows + own)
            own_parts = [part[mine] for part in parts]
            sums = reference.combine_rows(
                own_parts, rank, lists[1][rank], self.own[3][layer], torch.bfloat16, layout.part_type
            )
            self.joined.append(joined)
            self.sums.append(sums)


def table_of(rank: int, device: torch.device) -> Tensor:
    """Where a rank's rows are computed if they go to some ranks only: here, as with replicas, but for every eighth."""
    return torch.where(torch.arange(EXPERTS, device=device) % 8 == 0, 1 - rank, rank).int()


def make_pairs(x: Tensor, ids: Tensor, weights: Tensor, rank: int, is_routed: bool) -> PairSums:
    """In place of experts: products that tell by their bits which row, place and rank they are of."""
    experts = torch.arange(EXPERTS, device=x.device)
    table = torch.where((experts % 2 == rank) | is_routed, 0, -1).int()
    factor = torch.where(ids >= 0, weights * (1.0 + ids.float() / 64.0), 0.0)
    # What was never put may be any number.
    rows = torch.where((ids >= 0).any(1, keepdim=True), x.float(), 0.0)
    return PairSums(rows.unsqueeze(1) * factor.unsqueeze(-1), ids, table)


class Step:
    """The exchanges of a step on static buffers, with naps of this rank before each, and what came of it."""

    def __init__(self, rank: int, rows: NvlinkRows, own: int, count: int, is_routed: bool = False) -> None:
        device = torch.device("cuda", rank)
        self._rank, self._rows, self._own, self._is_routed = rank, rows, own, is_routed
        self._side = torch.cuda.Stream(device)
        self._load = torch.randn((4096, 4096), device=device).bfloat16()
        self.x = torch.zeros((LAYERS, own, HIDDEN), dtype=torch.bfloat16, device=device)
        self.ids = torch.full((LAYERS, own, TOP_K), -1, dtype=torch.int32, device=device)
        self.weights = torch.zeros((LAYERS, own, TOP_K), device=device)
        self.base = torch.zeros_like(self.x)
        self.naps = torch.zeros(2 * LAYERS, dtype=torch.int64, device=device)
        self.seen = torch.zeros((LAYERS, 2 * count, HIDDEN), dtype=torch.bfloat16, device=device)
        self.seen_ids = torch.zeros((LAYERS, 2 * count, TOP_K), dtype=torch.int32, device=device)
        self.sums = torch.zeros_like(self.x)

    def fill(self, inputs: Inputs) -> None:
        for buffer, part in zip((self.x, self.ids, self.weights, self.base), inputs.own, strict=True):
            buffer.copy_(part)

    def run(self) -> None:
        for layer in range(LAYERS):
            # A branch that takes all multiprocessors for longer than an exchange lasts.
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self.product = self._load @ self._load
            _nap_kernel[(1,)](self.naps, 2 * layer, num_warps=1)
            rows = (self.x[layer], self.ids[layer], self.weights[layer])
            if layer % 2:
                x, choice = self._rows.own(layer, self._own)
                if x is not None and choice is not None:
                    for place, part in zip((x, *choice), rows, strict=True):
                        place.copy_(part)
                    rows = (x, *choice)
            joined = self._rows.join(layer, *rows)
            _nap_kernel[(1,)](self.naps, 2 * layer + 1, num_warps=1)
            # Read after the nap: a peer that overwrote too early would show.
            self.seen[layer].copy_(joined[0])
            self.seen_ids[layer].copy_(joined[1])
            pairs = make_pairs(*joined, self._rank, self._is_routed)
            pairs = dataclasses.replace(pairs, base=self.base[layer])
            self.sums[layer].copy_(self._rows.give_back(layer, pairs))
            torch.cuda.current_stream().wait_stream(self._side)

    def count_wrong(self, inputs: Inputs) -> Tensor:
        """int64[], numbers that differ."""
        wrong = torch.zeros((), dtype=torch.int64, device=self.x.device)
        for layer, (joined, sums) in enumerate(zip(inputs.joined, inputs.sums, strict=True)):
            there = (joined[1] >= 0).any(1, keepdim=True)
            wrong += (self.seen_ids[layer] != joined[1]).sum()
            wrong += ((self.seen[layer] != joined[0]) & there).sum()
            wrong += (self.sums[layer] != sums).sum()
        return wrong
