"""A rank of a group that drafts, as `gpu_rank_process` runs one: requests from their prompts to their ends."""

from __future__ import annotations

import collections
import dataclasses
import sys
from pathlib import Path
from typing import Any

from engine.config import DraftConfig, RankConfig
from engine.core.plan import IDLE_STEP, StepPlan
from tests.model import gpu_rank_process
from tests.model.gpu_rank_cases import PAGE_TOKENS, rank_config
from tests.model.paged_cases import random_ids
from tests.model.speculation_cases import Host, Request
from tests.model.test_step_drafts import Decoding
from transport.messages import Sampling

DRAFTS, ROWS, EOS, LIMIT = 2, 16, 7, 15
SETTINGS = (Sampling(), Sampling(ignore_eos=True))


def drafting_config(directory: Path, group: int, **limits: Any) -> RankConfig:
    """As `rank_config`, for steps with places for all sequences and the drafts behind them."""
    config = rank_config(directory, group, **({"decode_rows": ROWS} | limits))
    return dataclasses.replace(config, draft=DraftConfig(tokens=DRAFTS, max_rows=4), num_pages=24)


def make_requests(seed: int) -> list[Request]:
    """Three; the last one with `seed` 1 is drawn, so its steps are the host's."""
    requests, used = [], 0
    for slab, length in enumerate((5, 21, 33)):
        count = -(-(length + LIMIT) // PAGE_TOKENS)
        prompt = random_ids(length, 320, seed=10 * seed + slab)
        drawn = Sampling(temperature=0.8, seed=4) if seed == 1 and slab == 2 else SETTINGS[slab % 2]
        limit = 4 if drawn.temperature else LIMIT
        requests.append(Request(slab, tuple(range(used, used + count)), prompt, drawn, limit))
        used += count
    return requests


class DraftingRank(gpu_rank_process.Rank):
    """Tells what it said, and how many drafts held."""

    async def talk(self, seed: int, steps: int) -> dict[str, Any]:
        """So many steps, two in the queue; those behind the last request's end have no rows."""
        host = Decoding(make_requests(seed), (EOS,), [DRAFTS, DRAFTS, DRAFTS, 0], seed)
        queued: collections.deque[tuple[Any, bool]] = collections.deque()
        for _ in range(steps):
            plan = host.plan()
            ticket = self.device.submit(StepPlan(IDLE_STEP, (), (), idle=1) if plan is None else plan)
            queued.append((ticket, plan is not None))
            while len(queued) == 2 or (queued and plan is None):
                await self._take(host, queued)
        while queued:
            await self._take(host, queued)
        return {
            "texts": [request.text for request in host.requests],
            "over": host.is_done,
            "held": sum(held * count for (_, held), count in host.figures.accepted.items()),
            "launched": self.launched,
        }

    async def _take(self, host: Host, queued: collections.deque[tuple[Any, bool]]) -> None:
        ticket, has_rows = queued.popleft()
        result = await self.device.wait(ticket)
        if has_rows:
            host.apply(result)


def start(arguments: list[str]) -> None:
    """See `gpu_rank_process.start`."""
    gpu_rank_process.rank_config = drafting_config
    gpu_rank_process.Rank = DraftingRank  # type: ignore[misc]
    gpu_rank_process.start(arguments)


if __name__ == "__main__":
    start(sys.argv[1:])
