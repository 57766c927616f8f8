"""Traffic of one domain: prompts cut from one kind of text, so many sequences at a time, as long as it is wanted."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import trio

from engine.actors.client import Row
from engine.config import NANO, model_directory
from tests.e2e.faulty import FaultyCluster
from tests.e2e.prompts import cut
from tests.e2e.requester import POLL_S, make_row

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 160


@functools.cache
def code_ids() -> tuple[int, ...]:
    """Some ten thousand ids of Python that the repository holds anyway."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_directory(NANO) / "tokenizer.json"))
    text = "\n".join(path.read_text() for path in sorted((ROOT / "transport").glob("*.py")))[:60_000]
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def make_code_prompts(rng: random.Random, count: int, length: int = 96) -> list[list[int]]:
    return [cut(rng, code_ids(), length) for _ in range(count)]


class Traffic:
    """Keeps `width` rows running, from a few prompts in turn; `rows` are all that were submitted."""

    def __init__(self, cluster: FaultyCluster, prompts: Sequence[list[int]], width: int) -> None:
        self.rows: list[Row] = []
        self._cluster, self._width = cluster, width
        self._prompts = itertools.cycle(prompts)
        self._wanted = True

    async def run(self, max_tokens: int = MAX_TOKENS) -> None:
        """Until `stop`, and then until all are answered. The first ones are of different lengths, so that requests do
        not come and go together."""
        running: list[Row] = []
        while self._wanted:
            running = [row for row in running if row not in self._cluster.book.done]
            while len(running) < self._width:
                share = (len(self.rows) + 1) / self._width if len(self.rows) < self._width else 1.0
                row = make_row(next(self._prompts), max(8, int(max_tokens * share)))
                self.rows.append(row)
                running.append(await self._cluster.book.submit(row))
            await trio.sleep(2 * POLL_S)
        await self._cluster.finish(self.rows, 120)

    def stop(self) -> None:
        """Submits no more."""
        self._wanted = False

    def gaps_ms(self, since_ns: int, until_ns: int) -> list[float]:
        """Between a row's successive tokens, where both came within that time."""
        gaps = []
        for row in self.rows:
            times = [at for at in self._cluster.book.news[row] if since_ns <= at < until_ns]
            gaps += [(late - early) / 1e6 for early, late in itertools.pairwise(times)]
        return gaps
