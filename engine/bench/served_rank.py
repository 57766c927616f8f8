"""A rank of `served_group.py`: its process, which steps together with the others and runs cases when it is told to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np
import trio

from engine.bench.group import NO_MULTICAST
from engine.bench.link import choose_device
from engine.bench.loop import DECODE, LIFE, RankLoop, open_loop
from engine.bench.served import plan_config, run_batch
from engine.config import RankConfig
from engine.core.orders import GROUP_WORDS
from engine.model.device import TorchDevice, choose_gpu, open_torch_device
from engine.model.dummy import fill_arena
from engine.model.step_arena import StepArena
from engine.ports import Device
from transport.messages import Message, RankReady
from transport.nixl_fabric import open_nixl_fabric


@dataclasses.dataclass(frozen=True)
class GroupCase:
    """What one rank runs: `lengths` prompt ids, `ahead` steps and then `steps` that are timed."""

    lengths: tuple[int, ...]
    steps: int
    ahead: int
    split: bool


def run_rank_process(config: RankConfig, place: int, folder: str, pipe: Connection) -> None:
    """A rank's process."""
    os.environ |= NO_MULTICAST
    trio.run(_serve_rank, config, place, folder, pipe)


async def _serve_rank(config: RankConfig, place: int, folder: str, pipe: Connection) -> None:
    address = str(Path(folder, f"mesh-{place}"))
    config = plan_config(config)
    device = await open_torch_device(config, lambda *_: None, mesh_address=address, rank=place, place=place)
    arena, gpu = device.model.arena, None
    if config.device == "cuda":
        assert isinstance(arena, StepArena)
        fill_arena(arena.records, arena.bytes, seed=place)
        gpu = choose_gpu(place)
    try:
        async with open_nixl_fabric(f"rank{place}", device=gpu, on_thread_start=choose_device(gpu)) as fabric:
            await fabric.register(device.block_runs())
            async with open_loop(config, cast(Device, device), place=place, fabric=fabric) as loop:
                await _obey(loop, config, device, place, fabric.describe(), pipe)
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


async def _obey(
    loop: RankLoop, config: RankConfig, device: TorchDevice, place: int, description: bytes, pipe: Connection
) -> None:
    """Until the pipe ends: passes the head's messages in and this rank's words on, and runs cases."""
    info = device.info
    send_case, cases = trio.open_memory_channel[GroupCase](1)
    going = trio.Event()
    generator = np.random.default_rng(place)

    def pass_on(message: Message) -> None:
        if type(message) in GROUP_WORDS:
            pipe.send(("word", loop.head.notes[-1]))

    async def fill(row: int, pages: Sequence[int], slab: int) -> int:
        return int(generator.integers(info.vocab_size))

    async def meet() -> None:
        nonlocal going
        going = trio.Event()
        pipe.send(("met", None))
        await going.wait()

    async def run_cases() -> None:
        async for case in cases:
            sample = await run_batch(
                loop, config, device, case.lengths, fill,
                steps=case.steps, ahead=case.ahead, split=case.split, meet=meet,
            )  # fmt: skip
            pipe.send(("sample", sample))

    loop.head.passed = pass_on
    ready = RankReady(
        rank=DECODE + place, generation=LIFE, address="", num_pages=info.num_pages, page_tokens=info.page_tokens,
        page_bytes=info.page_bytes, num_slabs=info.num_slabs, slab_bytes=info.slab_bytes, fabric="nixl",
        device=info.name, mesh_address=info.mesh_address, parts=info.parts,
    )  # fmt: skip
    pipe.send(("hello", (ready, description)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_cases)
        while True:
            try:
                kind, what = await trio.to_thread.run_sync(pipe.recv, abandon_on_cancel=True)
            except (EOFError, ConnectionResetError):
                break  # the head has ended
            match kind:
                case "head":
                    loop.say_as_head(*what)
                case "case":
                    await send_case.send(what)
                case "go":
                    going.set()
        nursery.cancel_scope.cancel()
