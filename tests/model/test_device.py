"""TorchDevice against the model it drives: state that moves between devices, defaults, refusals."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import trio

from engine.config import Limits, RankConfig
from engine.core.plan import DecodeRow, PrefillChunk, StepPlan
from engine.errors import ConfigError
from engine.model.device import TorchDevice, open_torch_device
from tests.model.paged_cases import random_ids, write_checkpoint
from transport.messages import Sampling


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


def config_for(directory: Path) -> RankConfig:
    return RankConfig(
        role="decode",
        model=str(directory),
        device="cpu",
        fabric="tcp",
        page_tokens=8,
        max_model_tokens=128,
        num_pages=40,
        num_slabs=6,
        kv_dtype="float32",
        threads=1,
        replay_rows=0,
        config_digest="0",
        limits=Limits(prefill_chunk_tokens=32, decode_rows=4),
    )


def ignore(phase: str, done: int, total: int, unit: str) -> None:
    """A start-up nobody watches."""


async def prefill(device: TorchDevice, ids: np.ndarray, slab: int, pages: tuple[int, ...], sampling: Sampling) -> int:
    """All of a prompt in chunks of 16; the token that follows."""
    token: int | None = None
    for start in range(0, len(ids), 16):
        part = memoryview(ids[start : start + 16].astype("<i4").tobytes())
        last = start + 16 >= len(ids)
        chunk = PrefillChunk(1, slab, start, part, pages, sampling if last else None)
        (token,) = (await device.wait(device.submit(StepPlan(start, (chunk,), ())))).chunk_tokens
    assert token is not None
    return token


async def follow(
    device: TorchDevice, slab: int, pages: tuple[int, ...], start: int, count: int, sampling: Sampling
) -> list[int]:
    tokens: list[int] = []
    for at in range(start, start + count):
        row = DecodeRow(1, slab, at, None, pages, sampling)
        tokens.extend((await device.wait(device.submit(StepPlan(1000 + at, (), (row,))))).row_tokens)
    return tokens


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=11)])
@pytest.mark.parametrize("length", [1, 21, 64])
async def test_pages_and_slab_moved_by_address_continue_the_text(
    checkpoint: Path, sampling: Sampling, length: int
) -> None:
    ids = random_ids(length, 320, seed=3)
    config = config_for(checkpoint)
    here = await open_torch_device(config, ignore, poison=True)
    there = await open_torch_device(dataclasses.replace(config, num_pages=30, num_slabs=3), ignore, poison=True)
    assert here.info.layout_digest == there.info.layout_digest
    pages_here, pages_there = tuple(range(5, 19)), tuple(range(29, 15, -1))
    first = await prefill(here, ids, 4, pages_here, sampling)
    # What the fabric does: block i of one table over block j of the other.
    (page_run, slab_run), (page_target, slab_target) = here.block_runs(), there.block_runs()
    for source, target in zip(pages_here, pages_there, strict=True):
        ctypes.memmove(
            page_target.address + target * page_target.block_bytes,
            page_run.address + source * page_run.block_bytes,
            page_run.block_bytes,
        )
    ctypes.memmove(
        slab_target.address + 2 * slab_target.block_bytes,
        slab_run.address + 4 * slab_run.block_bytes,
        slab_run.block_bytes,
    )
    moved = await follow(there, 2, pages_there, length, 30, sampling)
    stayed = await follow(here, 4, pages_here, length, 30, sampling)
    assert moved == stayed
    assert 0 <= first < 320
    await here.aclose()
    await there.aclose()


async def test_prompts_in_one_step_get_the_tokens_that_they_get_alone(checkpoint: Path) -> None:
    """More rows than one pass can stage, a prompt that goes on, one that is not at its end, and one that is drawn."""
    device = await open_torch_device(config_for(checkpoint), ignore, poison=True)
    texts = [random_ids(length, 320, seed=length) for length in (30, 3, 28, 12)]
    asks = [Sampling(), Sampling(temperature=0.9, seed=5), None, Sampling()]
    pages = [tuple(range(1 + 5 * place, 6 + 5 * place)) for place in range(4)]

    def chunk(place: int, start: int, end: int, sampling: Sampling | None) -> PrefillChunk:
        ids = memoryview(texts[place][start:end].astype("<i4").tobytes())
        return PrefillChunk(place + 1, place, start, ids, pages[place], sampling)

    async def run(step: int, *chunks: PrefillChunk) -> tuple[int | None, ...]:
        return (await device.wait(device.submit(StepPlan(step, chunks, ())))).chunk_tokens

    begin = chunk(0, 0, 16, None)
    chunks = [chunk(0, 16, 30, asks[0]), *(chunk(place, 0, len(texts[place]), asks[place]) for place in (1, 2, 3))]
    alone = [await run(1, begin), *[await run(step + 2, one) for step, one in enumerate(chunks)]]
    await run(10, begin)
    together = await run(11, *chunks)
    assert alone == [(None,), *((token,) for token in together)]
    assert together[2] is None and None not in (together[0], together[1], together[3])
    await device.aclose()


async def test_forbidden_ends_do_not_come(checkpoint: Path) -> None:
    device = await open_torch_device(config_for(checkpoint), ignore)
    ids = random_ids(12, 320, seed=5)
    pages = (1, 2, 3)
    free = await prefill(device, ids, 0, pages, Sampling())
    held = await prefill(device, ids, 0, pages, Sampling(min_tokens=1, stop_ids=(free,)))
    assert held != free
    await device.aclose()


async def test_defaults_hold_every_row_at_full_length(checkpoint: Path) -> None:
    config = dataclasses.replace(config_for(checkpoint), num_pages=0, num_slabs=0)
    device = await open_torch_device(config, ignore)
    # 4 rows of 128 tokens in pages of 8; two slabs a row.
    assert device.info.num_pages == 64
    assert device.info.num_slabs == 8
    await device.aclose()


async def test_layouts_that_differ_have_other_digests(checkpoint: Path) -> None:
    config = config_for(checkpoint)
    digests = set()
    for changed in (
        config,
        dataclasses.replace(config, page_tokens=16),
        dataclasses.replace(config, kv_dtype="bfloat16"),
    ):
        device = await open_torch_device(changed, ignore)
        digests.add(device.info.layout_digest)
        await device.aclose()
    assert len(digests) == 3


async def test_what_can_not_be_opened_is_a_config_error(checkpoint: Path, tmp_path: Path) -> None:
    config = config_for(checkpoint)
    with pytest.raises(ConfigError, match="device must be 'cpu'"):
        await open_torch_device(dataclasses.replace(config, device="cuda:0"), ignore)
    with pytest.raises(ConfigError, match="page_tokens must be a multiple of 2"):
        await open_torch_device(dataclasses.replace(config, page_tokens=9), ignore)
    with pytest.raises(ConfigError, match=r"config\.json"):
        await open_torch_device(dataclasses.replace(config, model=str(tmp_path)), ignore)


async def test_the_loop_runs_while_a_step_computes(checkpoint: Path) -> None:
    device = await open_torch_device(config_for(checkpoint), ignore)
    ids = random_ids(32, 320)
    chunk = PrefillChunk(1, 0, 0, memoryview(ids.astype("<i4").tobytes()), (1, 2, 3, 4), Sampling())
    ticket = device.submit(StepPlan(1, (chunk,), ()))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await device.wait(ticket)
        nursery.cancel_scope.cancel()
    assert turns > 1
    await device.aclose()
