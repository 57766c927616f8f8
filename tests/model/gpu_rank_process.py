"""A rank of a group with the steps of a GPU, there or on the CPU: commands as JSON lines on stdin, answers on stdout.

`python -m tests.model.gpu_rank_process MODEL PLACE SIZE GENERATION LIMIT_S plain|interpreted|cuda MEETING`, see
`gpu_rank_cases.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio

from engine.core.group import Membership, PartPlacement
from engine.core.placement import EMPTY, Placement, lay_out
from engine.core.plan import IDLE_STEP, StepPlan
from engine.errors import GroupBroken
from engine.model.device import TorchDevice, choose_gpu
from engine.model.expert_slots import TorchExpertSlots
from engine.model.gpu_rank import load_gpu_group
from engine.model.nvlink import NvlinkRows
from engine.model.ops import reference_ops
from tests.model.gpu_rank_cases import ROWS_TO_PROMPT_ROWS, draw_plans, few_plans, rank_config
from tests.model.plain_rows import PlainRows
from tests.model.quick_interpreter import hurry
from transport.messages import Member

NAP_CYCLES = 8_000_000_000
"""Four seconds of an H200."""


class Rank:
    """One device and what the test has it do."""

    def __init__(
        self, directory: Path, place: int, size: int, generation: int, limit_s: float, rows: str, meeting: Path
    ) -> None:
        torch.set_num_threads(1)
        on_gpu, interpreted = rows == "cuda", rows == "interpreted"
        self.place, self.size = place, size
        self.addresses = [str(meeting / f"{other}.mesh") for other in range(size)]
        config = rank_config(directory, size, exchange_s=limit_s, **({"decode_rows": 1} if interpreted else {}))
        device = torch.device("cuda", choose_gpu(place)) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        model, info, group = load_gpu_group(
            config, lambda *_: None, device, place=place, mesh_address=self.addresses[place], poison=True,
            ops=None if on_gpu else reference_ops(), prompt_rows=ROWS_TO_PROMPT_ROWS[rows],
            peers=PlainRows if rows == "plain" else NvlinkRows,
        )  # fmt: skip
        self.group = group
        self.device = TorchDevice(
            model,
            info,
            grouping=group,
            proposer=model.drafter,
            read_checksums=model.arena.read_checksums,
            gpu=device.index,
        )

    @property
    def experts(self) -> TorchExpertSlots:
        found = self.device.experts
        assert isinstance(found, TorchExpertSlots)
        return found

    def whole(self) -> Placement:
        part = self.device.info.parts[0]
        return lay_out(part.layers, part.experts, self.size, part.slots)

    def gathered(self, lost: int) -> Placement:
        """All experts of `lost` elsewhere, in slots that were empty."""
        before = self.whole()
        table = before.table.copy()
        for at, (layer, expert) in enumerate(before.find_stranded([lost])):
            place = [other for other in range(self.size) if other != lost][at % (self.size - 1)]
            table[place, np.flatnonzero(table[place] == EMPTY)[0]] = layer * before.experts + expert
        table[lost] = EMPTY
        return Placement(before.layers, before.experts, table)

    async def join(self, number: int, lives: list[int], *, lost: int = -1) -> dict[str, Any]:
        """Membership of these generations, 0 for a lost one; its experts are then with the others."""
        placement = self.whole() if lost < 0 else self.gathered(lost)
        members = tuple(
            Member(10 + other, life, self.addresses[other] if life else "", 0) for other, life in enumerate(lives)
        )
        membership = Membership(number, members, (b"",) * self.size, (PartPlacement(number * 10, placement),))
        await self.experts.prepare(membership)
        self.experts.join(number)
        return {}

    async def flip(self, epoch: int, target: int) -> dict[str, Any]:
        """All experts of the other places come to `target`, by what a re-placement would have copied."""
        before = self.whole()
        table = before.table.copy()
        came: dict[int, int] = {}
        held = set(before.table[target].tolist())
        room = iter(np.flatnonzero(before.table[target] == EMPTY).tolist())
        for key in range(before.layers * before.experts // 2):
            # Half the layers: all of them there, none elsewhere.
            if key not in held:
                slot = next(room)
                table[target, slot] = came[slot] = key
            for other in range(self.size):
                if other != target:
                    table[other][table[other] == key] = EMPTY
        after = Placement(before.layers, before.experts, table)
        if self.place == target:
            for slot, key in came.items():
                self.group.sources[0].load(slot, key)
                self.experts.pools[0].held[slot] = EMPTY
        self.experts.load_table(0, epoch, after)
        if self.place == target:
            self.experts.note_copied(0, came)
        self.experts.set_ready(0, epoch)
        return {}

    async def run(
        self, seed: int, steps: int, *, idle: bool = False, few: bool = False, stop: bool = False, die_at: int = -1
    ) -> dict[str, Any]:
        """Two steps in the queue. Tells of every breakage at once; all outcomes at the end."""
        if few and self.place == 0:
            plans = few_plans()
        elif few or idle:
            plans = [StepPlan(IDLE_STEP, (), (), idle=at + 1) for at in range(steps)]
        else:
            plans = draw_plans(seed, steps)
        if stop:
            plans = [dataclasses.replace(plan, stop=True) for plan in plans]
        outcomes: list[Any] = []
        groups: list[Any] = []
        tickets = []
        for at in range(len(plans) + 2):
            if at >= 2:
                ticket = tickets.pop(0)
                while True:
                    try:
                        result = await self.device.wait(ticket)
                    except GroupBroken as broken:
                        say({"broken": [broken.membership, broken.step, broken.rank, broken.why, broken.overdue]})
                        continue
                    break
                outcomes.append([list(result.chunk_tokens), list(result.row_tokens)])
                group = result.group
                assert group is not None
                groups.append([group.membership, group.step, group.active[0], group.park, group.stop])
                if len(outcomes) == die_at:
                    say({"dying": True})
                    os.kill(os.getpid(), 9)
            if at < len(plans):
                tickets.append(self.device.submit(plans[at]))
        launched, self.launched = self.launched, 0
        return {"outcomes": outcomes, "groups": groups, "launched": launched}

    launched = 0
    naps_at = -1

    def count_launches(self) -> None:
        pipeline = self.device._pipeline
        assert pipeline is not None
        launch = pipeline.launch

        def counted(*given: Any) -> None:
            self.launched += 1
            if self.launched == self.naps_at:
                torch.cuda._sleep(NAP_CYCLES)
            launch(*given)

        pipeline.launch = counted  # type: ignore[method-assign]

    async def hang(self, exchange: list[int]) -> dict[str, Any]:
        """Never comes to this [phase, layer], the second time that it should; a GPU sleeps before a step."""
        if self.group.share.device.type == "cuda":
            self.naps_at = 3
            return {}
        seen = 0

        def before(phase: int, layer: int) -> None:
            nonlocal seen
            seen += [phase, layer] == exchange
            if seen == 2:
                time.sleep(3600)

        PlainRows.before = staticmethod(before)
        return {}

    async def loads(self) -> dict[str, Any]:
        found = self.experts.read_loads()
        return {"counts": None if found is None else found[0].counts.sum(1).tolist()}


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


async def main(
    directory: Path, place: int, size: int, generation: int, limit_s: float, rows: str, meeting: Path
) -> None:
    if rows == "interpreted":
        hurry()
    rank = Rank(directory, place, size, generation, limit_s, rows, meeting)
    rank.count_launches()
    say({"ready": True})
    async with trio.open_nursery() as nursery:

        async def serve(action: str, options: dict[str, Any]) -> None:
            say({action: await getattr(rank, action)(**options)})

        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            action, options = json.loads(line)
            nursery.start_soon(serve, action, options)
        await rank.device.aclose()
        nursery.cancel_scope.cancel()


def start(arguments: list[str]) -> None:
    """The process, by the words of its command line."""
    directory, place, size, generation, limit_s, rows, meeting = arguments
    trio.run(
        main, Path(directory), int(place), int(size), int(generation), float(limit_s), rows, Path(meeting)
    )  # fmt: skip


if __name__ == "__main__":
    start(sys.argv[1:])
