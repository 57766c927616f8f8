"""What every Device does, whatever computes: order, two queued steps, cancelled waits, failures, one text per seed.

An implementation joins by adding a factory to FACTORIES: a context manager that yields a device of at least 32 pages
and 4 slabs, of 8 tokens a page and 64 a sequence, with a vocabulary of at least 64 ids, and at least 3 drafts a row or
none.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import trio

from engine.config import DraftConfig, Limits, RankConfig
from engine.core.plan import Base, DecodeRow, DecodeRows, PrefillChunk, StepPlan, build_roster
from engine.errors import DeviceError, LocalProtocolError
from engine.model.device import TorchDevice, open_torch_device
from engine.model.ops import reference_ops
from engine.model.step_loading import load_step_model
from engine.model.step_model import StepModel
from engine.ports import Device
from engine.sim.device import SimDevice
from tests.model.paged_cases import write_checkpoint
from tests.model.test_paged_drafts import small_ahead_config
from transport.blocks import view_memory
from transport.messages import Sampling

Opened = Callable[[], AbstractAsyncContextManager[Device]]

GREEDY = Sampling()
PROMPT = np.arange(5, 25, dtype="<i4")


@asynccontextmanager
async def open_cpu(directory: Path) -> AsyncIterator[Device]:
    config = RankConfig(
        role="decode",
        model=str(directory),
        device="cpu",
        fabric="tcp",
        page_tokens=8,
        max_model_tokens=64,
        num_pages=32,
        num_slabs=6,
        kv_dtype="float32",
        threads=1,
        replay_rows=0,
        config_digest="0",
        limits=Limits(prefill_chunk_tokens=32),
    )
    phases: list[tuple[str, int, int, str]] = []
    device = await open_torch_device(config, lambda *phase: phases.append(phase), poison=True)
    assert {phase[0] for phase in phases} == {"weights", "arena", "warmup"}
    assert all(0 <= done <= total for _, done, total, _ in phases)
    try:
        yield device
    finally:
        await device.aclose()


@asynccontextmanager
async def open_sim(directory: Path) -> AsyncIterator[Device]:
    sizes = {"num_pages": 32, "num_slabs": 6, "page_tokens": 8, "max_model_tokens": 64}
    device = SimDevice(**sizes, max_drafts=5, draft_share=0.7, has_trail=True)
    try:
        yield device
    finally:
        await device.aclose()


@asynccontextmanager
async def open_step(directory: Path, device: str) -> AsyncIterator[Device]:
    """The step on a device; on a CPU by the kernels' plain truth."""
    config = RankConfig(
        role="decode",
        model=str(directory / "v4"),
        device="cuda",
        fabric="nixl",
        page_tokens=8,
        max_model_tokens=64,
        num_pages=32,
        num_slabs=6,
        kv_dtype="float32",
        threads=1,
        replay_rows=0,
        config_digest="0",
        limits=Limits(prefill_chunk_tokens=32, decode_rows=4),
        # Many more graphs: `tests/model/test_step_drafts.py` has them on a GPU, once.
        draft=DraftConfig(tokens=3 if device == "cpu" else 0, max_rows=4),
    )
    on_gpu = device == "cuda"
    model, info = await trio.to_thread.run_sync(
        lambda: load_step_model(
            config,
            lambda *_: None,
            torch.device(device),
            poison=True,
            ops=None if on_gpu else reference_ops(),
            prompt_rows=(16,),
        )
    )
    opened = TorchDevice(
        model,
        info,
        proposer=model.drafter,
        read_checksums=model.arena.read_checksums,
        gpu=0 if on_gpu else None,
    )
    try:
        yield opened
    finally:
        await opened.aclose()


FACTORIES: dict[str, Callable[[Path], AbstractAsyncContextManager[Device]]] = {
    "sim": open_sim,
    "torch-cpu": open_cpu,
    "step-cpu": lambda directory: open_step(directory, "cpu"),
    "step-cuda": lambda directory: open_step(directory, "cuda"),
}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    (directory / "v4").mkdir()
    config = small_ahead_config()
    config["compress_ratios"] = [0, 4, 8, 4, 8, 0]
    write_checkpoint(directory / "v4", config=config)
    return directory


@pytest.fixture(params=[pytest.param(name, marks=ON_GPU if name == "step-cuda" else []) for name in sorted(FACTORIES)])
def opened(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Opened]:
    factory = FACTORIES[request.param]
    yield lambda: factory(checkpoint)


def prefill(
    step: int,
    slab: int = 0,
    *,
    start: int = 0,
    stop: int | None = None,
    pages: tuple[int, ...] = (3, 4, 9, 7),
    sample: Sampling | None = GREEDY,
) -> StepPlan:
    tokens = memoryview(PROMPT[start:stop].tobytes())
    return StepPlan(step, (PrefillChunk(1, slab, start, tokens, pages, sample),), ())


def decode(
    step: int,
    position: int,
    token: int | None,
    slab: int = 0,
    *,
    pages: tuple[int, ...] = (3, 4, 9, 7),
    sampling: Sampling = GREEDY,
) -> StepPlan:
    return StepPlan(step, (), (DecodeRow(1, slab, position, token, pages, sampling),))


async def test_the_description_agrees_with_the_block_table(opened: Opened) -> None:
    async with opened() as device:
        info = device.info
        pages, slabs = device.block_runs()
        assert (pages.block_bytes, pages.count) == (info.page_bytes, info.num_pages)
        assert (slabs.block_bytes, slabs.count) == (info.slab_bytes, info.num_slabs)
        assert pages.address + info.page_bytes * info.num_pages <= slabs.address
        assert info.page_tokens == 8 and info.vocab_size >= 64 and info.eos_ids


async def test_a_prompt_then_tokens_each_fed_by_the_one_before(opened: Opened) -> None:
    async with opened() as device:
        first = await device.wait(device.submit(prefill(1)))
        assert first.step == 1 and first.row_tokens == () and first.device_us > 0
        token = first.chunk_tokens[0]
        assert token is not None
        told = []
        for at in range(20, 28):
            result = await device.wait(device.submit(decode(at, at, token)))
            (token,) = result.row_tokens
            told.append(token)
        # The same text when the host never says the token, with two steps in the queue.
        await device.wait(device.submit(prefill(50)))
        untold, waiting = [], [device.submit(decode(60, 20, None))]
        for at in range(21, 28):
            waiting.append(device.submit(decode(40 + at, at, None)))
            untold.extend((await device.wait(waiting.pop(0))).row_tokens)
        untold.extend((await device.wait(waiting.pop(0))).row_tokens)
        assert untold == told


async def test_chunks_without_sampling_return_none_and_continue(opened: Opened) -> None:
    async with opened() as device:
        whole = await device.wait(device.submit(prefill(1)))
        part = await device.wait(device.submit(prefill(2, 1, stop=8, pages=(11, 12, 13), sample=None)))
        assert part.chunk_tokens == (None,)
        rest = await device.wait(device.submit(prefill(3, 1, start=8, pages=(11, 12, 13))))
        assert rest.chunk_tokens == whole.chunk_tokens


async def test_chunks_and_rows_share_a_step(opened: Opened) -> None:
    async with opened() as device:
        alone = await device.wait(device.submit(prefill(1)))
        expected = await device.wait(device.submit(decode(2, 20, alone.chunk_tokens[0])))
        await device.wait(device.submit(prefill(3)))
        chunk = prefill(4, 2, pages=(20, 21, 22)).chunks
        both = await device.wait(device.submit(StepPlan(4, chunk, decode(4, 20, None).rows)))
        assert both.chunk_tokens == alone.chunk_tokens
        assert [*both.row_tokens] == [*expected.row_tokens]


async def test_a_seed_gives_one_text_and_another_seed_another(opened: Opened) -> None:
    async with opened() as device:

        async def text(slab: int, pages: tuple[int, ...], seed: int) -> list[int]:
            sampling = Sampling(temperature=1.0, seed=seed)
            result = await device.wait(device.submit(prefill(1, slab, pages=pages, sample=sampling)))
            tokens = [result.chunk_tokens[0] or 0]
            for at in range(20, 30):
                step = decode(at, at, None, slab, pages=pages, sampling=sampling)
                tokens.extend((await device.wait(device.submit(step))).row_tokens)
            return tokens

        one = await text(0, (3, 4, 9, 7), 5)
        assert await text(1, (13, 14, 15, 16), 5) == one
        assert await text(1, (13, 14, 15, 16), 6) != one


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, seed=5), Sampling(min_tokens=40)])
async def test_drafts_change_how_many_tokens_come_and_not_which(opened: Opened, sampling: Sampling) -> None:
    num = 11

    def plan(step: int, position: int, token: int, drafts: int) -> StepPlan:
        roster = build_roster(np.array([1]), np.array([0]), ((3, 4, 9, 7),), (sampling,))
        roster = dataclasses.replace(roster, ends=np.array([20 + num]))
        return StepPlan(step, (), DecodeRows(roster, np.array([position]), np.array([token])), drafts=drafts)

    texts = []
    for drafts in (0, 1, 3):
        async with opened() as device:
            if not device.info.max_drafts:
                pytest.skip("this device drafts nothing")
            assert device.info.max_drafts >= 3
            (token,) = (await device.wait(device.submit(prefill(1, sample=sampling)))).chunk_tokens
            assert token is not None
            text, step, last_counts = [token], 2, (1,)
            tickets = [device.submit(plan(2, 20, token, drafts)), device.submit(plan(3, -1, -1, drafts))]
            while last_counts != (0,):
                result = await device.wait(tickets.pop(0))
                step += 1
                assert result.step == step - 1
                # Only a step that may verify drafts, or whose rows the device has placed, needs to say counts.
                counts = result.row_counts if result.row_counts is not None else (1,)
                proposed = result.row_proposed if result.row_proposed is not None else (0,)
                assert (result.row_counts is None) == (drafts == 0 and step == 3)
                assert sum(counts) == len(result.row_tokens) and 0 <= counts[0] <= proposed[0] + 1 <= drafts + 1
                assert proposed[0] == 0 or not sampling.min_tokens
                text += list(result.row_tokens)
                last_counts = tuple(counts)
                tickets.append(device.submit(plan(step + 1, -1, -1, drafts)))
            assert len(text) == num + 1
            texts.append(text)
    assert texts[1] == texts[0] and texts[2] == texts[0]


async def test_tokens_are_read_before_submit_returns(opened: Opened) -> None:
    async with opened() as device:
        expected = await device.wait(device.submit(prefill(1)))
        lent = bytearray(PROMPT.tobytes())
        plan = StepPlan(2, (PrefillChunk(1, 0, 0, memoryview(lent), (3, 4, 9), GREEDY),), ())
        ticket = device.submit(plan)
        lent[:] = bytes(len(lent))
        assert (await device.wait(ticket)).chunk_tokens == expected.chunk_tokens


async def test_a_cancelled_wait_stops_nothing_and_may_be_repeated(opened: Opened) -> None:
    async with opened() as device:
        expected = await device.wait(device.submit(prefill(1)))
        ticket = device.submit(prefill(2))
        with trio.CancelScope() as scope:
            scope.cancel()
            await device.wait(ticket)
        assert scope.cancelled_caught
        result = await device.wait(ticket)
        assert result.chunk_tokens == expected.chunk_tokens
        assert await device.wait(ticket) == result


async def test_a_third_queued_step_is_a_bug_of_the_caller(opened: Opened) -> None:
    async with opened() as device:
        tickets = [device.submit(prefill(1)), device.submit(prefill(2))]
        with pytest.raises(LocalProtocolError, match="limit 2"):
            device.submit(prefill(3))
        assert [(await device.wait(ticket)).step for ticket in tickets] == [1, 2]
        assert (await device.wait(device.submit(prefill(4)))).step == 4


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (prefill(7, pages=(3, 4, 999)), "page id"),
        (prefill(7, slab=99), "slab"),
        (prefill(7, pages=(3, 4)), "pages"),
        (StepPlan(7, (), (*decode(7, 20, 5).rows, *decode(7, 20, 5, 1, pages=(8, 9)).rows)), "than the 2 given"),
        (decode(7, 20, 1 << 20), "token id"),
        (decode(7, 70, 5, pages=tuple(range(16))), "max_model_tokens"),
    ],
)
async def test_a_failed_step_says_why_and_ends_the_device(opened: Opened, plan: StepPlan, complaint: str) -> None:
    async with opened() as device:
        bad, after = device.submit(plan), device.submit(prefill(8))
        with pytest.raises(DeviceError, match=complaint):
            await device.wait(bad)
        with pytest.raises(DeviceError, match="step 8"):
            await device.wait(after)
        with pytest.raises(DeviceError, match="step 9"):
            device.submit(prefill(9))


async def test_closing_finishes_what_is_queued(opened: Opened) -> None:
    async with opened() as device:
        tickets = [device.submit(prefill(1)), device.submit(prefill(2))]
        await device.aclose()
        with trio.fail_after(5):
            assert [(await device.wait(ticket)).step for ticket in tickets] == [1, 2]
        with pytest.raises(DeviceError, match="closed"):
            device.submit(prefill(3))


def read(device: Device, block: int) -> bytes:
    """A block's bytes, pages first, then slabs, whatever memory they are in."""
    if isinstance(device, TorchDevice) and isinstance(device.model, StepModel):
        return device.model.arena.block_bytes_of(block).cpu().numpy().tobytes()
    return bytes(_view(device, block))


def flip(device: Device, block: int) -> None:
    """Changes one bit of a block."""
    if isinstance(device, TorchDevice) and isinstance(device.model, StepModel):
        device.model.arena.block_bytes_of(block)[1] ^= 1
    else:
        _view(device, block)[1] ^= 1


def _view(device: Device, block: int) -> memoryview:
    pages, slabs = device.block_runs()
    run, at = (pages, block) if block < pages.count else (slabs, block - pages.count)
    return view_memory(run.address + at * run.block_bytes, run.block_bytes)


async def test_a_checksum_is_that_of_the_bytes_in_order(opened: Opened) -> None:
    async with opened() as device:
        await device.wait(device.submit(prefill(1)))
        slab = device.info.num_pages
        wanted = zlib.crc32(read(device, 9), zlib.crc32(read(device, 4), zlib.crc32(read(device, 3))))
        with_slab = zlib.crc32(read(device, slab), wanted)
        one, other, whole = await device.checksums([((3, 4, 9), -1), ((3, 9, 4), -1), ((3, 4, 9), 0)])
        assert (one, whole) == (wanted, with_slab) and other != wanted
        flip(device, slab)
        again, changed = await device.checksums([((3, 4, 9), -1), ((3, 4, 9), 0)])
        assert again == wanted and changed != with_slab


async def test_a_checksum_is_computed_while_steps_are_queued(opened: Opened) -> None:
    async with opened() as device:
        await device.wait(device.submit(prefill(1)))
        before = await device.checksums([((3,), -1)])
        tickets = [device.submit(prefill(2, 1, pages=(10, 11, 12, 13))), device.submit(decode(3, 20, None))]
        assert await device.checksums([((3,), -1)]) == before
        for ticket in tickets:
            await device.wait(ticket)


async def test_whatever_a_request_may_ask_of_sampling_is_taken(opened: Opened) -> None:
    """A device tells log-probabilities or does not, but refuses nothing that another one computes."""
    asks = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=30,
        seed=3,
        min_tokens=2,
        stop_ids=(9,),
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        bias_ids=(7, 8),
        biases=(1.0, -100.0),
        logprobs=4,
        prompt_logprobs=2,
    )
    async with opened() as device:
        ids = memoryview(PROMPT.tobytes())
        chunk = PrefillChunk(1, 0, 0, ids, (3, 4, 9, 7), asks, ids, 3, ids[4:68], 2)
        first = await device.wait(device.submit(StepPlan(1, (chunk,), ())))
        assert first.chunk_tokens[0] is not None
        for at in range(20, 25):
            result = await device.wait(device.submit(decode(at, at, None, sampling=asks)))
            assert len(result.row_tokens) == 1
            if result.row_scores is not None:
                assert result.row_scores.rows.tolist() == [0] and result.row_scores.counts.tolist() == [4]
                assert (result.row_scores.top_logprobs <= 0).all()
        for at, scores in first.target_scores:
            assert at == 0 and scores.rows.tolist() == list(range(1, 17)) and len(scores.top_ids) == 32


@pytest.mark.parametrize("cut", [5, 8, 13, 16, 20])
async def test_a_prompt_goes_on_from_kept_state_as_from_its_own(opened: Opened, cut: int) -> None:
    """Inside a page and at its end; two prompts on one base in a step, which part from what was kept."""
    texts = [np.concatenate((PROMPT[:cut], np.array(more, "<i4"))) for more in ([30, 31, 32], [33])]

    def chunk(request: int, slab: int, start: int, pages: tuple[int, ...], base: Base | None) -> PrefillChunk:
        ids = texts[request - 2][start:]
        return PrefillChunk(request, slab, start, memoryview(ids.tobytes()), pages, GREEDY, base=base)

    async def answer(device: Device, first: int, tokens: list[int | None], tables: list[tuple[int, ...]]) -> list[int]:
        found = [token for token in tokens if token is not None]
        for step in range(3):
            rows = [
                DecodeRow(2 + at, 1 + at, len(texts[at]) + step, None, tables[at], GREEDY) for at in range(2)
            ]  # fmt: skip
            found += (await device.wait(device.submit(StepPlan(first + step, (), tuple(rows))))).row_tokens
        return found

    async with opened() as device:
        plan = prefill(1, stop=cut)
        kept = dataclasses.replace(plan.chunks[0], keep=3)
        await device.wait(device.submit(StepPlan(1, (kept,), ())))
        whole = cut // 8
        tables = [((3, 4, 9, 7)[:whole] + own)[:4] for own in ((20, 21, 22, 23), (24, 25, 26, 27))]
        base = Base(3, (3, 4, 9, 7)[whole] if cut % 8 else -1)
        chunks = tuple(chunk(2 + at, 1 + at, cut, tables[at], base) for at in range(2))
        result = await device.wait(device.submit(StepPlan(2, chunks, ())))
        warm = await answer(device, 3, list(result.chunk_tokens), tables)
    async with opened() as device:
        tables = [(20, 21, 22, 23), (24, 25, 26, 27)]
        chunks = tuple(chunk(2 + at, 1 + at, 0, tables[at], None) for at in range(2))
        result = await device.wait(device.submit(StepPlan(1, chunks, ())))
        assert await answer(device, 2, list(result.chunk_tokens), tables) == warm


@pytest.mark.parametrize("spilt", [0, 1, 8])
@pytest.mark.parametrize("told", [2, 4, 5])
async def test_a_prompt_goes_on_from_the_end_of_a_turn_though_steps_behind_it_ran(
    opened: Opened, told: int, spilt: int
) -> None:
    """The next turn of a conversation, on the slab and the pages in which the one before was generated."""
    pages, own = (3, 4, 9, 7), (20, 21, 22, 23, 24)

    async def answer(device: Device, step: int, ids: list[int], start: int, table: tuple[int, ...], base: Base | None):
        part = memoryview(np.array(ids[start:], "<i4").tobytes())
        chunk = PrefillChunk(2, 1, start, part, table, GREEDY, base=base)
        found = list((await device.wait(device.submit(StepPlan(step, (chunk,), ())))).chunk_tokens)
        for at in range(3):
            row = DecodeRow(2, 1, len(ids) + at, None, table, GREEDY)
            found += (await device.wait(device.submit(StepPlan(step + 1 + at, (), (row,))))).row_tokens
        return found

    async with opened() as device:
        result = await device.wait(device.submit(prefill(1)))
        tokens = [token for token in result.chunk_tokens if token is not None]
        for at in range(told - 1 + spilt):
            tokens += (await device.wait(device.submit(decode(2 + at, 20 + at, None)))).row_tokens
        ids = [*PROMPT.tolist(), *tokens[:told], 30, 31, 32]
        end = 20 + told - 1
        base = Base(0, pages[end // 8] if end % 8 else -1)
        warm = await answer(device, 30, ids, end, (*pages[: end // 8], *own)[:5], base)
    async with opened() as device:
        assert await answer(device, 1, ids, 0, own, None) == warm
