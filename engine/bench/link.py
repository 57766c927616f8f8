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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


Sizes = Sequence[tuple[int, int]]
"""Runs of blocks, one behind another: bytes of a block, number of blocks."""


class BlockMemory:
    """Runs of blocks in memory of the device, for a fabric."""

    def __init__(self, sizes: Sizes, gpu: int | None) -> None:
        """Allocates; what is in it is undefined. `gpu`: None for host memory."""
        device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.memory = torch.empty(sum(size * count for size, count in sizes), dtype=torch.uint8, device=device)
        self.runs: list[BlockRun] = []
        at = self.memory.data_ptr()
        for size, count in sizes:
            self.runs.append(BlockRun(at, size, count))
            at += size * count

    def checksum(self, blocks: Sequence[int]) -> int:
        """CRC-32 over blocks, numbered through all runs."""
        value = 0
        for block in blocks:
            run = next(run for run in self._numbered if block < run[0] + run[1].count)
            start = run[1].address - self.memory.data_ptr() + (block - run[0]) * run[1].block_bytes
            value = zlib.crc32(self.memory[start : start + run[1].block_bytes].cpu().numpy().data, value)
        return value

    @property
    def _numbered(self) -> Iterator[tuple[int, BlockRun]]:
        """Runs with the number of their first block."""
        first = 0
        for run in self.runs:
            yield first, run
            first += run.count


def list_blocks(pages: int, most: int, seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Kinds of requests with so many pages, of an arena that has `most`: local and remote blocks, pairwise."""
    generator = np.random.default_rng(seed)
    in_order = np.arange(pages)
    in_runs = place_in_runs(pages, generator)
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


def place_in_runs(pages: int, generator: np.random.Generator) -> Ints:
    """int64[pages], as many numbers of pages: RUN of them at a time lie in order."""
    run = min(RUN, pages)
    heads = generator.permutation(pages // run) * run
    return np.concatenate([heads[:, None] + np.arange(run), np.arange(pages // run * run, pages)[None]], None)


def measure_link(options: LinkOptions, arguments: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """All kinds of all sizes; a record, see `record.py`.

    Raises:
        ConfigError: there is no such device.
        FabricError: NIXL does not start, a push fails, or the receiving process ends.
    """
    gpus = choose_gpus(options.device)
    pages = max(options.pages)
    sizes = [(options.page_bytes, pages), (options.part_bytes, pages * PARTS)]
    with open_receiver(gpus[1]) as peer:
        peer.send(sizes)
        runs = trio.run(_send_all, options, sizes, gpus[0], peer, tell)
    return open_record(vars(options), gpus, arguments) | {"runs": runs}


def choose_gpus(device: str) -> tuple[int | None, int | None]:
    """The sender's and the receiver's GPU; None for memory of the host.

    Raises:
        ConfigError: there is none.
    """
    if device != "cuda":
        return None, None
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("engine bench link --device cuda needs a GPU, found none")
    return 0, 1 % count


def open_record(settings: dict[str, Any], gpus: Sequence[int | None], arguments: Sequence[str]) -> dict[str, Any]:
    """A record without its runs."""
    return {
        "schema": SCHEMA,
        "bench": "link",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**describe_machine(), "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus if gpu is not None]},
        "engine": VERSION,
        "commit": find_commit(),
        "command": shlex.join(arguments),
        "settings": {**settings, "gpus": list(gpus)},
    }


@contextmanager
def open_receiver(gpu: int | None) -> Iterator[Connection]:
    """A process whose blocks may be written: sent their sizes it says its fabric's description, then a checksum for
    each list of blocks that it is sent."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(gpu, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


async def _send_all(
    options: LinkOptions, sizes: Sizes, gpu: int | None, peer: Connection, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    arena = BlockMemory(sizes, gpu)
    torch.manual_seed(options.seed)
    arena.memory.random_()
    runs = []
    async with open_nixl_fabric("link-out", device=gpu, receives=False, on_thread_start=choose_device(gpu)) as fabric:
        await fabric.register(arena.runs)
        target = await fabric.connect(await hear(peer))
        for pages in options.pages:
            for kind, (local, remote) in list_blocks(pages, max(options.pages), options.seed).items():
                run = await time_pushes(fabric, target, local, remote, options.samples)
                peer.send(remote)
                told = await hear(peer)
                run = {"pages": pages, "kind": kind, **run, "arrived": told == arena.checksum(local)}
                runs.append(run)
                tell(describe_push(run))
    return runs


async def hear(peer: Connection) -> Any:
    """What the receiving process says next."""
    try:
        with trio.fail_after(ANSWER_S):
            return await trio.to_thread.run_sync(peer.recv, abandon_on_cancel=True)
    except EOFError:
        raise FabricError("the receiving process has ended; its traceback is above") from None
    except trio.TooSlowError:
        raise FabricError(f"the receiving process has said nothing for {ANSWER_S:g} s") from None


async def time_pushes(
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


def _receive(gpu: int | None, peer: Connection) -> None:
    """The other process: its memory is written, and it says what lies there."""
    if gpu is not None:
        torch.empty(1, device=f"cuda:{gpu}")  # the first takes seconds, in which the sender may not know sizes yet
    try:
        arena = BlockMemory(peer.recv(), gpu)
    except EOFError:
        return

    async def serve() -> None:
        async with open_nixl_fabric("link-in", device=gpu, on_thread_start=choose_device(gpu)) as fabric:
            await fabric.register(arena.runs)
            peer.send(fabric.describe())
            while True:
                try:
                    blocks = await trio.to_thread.run_sync(peer.recv, abandon_on_cancel=True)
                except EOFError:
                    return
                peer.send(arena.checksum(blocks))

    trio.run(serve)


def choose_device(gpu: int | None) -> Callable[[], None] | None:
    """What the fabric's thread does first."""
    return None if gpu is None else lambda: torch.cuda.set_device(gpu)
