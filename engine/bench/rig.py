"""Rig: one rank of a model at full size, made of dummy weights and contexts, and its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.bench.cases import DeviceCase, cut_layers, load_model_config, shrink_memory
from engine.bench.drafting import DraftBench
from engine.bench.profile import mark_ops
from engine.bench.routing import Routing, draw_ids, draw_peers
from engine.errors import ConfigError
from engine.model.dummy import DummySource, fill_arena
from engine.model.engram import engram_tables
from engine.model.nvlink import NvlinkExchange
from engine.model.ops import Ops, ops_for
from engine.model.records import plan_records
from engine.model.shapes import ModelShape, shape_from_config
from engine.model.step_arena import StepArena
from engine.model.step_drafts import Drafted
from engine.model.step_forward import Peers, StepForward, StepOutputs, StepSize
from engine.model.step_shared import open_step
from engine.model.step_weights import local_experts, make_step_weights
from kernels.forms import Plane, RecordFormat

PAGE_TOKENS = 256
STAGING_ROWS = 32
"""Of a prompt; nothing here has one, and a rank's arena has room for it."""
FORMATS: tuple[RecordFormat, ...] = ("fp8", "bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What to measure.

    Attributes:
        model: `v4-flash`, `v4.1-flash`, a config.json, or a folder with one.
        cases: sizes of steps.
        iters: replays in a sample.
        samples: of each case.
        routing: see `draw_ids`.
        ranks: this rank has one of so many equal shares of the experts, and rows of all of them come to it.
        records: format of entries, keys and window records.
        seed: of everything random.
        profile: whether to trace, too.
        profiled: names of the cases that are; empty for all.
        branches: whether the step has them, see `StepForward`.
        layers: only so many, the first ones; None for all.
        served: also as the loop of a rank runs it, see `served_cuda.py`.
    """

    model: str
    cases: tuple[DeviceCase, ...]
    iters: int = 20
    samples: int = 5
    routing: Routing = "real"
    ranks: int = 1
    records: RecordFormat = "fp8"
    seed: int = 1
    profile: bool = True
    profiled: tuple[str, ...] = ()
    branches: bool = True
    layers: int | None = None
    served: bool = False


class StepBench:
    """A model with dummy weights, and an arena that is large enough for each of the cases.

    Attributes:
        drafting: what makes drafts, if a case has some and the model a layer that predicts ahead.
    """

    def __init__(
        self,
        options: StepOptions,
        device: torch.device,
        ops: Ops | None = None,
        *,
        rank: int = 0,
        make_exchange: Callable[[ModelShape], NvlinkExchange] | None = None,
    ) -> None:
        """Allocates and fills the device's memory.

        Args:
            options: what to measure.
            device: where.
            ops: implementation of the operations; None for the device's.
            rank: which share of the experts, and of a group's rows.
            make_exchange: with the other ranks; None for static rows that stand for theirs.

        Raises:
            ConfigError: the model or the share of experts can not be had.
        """
        self.options = options
        config = shrink_memory(load_model_config(options.model))
        if options.layers is not None:
            config = cut_layers(config, options.layers)
        self.shape = shape = shape_from_config(config)
        self._rank = rank
        self._generator = torch.Generator(device).manual_seed(options.seed)
        self._inputs = torch.Generator(device).manual_seed(options.seed + 1000 * rank) if rank else self._generator
        experts = local_experts(shape.num_experts, options.ranks, rank)
        # Before the weights: nothing that all ranks do together may wait long for one of them.
        self._exchange = make_exchange(shape) if make_exchange is not None else None
        longest = max(case.length for case in options.cases)
        if longest > shape.max_length:
            raise ConfigError(f"a length must be at most {shape.max_length} tokens, found {longest}")
        self.records = plan_records(
            shape,
            page_tokens=PAGE_TOKENS,
            num_pages=max(case.requests * count_pages(case) for case in options.cases),
            num_slabs=max(case.requests for case in options.cases),
            format=options.records,
            staging_rows=STAGING_ROWS if options.served else 0,
        )
        source = DummySource(shape, device, seed=options.seed)
        engram = engram_tables(shape, _fold(shape)) if shape.engram is not None else None
        self.weights = make_step_weights(shape, source, max_tokens=longest, experts=experts, engram=engram)
        # What a rank's model wants of it; nothing else is in it.
        self.step_arena = StepArena(self.records, device, shape.vocab_size) if options.served else None
        self.arena = self.records.make_arena(device) if self.step_arena is None else self.step_arena.bytes
        fill_arena(self.records, self.arena, seed=options.seed)
        self.ops = mark_ops(ops_for(device) if ops is None else ops, self.weights)
        self.drafting: DraftBench | None = None
        if shape.num_predict_layers and any(case.drafts for case in options.cases):
            target, records, arena, seed = self.weights, self.records, self.arena, options.seed + 1
            self.drafting = DraftBench(shape, target, records, arena, self.ops, seed=seed)

    def open(self, case: DeviceCase) -> StepForward:
        """A step of the case's size, its inputs set: random tokens, shuffled pages, sequences one token apart in length
        so that the ends of their groups fall as in service."""
        shape, options, generator = self.shape, self.options, self._inputs
        device = self.arena.device
        rows = case.requests * case.rows
        fixed = draw_ids(shape, options.routing, rows * options.ranks, self._generator)
        peers: Peers | None
        if self._exchange is not None:
            peers = self._exchange.rows(rows)
        else:
            peers = draw_peers(shape, self.weights, self.ops, rows, options.ranks, fixed, generator)
        size = StepSize(case.requests, case.rows, count_pages(case))
        own = None if fixed is None else fixed[:, self._rank * rows : (self._rank + 1) * rows].contiguous()
        step = open_step(
            shape,
            self.weights,
            self.records,
            self.arena,
            self.ops,
            size,
            fixed_ids=own,
            peers=peers,
            branches=options.branches and device.type == "cuda",
        )
        step.tokens.copy_(torch.randint(shape.vocab_size, (rows,), generator=generator, device=device))
        pages = torch.randperm(self.records.num_pages, generator=generator, device=device)
        step.rows.tables.copy_(pages[: case.requests * size.pages].view(case.requests, size.pages))
        step.rows.slabs.copy_(torch.arange(case.requests, device=device))
        step.rows.positions.copy_(torch.tensor([position for ends in positions_of(case) for position in ends]))
        return step

    def touched(self, step: StepForward, outputs: StepOutputs | Drafted) -> list[int]:
        """Per layer, how many of the experts here have rows of the latest step."""
        counts = []
        for number, layer in enumerate(self.weights.layers):
            ids = outputs.ids[number] if step.peers is None else step.peers.ids[number]
            chosen = ids[ids >= 0].long().unique()
            counts.append(int((layer.expert_to_slot[chosen] >= 0).sum()))
        return counts

    def count_bytes(self, case: DeviceCase, touched: Sequence[int]) -> dict[str, int]:
        """Bytes that the step must move at least: each weight, expert and record once."""
        shape = self.shape
        records = 0
        for ends in positions_of(case):
            last = ends[-1] + 1
            for role, layer in zip(shape.layer_roles, self.records.layers, strict=True):
                records += _record_bytes(layer.window) * min(last, shape.window + case.rows - 1)
                if layer.entries is None:
                    continue
                entries = last // role.ratio
                if layer.keys is not None:
                    if role.is_index_source:
                        within = shape.candidate_blocks * shape.candidate_block_size
                        seen = entries if role.candidate_source is None else min(entries, within)
                        records += _record_bytes(layer.keys) * seen
                    entries = min(entries, shape.index_topk)
                records += _record_bytes(layer.entries) * entries
        found = {
            "dense": self.weights.dense_bytes,
            "experts": sum(touched) * self.weights.slots.slot_bytes,
            "records": records,
        }
        return found | {"total": sum(found.values())}


def _fold(shape: ModelShape) -> npt.NDArray[np.int64]:
    """int64[vocab]: classes of a made-up vocabulary."""
    assert shape.engram is not None
    return np.arange(shape.vocab_size) % shape.engram.num_classes


def count_pages(case: DeviceCase) -> int:
    """Pages of one of its sequences."""
    return -(-case.length // PAGE_TOKENS)


def positions_of(case: DeviceCase) -> list[list[int]]:
    """The rows' positions, by sequence."""
    found = []
    for number in range(case.requests):
        last = max(case.length - number % 128, case.rows)
        found.append(list(range(last - case.rows, last)))
    return found


def _record_bytes(plane: Plane) -> int:
    return plane.data_bytes + plane.scale_bytes
