"""A rank of `gpu_rank_process.py` whose flips come when a test says, with bugs planted into it by name."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from engine.core.placement import EMPTY
from engine.core.plan import StepResult
from engine.model.device import StepTicket
from engine.model.said import Said
from tests.model import gpu_rank_process


class RulesRank(gpu_rank_process.Rank):
    """See the module."""

    wait: Any = None
    patch = pytest.MonkeyPatch()

    async def flip(self, epoch: int, target: int) -> dict[str, Any]:
        """Also if there was a flip in a membership before."""
        if self.place == target:
            left = (self.whole().table[target] == EMPTY) & (self.experts.pools[0].held != EMPTY)
            self.experts.free_slots(0, np.flatnonzero(left).tolist())
        return await super().flip(epoch, target)

    async def flip_after(self, results: int, epoch: int, target: int, reclaim: int) -> dict[str, Any]:
        """Is ready for an epoch behind so many results of the next run; behind `reclaim` results of it, slots that it
        does not use are empty and overwritten."""
        self.wait = wait = self.wait or self.device.wait
        seen = 0
        before = self.whole().table[self.place]
        in_force = 0

        async def counted(ticket: StepTicket) -> StepResult:
            nonlocal seen, in_force
            result = await wait(ticket)
            seen += 1
            if seen == results:
                await self.flip(epoch, target)
            assert result.group is not None
            in_force += result.group.active[0] == epoch
            if in_force == reclaim and result.group.active[0] == epoch:
                table = self.experts.find_table(0).placement.table[self.place]
                freed = np.flatnonzero((before != EMPTY) & (table != before)).tolist()
                self.experts.free_slots(0, freed)
                for slot in freed:
                    self.group.pools[0].bytes_of(slot).fill_(0xFF)
                gpu_rank_process.say({"freed": freed})
            return result

        self.device.wait = counted  # type: ignore[method-assign]
        return {}

    async def plant(self, bug: str) -> dict[str, Any]:
        """Breaks a rule here, instead of the one before."""
        self.patch.undo()
        patch, read = self.patch, Said.read
        if bug == "flips by its own word":

            def read_alone(said: Any, heard: Any, ranks: Any, active: tuple[int, ...], *rest: Any) -> Any:
                launches, agreed = read(said, heard, ranks, active, *rest)
                return launches, agreed._replace(active=tuple(map(max, active, said._own[0].ready)))

            patch.setattr(Said, "read", read_alone)
        elif bug == "flips a step late":
            late: list[tuple[int, ...]] = []

            def read_late(said: Any, heard: Any, ranks: Any, active: tuple[int, ...], *rest: Any) -> Any:
                launches, agreed = read(said, heard, ranks, active, *rest)
                late.append(agreed.active)
                return launches, agreed._replace(active=late[-2] if len(late) > 1 else active)

            patch.setattr(Said, "read", read_late)
        return {}


if __name__ == "__main__":
    gpu_rank_process.Rank = RulesRank  # type: ignore[misc]
    gpu_rank_process.start(sys.argv[1:])
