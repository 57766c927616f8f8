"""V4-Flash at full size on two GPUs as a group that serves: decode steps, what is lost between them, moves beside them.

    python -m tests.model.measure_gpu_group --output-json group.json

Two processes, each with a device as a decode rank has it, and half of the experts; weights are random, contexts empty
memory of their length. Re-placement changes a tenth of each rank's experts for as many of the other's, as the head
would order it, but for the head. Predictions stand in docs/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import numpy as np
import torch
import trio

from engine.bench.cases import cut_layers, load_model_config
from engine.bench.record import SCHEMA, describe_machine, find_commit
from engine.config import DraftConfig, ExpertsConfig, Limits, RankConfig
from engine.core.group import Membership, PartPlacement
from engine.core.moves import Copy, Pacer, Stage, order_moves
from engine.core.placement import EMPTY, Placement, lay_out
from engine.core.plan import DecodeRows, StepPlan, StepResult, build_roster
from engine.core.switch import COPIES_RUNNING
from engine.model import step_model
from engine.model.device import TorchDevice
from engine.model.expert_slots import TorchExpertSlots
from engine.model.gpu_rank import load_gpu_group
from engine.model.launches import Launches, Turns
from engine.model.pipeline import Launched
from engine.model.step_model import StepModel
from engine.version import VERSION
from transport.fabric import Fabric, Target
from transport.messages import Member, Sampling
from transport.nixl_fabric import open_nixl_fabric

RANKS, LENGTH, PAGE_TOKENS = 2, 1024, 256
ROWS = (16, 64)
AHEAD, STEPS, REPLAYS = 20, 80, 30
SHARE = 10
"""One expert in so many moves."""
BUDGETS = (32 << 20, 64 << 20, 256 << 20)
"""Bytes of a rank in a step while experts move."""
MOVE_ROWS = 16
STEP_LIMIT = 4000
GREEDY = Sampling()
Record = dict[str, Any]


class GroupBench:
    """One rank."""

    def __init__(self, place: int, folder: Path, layers: int, peer: Connection) -> None:
        self.place, self.folder, self.peer = place, folder, peer
        self.gpu = torch.device("cuda", place)
        torch.cuda.set_device(self.gpu)
        pages = -(-(LENGTH + 6000) // PAGE_TOKENS)
        experts = layers * 256
        # Steps of other sizes are neither run nor captured.
        step_model.sizes_up_to = lambda rows: list(ROWS)
        config = RankConfig(
            role="decode", model=str(folder), device="cuda", fabric="nixl", page_tokens=PAGE_TOKENS,
            max_model_tokens=pages * PAGE_TOKENS, num_pages=max(ROWS) * 8 + 64, num_slabs=max(ROWS), kv_dtype="fp8",
            threads=1, replay_rows=0, config_digest="0", limits=Limits(decode_rows=max(ROWS), exchange_s=20.0),
            load_format="dummy", draft=DraftConfig(tokens=0), group=RANKS,
            experts_main=ExpertsConfig(spare_slots=experts // RANKS // SHARE + 1),
        )  # fmt: skip
        self.addresses = [str(folder / f"{other}.mesh") for other in range(RANKS)]
        self.model, self.info, self.group = load_gpu_group(
            config, lambda *_: None, self.gpu, place=place, mesh_address=self.addresses[place], prompt_rows=(32,)
        )
        self.epoch = 1
        self.step = 0
        self.gaps_us: list[float] = []

    async def run(self) -> None:
        """All of it, in the order that the other rank has, too."""
        self.device = TorchDevice(self.model, self.info, grouping=self.group, gpu=self.gpu.index)
        assert isinstance(self.device.experts, TorchExpertSlots)
        self.experts = self.device.experts
        self.note_idle()
        part = self.info.parts[0]
        placement = lay_out(part.layers, part.experts, RANKS, part.slots)
        began = time.perf_counter()
        await self.join(placement)
        await self.tell({"what": "experts loaded", "s": time.perf_counter() - began, "memory_gib": self.used_gib()})
        for rows in ROWS:
            served = await self.serve(rows, AHEAD + STEPS)
            graph_us = await self.replay(rows)
            median_us = statistics.median(served["gaps"][AHEAD:]) * 1e6
            await self.tell({
                "what": "served", "rows": rows, "context": LENGTH, "step_us": median_us,
                "p99_us": quantile(served["gaps"][AHEAD:], 0.99) * 1e6,
                "device_us": statistics.median(served["device_us"][AHEAD:]), "graph_us": graph_us,
                "gap_us": median_us - graph_us, "idle_us": statistics.median(self.gaps_us[AHEAD:] or [0.0]),
                "idle_p99_us": quantile(self.gaps_us[AHEAD:] or [0.0], 0.99), "distinct": served["distinct"],
            })  # fmt: skip
        name = f"rank{self.place}"
        async with open_nixl_fabric(
            name, device=self.place, on_thread_start=lambda: torch.cuda.set_device(self.gpu)
        ) as fabric:
            await fabric.register(self.device.block_runs())
            target = await fabric.connect(await self.swap(fabric.describe()))
            for budget in BUDGETS:
                changed = exchange_experts(placement, SHARE)
                (stage,) = order_moves(placement, changed, [0] * RANKS)
                await self.tell(await self.move(fabric, target, stage, budget))
                placement = stage.after
        await self.device.aclose()

    async def join(self, placement: Placement) -> None:
        members = tuple(Member(other, 1, address, 0) for other, address in enumerate(self.addresses))
        membership = Membership(1, members, (b"",) * RANKS, (PartPlacement(self.epoch, placement),))
        await self.experts.prepare(membership)
        await self.swap("prepared")
        self.experts.join(1)

    def note_idle(self) -> None:
        """Time from the end of each step to the begin of the next, by their events."""
        pipeline = self.device._pipeline
        assert pipeline is not None
        finish, before = pipeline.finish, [None]

        def noted(first: Launched) -> StepResult:
            result = finish(first)
            if before[0] is not None and first.began is not None:
                self.gaps_us.append(before[0].elapsed_time(first.began) * 1e3)
            before[0] = first.ended  # type: ignore[call-overload]
            return result

        pipeline.finish = noted  # type: ignore[method-assign]

    def plan(self, rows: int, roster: Any, at: int) -> StepPlan:
        self.step += 1
        tokens = np.full(rows, -1)
        if at == 0:
            tokens = np.random.default_rng(7 + self.place).integers(0, self.info.vocab_size, rows)
        return StepPlan(self.step, (), DecodeRows(roster, np.full(rows, LENGTH + at), tokens))

    def roster(self, rows: int) -> Any:
        pages = tuple(tuple(range(8 * row, 8 * row + 8)) * 4 for row in range(rows))
        return build_roster(np.arange(rows), np.arange(rows), pages, (GREEDY,) * rows)

    async def serve(self, rows: int, steps: int) -> Record:
        """So many steps as the step loop drives them: two in the queue."""
        self.gaps_us.clear()
        roster = self.roster(rows)
        waiting = [self.device.submit(self.plan(rows, roster, at)) for at in range(2)]
        ends, device_us, seen = [], [], set()
        for at in range(2, steps + 2):
            result = await self.device.wait(waiting.pop(0))
            ends.append(time.perf_counter())
            device_us.append(result.device_us)
            seen |= set(result.row_tokens)
            waiting.append(self.device.submit(self.plan(rows, roster, at)))
        for ticket in waiting:
            await self.device.wait(ticket)
        gaps = [late - early for early, late in itertools.pairwise(ends)]
        return {"gaps": gaps, "device_us": device_us, "distinct": len(seen)}

    async def replay(self, rows: int) -> float:
        """Microseconds of the same step's graph alone, on both ranks at once."""
        await self.swap("replay")
        return await trio.to_thread.run_sync(replay_graph, self.model, rows, self.gpu)

    async def move(self, fabric: Fabric, target: Target, stage: Stage, budget: int) -> Record:
        """One stage beside running steps: what steps took before, meanwhile and after."""
        self.gaps_us.clear()
        self.epoch += 1
        part = self.info.parts[0]
        first = self.info.num_pages + self.info.num_slabs
        mine = [copy for copy in stage.copies if copy.source[0] == self.place]
        pacer = Pacer(mine, part.slot_bytes, budget, 1)
        self.experts.load_table(0, self.epoch, stage.after)
        roster = self.roster(MOVE_ROWS)
        state = {"sizes": 0.0, "done_s": 0.0, "began": 0.0}
        turns = trio.Semaphore(COPIES_RUNNING)
        marks: list[tuple[float, str]] = []
        phase, began_step, flip_step, at, end_step = "before", 0, 0, 0, STEP_LIMIT
        counted: list[int] = []
        async with trio.open_nursery() as nursery:

            async def copy(one: Copy) -> None:
                async with turns:
                    report = await fabric.wait(fabric.push(target, [first + one.source[1]], [first + one.target[1]]))
                state["sizes"] += report.num_bytes
                pacer.note_done(one)
                if pacer.is_done:
                    state["done_s"] = time.perf_counter() - state["began"]
                    came = await self.swap({copy.target[1]: copy.layer * part.experts + copy.expert for copy in mine})
                    self.experts.note_copied(0, came)
                    self.experts.set_ready(0, self.epoch)

            waiting = [self.device.submit(self.plan(MOVE_ROWS, roster, at)) for at in range(2)]
            while True:
                result = await self.device.wait(waiting.pop(0))
                marks.append((time.perf_counter(), phase))
                at += 1
                if at == STEPS:
                    phase, began_step = "during", at
                    state["began"] = time.perf_counter()
                assert result.group is not None
                counted.append(result.group.step)
                if phase == "during":
                    if not pacer.is_done:
                        for one in pacer.choose_copies():
                            nursery.start_soon(copy, one)
                    if result.group.active[0] == self.epoch:
                        # Both ranks see the epoch at the same step of the group, so both end at the same one.
                        phase, flip_step = "after", at
                        end_step = at + STEPS
                if at >= end_step:
                    break
                waiting.append(self.device.submit(self.plan(MOVE_ROWS, roster, at % 1000 + 2)))
            for ticket in waiting:
                result = await self.device.wait(ticket)
        assert flip_step, "the epoch never came into force"
        released = [slot for place, slot in stage.released if place == self.place]
        self.experts.free_slots(0, released)
        pairs = list(itertools.pairwise(marks))
        times = {
            name: [late[0] - early[0] for early, late in pairs if late[1] == name]
            for name in ("before", "during", "after")
        }
        seconds = state["done_s"]
        return {
            "what": "moved", "budget_bytes": budget, "slots": len(mine), "bytes": state["sizes"], "copy_s": seconds,
            "gb_per_s": state["sizes"] / seconds / 1e9, "steps": flip_step - began_step,
            "skipped": sum(late - early - 1 for early, late in itertools.pairwise(counted)),
            **{f"{name}_p50_us": statistics.median(found) * 1e6 for name, found in times.items()},
            **{f"{name}_p99_us": quantile(found, 0.99) * 1e6 for name, found in times.items()},
            **{f"{name}_max_us": max(found) * 1e6 for name, found in times.items()},
        }  # fmt: skip

    async def swap(self, word: Any) -> Any:
        """What the other rank says at the same place."""
        self.peer.send(word)
        with trio.fail_after(180):
            return await trio.to_thread.run_sync(self.peer.recv, abandon_on_cancel=True)

    async def tell(self, run: Record) -> None:
        """Rank 0 prints both ranks' figures side by side, and keeps them."""
        other = await self.swap(run)
        if self.place == 0:
            print(json.dumps({"rank0": shorten(run), "rank1": shorten(other)}), flush=True)
            with (self.folder / "runs.jsonl").open("a") as file:
                file.write(json.dumps([run, other]) + "\n")

    def used_gib(self) -> float:
        free, total = torch.cuda.mem_get_info(self.gpu)
        return (total - free) / 2**30


def exchange_experts(placement: Placement, share: int) -> Placement:
    """Each rank's first experts, one in `share` of all that it has, change places with as many of the other's."""
    table = placement.table.copy()
    picked = [np.flatnonzero(row != EMPTY)[::share] for row in table]
    count = min(len(slots) for slots in picked)
    one, other = table[0, picked[0][:count]].copy(), table[1, picked[1][:count]].copy()
    table[0, picked[0][:count]], table[1, picked[1][:count]] = other, one
    return Placement(placement.layers, placement.experts, table)


def replay_graph(model: StepModel, rows: int, gpu: torch.device) -> float:
    torch.cuda.set_device(gpu)
    sized = model._decodes[rows]
    model.turns = Turns(Launches((), rows), Launches((), rows), lambda: None)
    begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
    for _ in range(5):
        sized.replay()
    begin.record()
    for _ in range(REPLAYS):
        sized.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(np.array(values), share))


def shorten(run: Record) -> Record:
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in run.items()}


def run_rank(place: int, folder: Path, layers: int, peer: Connection, began: float, start_only: bool) -> None:
    bench = GroupBench(place, folder, layers, peer)
    # The clock is the host's, so this counts from the command on, imports included.
    trio.run(bench.tell, {"what": "started", "s": time.time() - began})
    if not start_only:
        trio.run(bench.run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--start-only", action="store_true", help="end when both ranks have loaded and captured")
    began = time.time()
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = load_model_config("v4-flash")
        if options.layers != 43:
            config = cut_layers(config, options.layers)
        (folder / "config.json").write_text(json.dumps(config))
        ends = context.Pipe()
        processes = [
            context.Process(
                target=run_rank, args=(place, folder, options.layers, ends[place], began, options.start_only)
            )
            for place in range(RANKS)
        ]
        for process in processes:
            process.start()
        for end in ends:
            end.close()
        for process in processes:
            process.join()
        lines = (folder / "runs.jsonl").read_text().splitlines() if (folder / "runs.jsonl").exists() else []
        if options.output_json is not None:
            record = {
                "schema": SCHEMA,
                "bench": "gpu_group",
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": {**describe_machine(), "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(RANKS)]},
                "engine": VERSION,
                "commit": find_commit(),
                "command": shlex.join(["python", "-m", "tests.model.measure_gpu_group", *sys.argv[1:]]),
                "settings": {"layers": options.layers, "context": LENGTH, "share": SHARE},
                "runs": [json.loads(line) for line in lines],
            }
            options.output_json.write_text(json.dumps(record))
    sys.exit(max(process.exitcode != 0 for process in processes))


if __name__ == "__main__":
    main()
