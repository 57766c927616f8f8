"""Other ways to hand a prompt's KV over, for comparison only: what peers do, on the same cluster, load and wires.

`chunks` is what the engine does: the pages of a finished chunk go while the next chunk is computed. `end` keeps them
back and sends everything in one write once the prompt is computed. `pull` does too, but the decode rank fetches: it
has to be told, and its read request has to travel, before the first byte does. Prompts must be computed one after
another (`limits.prefill_prompts` 1): then all that was kept back belongs to the prompt whose slab is pushed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, cast

import trio

from engine.sim.clock import Clock
from transport.errors import FabricError
from transport.fabric import BlockRun, Target, Transfer, TransferReport
from transport.memory_fabric import MemoryFabric

Handoff = Literal["chunks", "end", "pull"]


@dataclasses.dataclass(slots=True, eq=False)
class _Kept:
    """A push that has not begun. Its share of the one write of all `total` blocks is told when that is done."""

    local: list[int]
    remote: list[int]
    total: int = 1
    started: trio.Event = dataclasses.field(default_factory=trio.Event)
    inner: Transfer | None = None
    failure: str | None = None


class KeepingFabric:
    """A prefill rank's fabric that keeps pushes back until a slab comes: `transport.fabric.Fabric`.

    Args:
        ask_s: from then until the bytes may begin to flow.
    """

    engine = "memory"

    def __init__(self, inner: MemoryFabric, clock: Clock, num_pages: int, ask_s: float) -> None:
        self._inner = inner
        self._clock = clock
        self._num_pages = num_pages
        self._ask_s = ask_s
        self._kept: dict[Target, list[_Kept]] = {}

    async def register(self, runs: Sequence[BlockRun]) -> None:
        await self._inner.register(runs)

    def describe(self) -> bytes:
        return self._inner.describe()

    async def connect(self, description: bytes) -> Target:
        return await self._inner.connect(description)

    def push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        kept = _Kept(list(local_blocks), list(remote_blocks))
        self._kept.setdefault(target, []).append(kept)
        if kept.local[-1] >= self._num_pages:
            together = self._kept.pop(target)
            self._clock.at(self._clock.now + self._ask_s, self._begin, target, together)
        return cast(Transfer, kept)

    def _begin(self, target: Target, together: list[_Kept]) -> None:
        local = [block for kept in together for block in kept.local]
        remote = [block for kept in together for block in kept.remote]
        try:
            inner, failure = self._inner.push(target, local, remote), None
        except FabricError as error:
            inner, failure = None, str(error)
        for kept in together:
            kept.inner, kept.failure, kept.total = inner, failure, len(local)
            kept.started.set()

    async def wait(self, transfer: Transfer) -> TransferReport:
        assert isinstance(transfer, _Kept)
        await transfer.started.wait()
        if transfer.inner is None:
            raise FabricError(f"the write did not begin: {transfer.failure}")
        whole = await self._inner.wait(transfer.inner)
        return dataclasses.replace(whole, num_bytes=whole.num_bytes * len(transfer.local) // transfer.total)

    async def forget(self, target: Target) -> None:
        for kept in self._kept.pop(target, ()):
            kept.failure = "the peer was forgotten"
            kept.started.set()
        await self._inner.forget(target)

    def prepare_push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        self._inner.prepare_push(target, local_blocks, remote_blocks)

    def expect_push(self) -> None:
        self._inner.expect_push()

    async def sever(self, description: bytes) -> None:
        await self._inner.sever(description)

    async def aclose(self) -> None:
        await self._inner.aclose()
