"""Pushing: a prefill rank's loop computes prompts and pushes their pages meanwhile, to memory of a second process.

Device, side, loop, pushes and fabric are a rank's (`loop.py`); of the decode rank there is the memory alone, and its
grants and links are played. Beside it stand the same pages pushed in one piece once the prompt is computed, and the
same number of bytes as small blocks, one for each layer and page. What counts is how long the decode rank waits: from
the last chunk's result until it can be told that all is there.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import trio

from engine.bench.cases import cut_layers, load_model_config
from engine.bench.link import (
    PARTS,
    BlockMemory,
    Sizes,
    choose_device,
    choose_gpus,
    hear,
    open_receiver,
    open_record,
    place_in_runs,
    time_pushes,
)
from engine.bench.loop import DECODE, RankLoop, open_loop
from engine.bench.prompts import make_prompts
from engine.config import NANO, Limits, RankConfig, model_directory
from engine.errors import ConfigError
from engine.model.device import TorchDevice, open_torch_device
from engine.model.shapes import load_shape
from engine.model.step_arena import StepArena
from engine.ports import Device
from transport.fabric import Fabric, Target
from transport.messages import PagesGranted, PagesPushed, PrefillCommitted, Sampling, StartPrefill
from transport.nixl_fabric import open_nixl_fabric

PROMPT_S = 300.0
"""Longest wait for one prompt."""
PAGE_TOKENS = {"cpu": 64, "cuda": 256}
LINE = 64
"""Small blocks are whole lines."""
TOKENS_UNIT = 65_536
"""What posting costs is said for so many tokens."""


@dataclass(frozen=True)
class PushingOptions:
    """What to measure.

    Attributes:
        device: `cpu`, or `cuda`: prompts on the first GPU, memory on the second if there is one.
        model: on a CPU a folder with a checkpoint, or the bundled one; on a GPU as of `bench forward`, dummy weights.
        layers: of the model on a GPU, the first ones; None for all.
        pages: lengths of prompts.
        chunk: ids of a chunk.
        samples: prompts of each length.
        seed: of ids and places.
    """

    device: str = "cpu"
    model: str = NANO
    layers: int | None = None
    pages: tuple[int, ...] = (32, 512)
    chunk: int = 2048
    samples: int = 3
    seed: int = 1


def measure_pushing(options: PushingOptions, arguments: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """All lengths; a record, see `record.py`. The pages of a first prompt of each length arrived, or the length's run
    says `"arrived": False`.

    Raises:
        ConfigError: there is no such device or model, or a prompt is longer than it allows.
        FabricError: NIXL does not start, or the receiving process ends.
        EngineError: a prompt was not computed, or a push failed.
    """
    gpus = choose_gpus(options.device)
    with _rank_config(options) as config, open_receiver(gpus[1]) as peer:
        runs = trio.run(_measure_all, options, config, gpus[0], peer, tell)
    return open_record(vars(options), gpus, arguments) | {"kind": "while a prompt is computed", "runs": runs}


@contextlib.contextmanager
def _rank_config(options: PushingOptions) -> Iterator[RankConfig]:
    """A prefill rank with room for one prompt at a time; on a GPU of a model that lasts as long as the block."""
    on_gpu = options.device == "cuda"
    if not on_gpu and options.layers is not None:
        raise ConfigError("--layers cuts a model of dummy weights, which only --device cuda has")
    page_tokens = PAGE_TOKENS[options.device]
    if options.chunk % page_tokens:
        raise ConfigError(f"--chunk {options.chunk} must be a multiple of a page's {page_tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if on_gpu:
            found = load_model_config(options.model)
            if options.layers is not None:
                found = cut_layers(found, options.layers)
            Path(folder, "config.json").write_text(json.dumps(found), encoding="utf-8")
            model = folder
        pages, most = max(options.pages), load_shape(model_directory(model)).max_length
        if pages * page_tokens >= most:
            raise ConfigError(f"--pages {pages} are {pages * page_tokens} tokens; the model takes {most - 1}")
        yield RankConfig(
            role="prefill",
            model=model,
            device=options.device,
            fabric="nixl",
            page_tokens=page_tokens,
            # A rank leaves room for the tokens that follow the prompt.
            max_model_tokens=min((pages + 1) * page_tokens, most),
            num_pages=pages + 1,
            num_slabs=2,
            kv_dtype="fp8" if on_gpu else "float32",
            threads=1,
            replay_rows=0,
            config_digest="",
            limits=Limits(decode_rows=1, prefill_chunk_tokens=options.chunk),
            load_format="dummy" if on_gpu else "auto",
        )


@dataclass(frozen=True)
class _Bench:
    """What all prompts of a measurement share.

    Attributes:
        sizes: runs of blocks of sender and receiver alike: pages, slabs, small blocks.
        parts: small blocks of a page.
    """

    options: PushingOptions
    config: RankConfig
    device: TorchDevice
    fabric: Fabric
    target: Target
    peer: Connection
    sizes: Sizes
    parts: int


async def _measure_all(
    options: PushingOptions, config: RankConfig, gpu: int | None, peer: Connection, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    began = trio.current_time()
    device = await open_torch_device(config, lambda *_: None, rank=gpu or 0)
    tell(f"{device.info.name}: model loaded in {trio.current_time() - began:.1f} s")
    try:
        info = device.info
        parts = _count_parts(device)
        part_bytes = info.page_bytes // parts // LINE * LINE
        sizes = [
            (info.page_bytes, info.num_pages),
            (info.slab_bytes, info.num_slabs),
            (part_bytes, info.num_pages * parts),
        ]
        small = BlockMemory(sizes[2:], gpu)
        peer.send(sizes)
        choose = choose_device(gpu)
        async with open_nixl_fabric("push-out", device=gpu, receives=False, on_thread_start=choose) as fabric:
            await fabric.register([*device.block_runs(), *small.runs])
            target = await fabric.connect(await hear(peer))
            bench = _Bench(options, config, device, fabric, target, peer, sizes, parts)
            runs = []
            for pages in options.pages:
                arrived = await _check_bytes(bench, pages)
                tell(f"{pages} pages: those of a first prompt have {'arrived' if arrived else 'NOT ARRIVED'}")
                run = {**await _measure_prompts(bench, pages, tell), "arrived": arrived}
                runs.append(run)
                tell(describe_pushing(run))
            return runs
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


def _count_parts(device: TorchDevice) -> int:
    """Small blocks of a page: one for each layer's entries, and for its keys."""
    arena = device.model.arena
    if not isinstance(arena, StepArena):
        return PARTS
    planes = [plane for layer in arena.records.layers for plane in (layer.entries, layer.keys) if plane is not None]
    return len({plane.data for plane in planes})


async def _check_bytes(bench: _Bench, pages: int) -> bool:
    """Whether all pushes of a prompt that is not measured are what lies in the other process's memory afterwards."""
    async with _open(bench, checksums=True) as loop:
        remote = await _run_prompt(bench, loop, 1, pages)
        slab = bench.sizes[0][1]
        told = [pushed for pushed, _ in loop.peer.find(PagesPushed)]
        is_right = sum(pushed.count for pushed in told) == pages
        for pushed in told:
            blocks = remote[pushed.first : pushed.first + pushed.count]
            if pushed.first + pushed.count == pages:
                blocks = [*blocks, slab]
            bench.peer.send(blocks)
            is_right &= await hear(bench.peer) == pushed.checksum
        return is_right


def _open(bench: _Bench, *, checksums: bool) -> contextlib.AbstractAsyncContextManager[RankLoop]:
    config = replace(bench.config, checksum_pushes=checksums)
    return open_loop(
        config,
        cast(Device, bench.device),  # its tickets are its own; whoever holds one got it from this device
        fabric=bench.fabric,
        target=bench.target,
        remote_pages=bench.sizes[0][1],
        remote_slabs=bench.sizes[1][1],
    )


async def _run_prompt(bench: _Bench, loop: RankLoop, number: int, pages: int) -> list[int]:
    """Computes and pushes one prompt; the pages that it went to."""
    options, info = bench.options, bench.device.info
    length = pages * bench.config.page_tokens
    (ids,) = make_prompts(1, length, info.vocab_size, options.seed + number)
    remote: list[int] = place_in_runs(pages, np.random.default_rng(options.seed + number)).tolist()
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    loop.say_as_head(
        StartPrefill(request=number, attempt=1, decode_rank=DECODE, generated=0, sampling=sampling, queued_us=0),
        np.array(ids, "<i4").tobytes(),
    )
    done = len(loop.peer.find(PrefillCommitted))
    grant = PagesGranted(request=number, attempt=1, epoch=number, slab=0, num_pages=pages)
    loop.say_as_peer(grant, np.array(remote, "<i4").tobytes())
    await loop.wait_for(loop.peer, PrefillCommitted, done + 1, PROMPT_S)
    return remote


async def _measure_prompts(bench: _Bench, pages: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Prompts of one length, then their pages alone."""
    options, tokens = bench.options, pages * bench.config.page_tokens
    samples = []
    async with _open(bench, checksums=False) as loop:
        for number in range(1, options.samples + 1):
            remote = await _run_prompt(bench, loop, number, pages)
            (committed, _) = loop.peer.find(PrefillCommitted)[-1]
            reports = loop.inbox.reports[-committed.pushes :]
            samples.append(
                {
                    "exposed_us": committed.timings.push_us,
                    "prefill_us": committed.timings.prefill_us,
                    "post_us": committed.post_us,
                    "pushes": committed.pushes,
                    "bytes": committed.pushed_bytes,
                    "transfer_us": sum(report.transfer_us for report in reports),
                    "descriptors": sum(report.num_descriptors for report in reports),
                }
            )
            tell(f"{pages} pages: computed and pushed in {committed.timings.prefill_us / 1e3:.1f} ms")
    # The same places; what lies there does not matter any more.
    slab = bench.sizes[0][1]
    small = slab + bench.sizes[1][1]
    local = list(range(pages))
    whole = await time_pushes(bench.fabric, bench.target, [*local, slab], [*remote, slab], options.samples)
    layers = np.arange(bench.parts)[:, None] * bench.sizes[0][1] + small
    by_layer = await time_pushes(
        bench.fabric,
        bench.target,
        [*(layers + np.array(local)).ravel().tolist(), slab],
        [*(layers + np.array(remote)).ravel().tolist(), slab],
        options.samples,
    )
    found = {name: round(statistics.median(sample[name] for sample in samples)) for name in samples[0]}
    return {
        "pages": pages,
        "tokens": tokens,
        "page_bytes": bench.sizes[0][0],
        "slab_bytes": bench.sizes[1][0],
        **found,
        "post_us_per_64k": found["post_us"] * TOKENS_UNIT / tokens,
        "gb_per_s": found["bytes"] / max(found["transfer_us"], 1) / 1e3,
        "samples": samples,
        "after": whole,
        "by_layer": {"parts": bench.parts, "part_bytes": bench.sizes[2][0], **by_layer},
        "exposed_ratio": whole["median_us"] / max(found["exposed_us"], 1),
        "by_layer_ratio": by_layer["median_us"] / whole["median_us"],
    }


def describe_pushing(run: dict[str, Any]) -> str:
    """A run for people, in a few lines."""
    after, small = run["after"], run["by_layer"]
    lines = [
        f"{run['tokens']} tokens, {run['pages']} pages of {run['page_bytes']} bytes, computed in"
        f" {run['prefill_us'] / 1e3:.1f} ms:",
        f"  pushed meanwhile     {run['bytes'] / 1e6:7.1f} MB in {run['pushes']} pushes: {run['gb_per_s']:.1f} GB/s,"
        f" posting {run['post_us'] / 1e3:.3f} ms ({run['post_us_per_64k'] / 1e3:.3f} for 64K tokens), exposed"
        f" {run['exposed_us'] / 1e3:.3f} ms",
        f"  pushed afterwards    {after['bytes'] / 1e6:7.1f} MB: {after['gb_per_s']:.1f} GB/s, posting"
        f" {after['post_us'] / 1e3:.3f} ms, exposed {after['median_us'] / 1e3:.3f} ms,"
        f" {run['exposed_ratio']:.1f} times as long",
        f"  by layer, afterwards {small['bytes'] / 1e6:7.1f} MB in {small['descriptors']} descriptors:"
        f" {small['gb_per_s']:.1f} GB/s, posting {small['post_us'] / 1e3:.3f} ms, exposed"
        f" {small['median_us'] / 1e3:.3f} ms, {run['by_layer_ratio']:.1f} times that of pages",
    ]
    if not run["arrived"]:
        lines.append("  WRONG: other bytes arrived")
    return "\n".join(lines)
