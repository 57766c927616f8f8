"""Watchers: parts of a rank wrapped so that a test sees what passes, and may spoil it. What they wrap is unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trio

from engine.core.effects import Stretch
from engine.core.plan import StepPlan, StepResult
from engine.model.device import StepTicket, TorchDevice
from engine.ports import DeviceInfo
from transport.fabric import BlockRun, Fabric, Target, Transfer, TransferReport


class TappedStream(trio.abc.Stream):
    """Passes a stream on and keeps every byte that comes in."""

    def __init__(self, inner: trio.abc.Stream, heard: bytearray) -> None:
        self._inner, self._heard = inner, heard

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._inner.receive_some(max_bytes)
        self._heard += data
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


@dataclasses.dataclass(frozen=True)
class State:
    """A sequence's memory on a rank: uint8[pages, page_bytes] in the order of its text, and uint8[slab_bytes]."""

    pages: torch.Tensor
    slab: torch.Tensor


class WatchedDevice:
    """A TorchDevice that keeps what it was asked.

    Attributes:
        chunks: (request, start, ids) of every prefill chunk.
        rows: per step, (request, position) of its decode rows.
        arrived: per request, its state as it was before its first decode row; only where `copies`.
    """

    def __init__(self, device: TorchDevice, *, copies: bool) -> None:
        self.device = device
        self.chunks: list[tuple[int, int, int]] = []
        self.rows: list[list[tuple[int, int]]] = []
        self.arrived: dict[int, State] = {}
        self._copies = copies

    @property
    def info(self) -> DeviceInfo:
        return self.device.info

    @property
    def experts(self) -> Any:
        return self.device.experts

    def block_runs(self) -> Sequence[BlockRun]:
        return self.device.block_runs()

    def submit(self, plan: StepPlan) -> StepTicket:
        self.chunks += [(chunk.request, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        self.rows.append([(row.request, row.position) for row in plan.rows])
        arena = self.device.model.arena
        for row in plan.rows:
            if self._copies and row.request not in self.arrived:
                pages = row.pages[: -(-row.position // arena.layout.page_tokens)]
                copied = torch.stack([arena.page_bytes_of(page) for page in pages])
                self.arrived[row.request] = State(copied, arena.slab_bytes_of(row.slab).clone())
        return self.device.submit(plan)

    async def wait(self, ticket: StepTicket) -> StepResult:
        return await self.device.wait(ticket)

    def foresee(self, grammar: str) -> None:
        self.device.foresee(grammar)

    async def checksums(self, stretches: Sequence[Stretch]) -> tuple[int, ...]:
        return await self.device.checksums(stretches)

    async def aclose(self) -> None:
        await self.device.aclose()


class SpoilingFabric:
    """Passes a fabric on and, once a push has landed, tells `spoil` which blocks of the peer it wrote."""

    def __init__(self, inner: Fabric, spoil: Callable[[Sequence[int]], None]) -> None:
        self._inner, self._spoil = inner, spoil
        self._written: dict[Transfer, Sequence[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        transfer = self._inner.push(target, local_blocks, remote_blocks)
        self._written[transfer] = remote_blocks
        return transfer

    async def wait(self, transfer: Transfer) -> TransferReport:
        report = await self._inner.wait(transfer)
        self._spoil(self._written.pop(transfer))
        return report
