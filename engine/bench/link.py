"""Link: pushes from one process of this host to another by the fabric that ranks use: time, rate, cost of posting.

Requests are as many pages as a prompt has, which lie in order, in runs, or anywhere, as the allocators of both sides
left them. Beside them stand the same bytes as an engine has them that keeps each layer's blocks by themselves: one
descriptor for each layer and page.
"""

from __future__ import annotations

import datetime
import multiprocessing
import shlex
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import trio

from engine.bench.record import SCHEMA, describe_machine, find_commit
from engine.errors import ConfigError, FabricError
from engine.version import VERSION
from transport.fabric import BlockRun, Fabric, Target
from transport.nixl_fabric import open_nixl_fabric

PAGE_BYTES = 987_904
"""A page of V4-Flash: 256 tokens of all layers."""
PARTS = 62
"""Planes in it: entries of 41 layers, keys of 21."""
PART_BYTES = 15_872
"""As large as one of PARTS equal ones, whole lines."""
RUN = 8
"""Pages that lie in order where a request's pages are in runs."""
ANSWER_S = 120.0
"""Longest wait for the receiving process: until it has its memory, and for a checksum."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LinkOptions:
    """What to measure.

    Attributes:
        device: `cpu` or `cuda`; there the second process has the second GPU if there is one.
        pages: sizes of requests.
        page_bytes, part_bytes: sizes of blocks; a page's parts are PARTS blocks.
        samples: pushes of each kind.
        seed: of the places.
    """

    device: str = "cpu"
    pages: tuple[int, ...] = (32, 512)
    page_bytes: int = PAGE_BYTES
    part_bytes: int = PART_BYTES
    samples: int = 7
    seed: int = 1


class _Arena:
    """Pages, then parts, in memory of the device."""

    def __init__(self, options: LinkOptions, gpu: int | None) -> None:
        pages = max(options.pages)
        device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.memory = torch.empty(
            pages * (options.page_bytes + PARTS * options.part_bytes), dtype=torch.uint8, device=device
        )
        self.runs = [
            BlockRun(self.memory.data_ptr(), options.page_bytes, pages),
            BlockRun(self.memory.data_ptr() + pages * options.page_bytes, options.part_bytes, pages * PARTS),
        ]

    def checksum(self, blocks: Sequence[int]) -> int:
        value = 0
        first, second = self.runs
        for block in blocks:
            run, at = (first, block) if block < first.count else (second, block - first.count)
            start = run.address - self.memory.data_ptr() + at * run.block_bytes
            value = zlib.crc32(self.memory[start : start + run.block_bytes].cpu().numpy().data, value)
        return value


def list_blocks(pages: int, most: int, seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Kinds of requests with so many pages, of an arena that has `most`: local and remote blocks, pairwise."""
    generator = np.random.default_rng(seed)
    in_order = np.arange(pages)
    run = min(RUN, pages)
    heads = generator.permutation(pages // run) * run
    in_runs = np.concatenate([heads[:, None] + np.arange(run), np.arange(pages // run * run, pages)[None]], None)
    anywhere = generator.permutation(pages)
    # Parts are numbered by layer: those of one layer lie side by side.
    layers = np.arange(PARTS)[:, None] * most + most
    parts, scattered = (layers + in_order).ravel(), (layers + anywhere).ravel()
    return {
        "pages in order": (in_order.tolist(), in_order.tolist()),
        f"pages in runs of {RUN}": (in_order.tolist(), in_runs.tolist()),
        "pages anywhere": (in_order.tolist(), anywhere.tolist()),
        "by layer, in order": (parts.tolist(), parts.tolist()),
        "by layer, anywhere": (parts.tolist(), scattered.tolist()),
    }


def measure_link(options: LinkOptions, arguments: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """All kinds of all sizes; a record, see `record.py`.

    Raises:
        ConfigError: there is no such device.
        FabricError: NIXL does not start, a push fails, or the receiving process ends.
    """
    gpus: list[int | None] = [None, None]
    if options.device == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise ConfigError("engine bench link --device cuda needs a GPU, found none")
        gpus = [0, 1 % count]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(options, gpus[1], theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        runs = trio.run(_send_all, options, gpus[0], ours, tell)
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    return {
        "schema": SCHEMA,
        "bench": "link",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**describe_machine(), "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus if gpu is not None]},
        "engine": VERSION,
        "commit": find_commit(),
        "command": shlex.join(arguments),
        "settings": {**vars(options), "gpus": gpus},
        "runs": runs,
    }


async def _send_all(
    options: LinkOptions, gpu: int | None, peer: Connection, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    arena = _Arena(options, gpu)
    torch.manual_seed(options.seed)
    arena.memory.random_()
    runs = []
    async with open_nixl_fabric("link-out", device=gpu, receives=False, on_thread_start=_choose(gpu)) as fabric:
        await fabric.register(arena.runs)
        target = await fabric.connect(await _hear(peer))
        for pages in options.pages:
            for kind, (local, remote) in list_blocks(pages, max(options.pages), options.seed).items():
                run = await _push(fabric, target, local, remote, options.samples)
                peer.send(remote)
                told = await _hear(peer)
                run = {"pages": pages, "kind": kind, **run, "arrived": told == arena.checksum(local)}
                runs.append(run)
                tell(describe_push(run))
    return runs


async def _hear(peer: Connection) -> Any:
    """What the receiving process says next."""
    try:
        with trio.fail_after(ANSWER_S):
            return await trio.to_thread.run_sync(peer.recv, abandon_on_cancel=True)
    except EOFError:
        raise FabricError("the receiving process has ended; its traceback is above") from None
    except trio.TooSlowError:
        raise FabricError(f"the receiving process has said nothing for {ANSWER_S:g} s") from None


async def _push(
    fabric: Fabric, target: Target, local: Sequence[int], remote: Sequence[int], samples: int
) -> dict[str, Any]:
    """Times from the call to the end that its waiter sees; one push before them is not counted."""
    totals, posts, transfers = [], [], []
    for sample in range(samples + 1):
        began = time.perf_counter()
        report = await fabric.wait(fabric.push(target, local, remote))
        if sample:
            totals.append((time.perf_counter() - began) * 1e6)
            posts.append(report.post_us)
            transfers.append(report.transfer_us)
    median = statistics.median(totals)
    return {
        "bytes": report.num_bytes,
        "descriptors": report.num_descriptors,
        "median_us": median,
        "samples_us": totals,
        "post_us": statistics.median(posts),
        "transfer_us": statistics.median(transfers),
        "gb_per_s": report.num_bytes / median / 1e3,
    }


def describe_push(run: dict[str, Any]) -> str:
    """A run for people, in one line."""
    wrong = "" if run["arrived"] else "  WRONG: other bytes arrived"
    moved = f"{run['bytes'] / 1e6:7.1f} MB in {run['descriptors']:5d} descriptors"
    return (
        f"{run['pages']:5d} pages  {run['kind']:20s} {moved}:"
        f" {run['median_us'] / 1e3:9.3f} ms, {run['gb_per_s']:6.1f} GB/s, posting {run['post_us'] / 1e3:8.3f} ms{wrong}"
    )


def _receive(options: LinkOptions, gpu: int | None, peer: Connection) -> None:
    """The other process: its memory is written, and it says what lies there."""
    arena = _Arena(options, gpu)

    async def serve() -> None:
        async with open_nixl_fabric("link-in", device=gpu, on_thread_start=_choose(gpu)) as fabric:
            await fabric.register(arena.runs)
            peer.send(fabric.describe())
            while True:
                try:
                    blocks = await trio.to_thread.run_sync(peer.recv, abandon_on_cancel=True)
                except EOFError:
                    return
                peer.send(arena.checksum(blocks))

    trio.run(serve)


def _choose(gpu: int | None) -> Callable[[], None] | None:
    return None if gpu is None else lambda: torch.cuda.set_device(gpu)
