"""Steps launched ahead, in turns with those that are not: the same tokens, in order, whatever comes between."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from engine.config import Limits, RankConfig
from engine.core.plan import DecodeRow, DecodeRows, PrefillChunk, StepPlan, StepResult, build_roster
from engine.errors import DeviceError
from engine.model.device import TorchDevice
from engine.model.ops import reference_ops
from engine.model.pipeline import Pipeline
from engine.model.step_greedy import SizedGreedy
from engine.model.step_loading import load_step_model
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo
from tests.model.paged_cases import small_v4_config, write_checkpoint
from tests.model.test_step_model import DEVICES
from transport.messages import Sampling

CYCLES, SHORTEST_US = 400_000_000, 100_000
"""What a GPU may be kept busy with, and how long that takes at least: none of them has a clock of 4 GHz."""
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.8, seed=4)
PAGES = ((0, 1, 2, 3), (4, 5, 6, 7))
PROMPTS = (np.arange(5, 25, dtype="<i4"), np.arange(40, 52, dtype="<i4"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, config=small_v4_config())
    return directory


@pytest.fixture(params=DEVICES)
def loaded(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[StepModel, DeviceInfo]:
    config = RankConfig(
        role="decode", model=str(checkpoint), device="cuda", fabric="nixl", page_tokens=16, max_model_tokens=64,
        num_pages=8, num_slabs=4, kv_dtype="float32", threads=1, replay_rows=0, config_digest="0",
        limits=Limits(decode_rows=4),
    )  # fmt: skip
    ops = None if request.param == "cuda" else reference_ops()
    place = torch.device(request.param)
    return load_step_model(config, lambda *_: None, place, poison=True, ops=ops, prompt_rows=(16,))


def start(model: StepModel, info: DeviceInfo) -> TorchDevice:
    gpu = model.arena.bytes.device.index
    return TorchDevice(model, info, read_checksums=model.arena.read_checksums, gpu=gpu)


async def fill(device: TorchDevice) -> list[int]:
    """Both prompts in their slabs; the tokens after them."""
    told = []
    for slab, ids in enumerate(PROMPTS):
        chunk = PrefillChunk(slab, slab, 0, memoryview(ids.tobytes()), PAGES[slab], GREEDY)
        (token,) = (await device.wait(device.submit(StepPlan(slab + 1, (chunk,), ())))).chunk_tokens
        assert token is not None
        told.append(token)
    return told


def rows(step: int, at: Sequence[int], settings: Sequence[Sampling], tokens: Sequence[int | None]) -> StepPlan:
    return StepPlan(
        step,
        (),
        tuple(
            DecodeRow(slab, slab, position, tokens[slab], PAGES[slab], settings[slab])
            for slab, position in enumerate(at)
        ),
    )


async def run_steps(
    device: TorchDevice, settings: Sequence[tuple[Sampling, Sampling]], first: Sequence[int | None]
) -> list[list[int]]:
    """Two in the queue, each with the rows' next positions and the settings of its number."""
    at = [len(ids) for ids in PROMPTS]
    found: list[StepResult] = []
    tickets = []
    for number, pair in enumerate(settings):
        tokens = first if number == 0 else (None, None)
        tickets.append(device.submit(rows(10 + number, [each + number for each in at], pair, tokens)))
        if len(tickets) == 2:
            found.append(await device.wait(tickets.pop(0)))
    for ticket in tickets:
        found.append(await device.wait(ticket))
    assert [result.step for result in found] == [10 + number for number in range(len(settings))]
    assert all(result.row_counts is None and result.device_us >= 0 for result in found)
    return [list(result.row_tokens) for result in found]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps end some looks after they were launched, as on a GPU; how many were under way at each look."""
    looks: collections.Counter[int] = collections.Counter()
    under_way: list[int] = []

    def has_ended(pipeline: Pipeline) -> bool:
        under_way.append(len(pipeline))
        looks[pipeline._launched[0].step] += 1
        return looks[pipeline._launched[0].step] > 50

    monkeypatch.setattr(Pipeline, "has_ended", property(has_ended))
    return under_way


MIXED = [(GREEDY, GREEDY), (GREEDY, GREEDY), (GREEDY, DRAWN), (GREEDY, GREEDY), (DRAWN, GREEDY), (GREEDY, GREEDY)]


async def test_steps_ahead_and_others_take_turns(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch, late: list[int]
) -> None:
    model, info = loaded
    texts = []
    for is_ahead in (True, False):
        model.arena.poison()
        device = start(model, info)
        try:
            launched = 0
            assert device._pipeline is not None
            launch, accepts = device._pipeline.launch, device._pipeline.accepts

            def count(job, launch=launch) -> None:
                nonlocal launched
                launched += 1
                launch(job)

            monkeypatch.setattr(device._pipeline, "launch", count)
            monkeypatch.setattr(device._pipeline, "accepts", lambda job, on=is_ahead, ask=accepts: on and ask(job))
            texts.append(await run_steps(device, MIXED, await fill(device)))
            assert launched == (4 if is_ahead else 0)
        finally:
            await device.aclose()
    assert texts[0] == texts[1]
    assert max(late) == 2


async def test_a_step_that_can_not_be_launched_fails_in_its_turn(loaded: tuple[StepModel, DeviceInfo]) -> None:
    model, info = loaded
    device = start(model, info)
    try:
        first = await fill(device)
        good = device.submit(rows(10, [20, 12], (GREEDY, GREEDY), first))
        row = DecodeRow(0, 0, 21, None, (0, 1, 2, 99), GREEDY)
        bad = device.submit(StepPlan(11, (), (row,)))
        with trio.fail_after(20):
            assert len((await device.wait(good)).row_tokens) == 2
            with pytest.raises(DeviceError, match=r"step 11 failed: DeviceError: a page id is outside 0\.\.7"):
                await device.wait(bad)
        with pytest.raises(DeviceError, match="step 12 can not run"):
            device.submit(rows(12, [21, 13], (GREEDY, GREEDY), (None, None)))
    finally:
        await device.aclose()


async def test_what_a_device_dies_of_is_told_to_all_that_is_under_way(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch, late: list[int]
) -> None:
    model, info = loaded
    device = start(model, info)
    first = await fill(device)

    def die(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(model.arena, "note_sampled", die)
    tickets = [
        device.submit(rows(10, [20, 12], (GREEDY, GREEDY), first)),
        device.submit(rows(11, [21, 13], (GREEDY, GREEDY), (None, None))),
    ]
    with trio.fail_after(20):
        for ticket in tickets:
            with pytest.raises(DeviceError, match="failed: RuntimeError: an illegal memory access"):
                await device.wait(ticket)
    assert max(late) == 2
    with pytest.raises(DeviceError, match="step 12 can not run"):
        device.submit(rows(12, [22, 14], (GREEDY, GREEDY), (None, None)))
    await device.aclose()


async def test_what_a_look_dies_of_is_told(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to hear of a launched step's failure is whoever asks whether it has ended."""
    model, info = loaded
    device = start(model, info)
    first = await fill(device)

    def die(_: Pipeline) -> bool:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Pipeline, "has_ended", property(die))
    ticket = device.submit(rows(10, [20, 12], (GREEDY, GREEDY), first))
    with trio.fail_after(20), pytest.raises(DeviceError, match="step 10 failed: RuntimeError: an illegal"):
        await device.wait(ticket)
    await device.aclose()


@pytest.mark.parametrize("sampling", [None, GREEDY])
async def test_a_chunk_is_told_once_its_pages_are_written(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch, sampling: Sampling | None
) -> None:
    """Its pages are pushed then, so the host must have seen the end of what wrote them: also if nothing is sampled."""
    model, info = loaded
    done: list[str] = []
    forward, settle = model.forward, model.settle
    monkeypatch.setattr(model, "forward", lambda *given: (done.append("forward"), forward(*given))[1])
    monkeypatch.setattr(model, "settle", lambda: (done.append("settle"), settle())[1])
    device = start(model, info)
    chunk = PrefillChunk(0, 0, 0, memoryview(PROMPTS[0][:16].tobytes()), PAGES[0], sampling)
    await device.wait(device.submit(StepPlan(1, (chunk,), ())))
    assert done == ["forward", "settle"]
    await device.aclose()


@pytest.mark.parametrize("loaded", [DEVICES[1]], indirect=True)
async def test_a_gpu_has_written_the_pages_of_a_chunk_that_is_told(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, info = loaded
    forward = model.forward

    def forward_slowly(*given: Any) -> torch.Tensor:
        logits = forward(*given)
        torch.cuda._sleep(CYCLES)
        return logits

    monkeypatch.setattr(model, "forward", forward_slowly)
    device = start(model, info)
    chunk = PrefillChunk(0, 0, 0, memoryview(PROMPTS[0][:16].tobytes()), PAGES[0], None)
    result = await device.wait(device.submit(StepPlan(1, (chunk,), ())))
    assert torch.cuda.default_stream().query()
    assert result.device_us > SHORTEST_US
    await device.aclose()


async def test_what_is_under_way_ends_before_the_device_closes(
    loaded: tuple[StepModel, DeviceInfo], late: list[int]
) -> None:
    model, info = loaded
    device = start(model, info)
    first = await fill(device)
    tickets = [
        device.submit(rows(10, [20, 12], (GREEDY, GREEDY), first)),
        device.submit(rows(11, [21, 13], (GREEDY, GREEDY), (None, None))),
    ]
    await device.aclose()
    with trio.fail_after(20):
        assert [len((await device.wait(ticket)).row_tokens) for ticket in tickets] == [2, 2]


async def test_steps_in_a_busy_device_s_queue_keep_what_each_was_told(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens, places and tables for each: nothing that the device still has to read is written again."""
    model, info = loaded
    turned = (DecodeRow(1, 1, 14, 9, PAGES[1], GREEDY), DecodeRow(0, 0, 22, 8, PAGES[0], GREEDY))
    plans = [
        rows(10, [20, 12], (GREEDY, GREEDY), (5, 6)),
        rows(11, [21, 13], (GREEDY, GREEDY), (7, None)),
        StepPlan(12, (), turned),
        StepPlan(13, (), (DecodeRow(0, 0, 23, None, PAGES[0], GREEDY),)),
        rows(14, [24, 15], (GREEDY, GREEDY), (None, 4)),
    ]
    launch = Pipeline.launch

    def launch_late(pipeline: Pipeline, *given: Any) -> None:
        if model.arena.bytes.device.type == "cuda":
            torch.cuda._sleep(CYCLES // 4)
        launch(pipeline, *given)

    found = []
    for is_busy in (False, True):
        model.arena.poison()
        device = start(model, info)
        await fill(device)
        if is_busy:
            monkeypatch.setattr(Pipeline, "launch", launch_late)
        tickets, told = collections.deque[Any](), []
        for plan in plans:
            tickets.append(device.submit(plan))
            if len(tickets) > is_busy:
                told.append([*(await device.wait(tickets.popleft())).row_tokens])
        told += [[*(await device.wait(ticket)).row_tokens] for ticket in tickets]
        found.append(told)
        await device.aclose()
    assert found[0] == found[1] and [len(line) for line in found[0]] == [2, 2, 2, 1, 2]


async def test_a_step_behind_one_of_the_same_rows_is_told_nothing(
    loaded: tuple[StepModel, DeviceInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And brings what it would bring if it were told all; also behind one that the host has drawn, and a new start."""
    model, info = loaded
    greedy = build_roster(np.arange(2), np.arange(2), PAGES, (GREEDY, GREEDY))
    drawn = dataclasses.replace(greedy, sampling=(DRAWN, GREEDY))
    unknown = np.full(2, -1)
    launch = SizedGreedy.launch
    told: list[int] = []

    def note(sized: SizedGreedy, *given: Any, goes_on: bool = False) -> Any:
        told.append(0 if goes_on and sized._going_on is given[2] else 1 if goes_on else 2)
        return launch(sized, *given, goes_on=goes_on)

    monkeypatch.setattr(SizedGreedy, "launch", note)
    texts = []
    for is_on in (False, True):
        told.clear()
        if is_on:
            monkeypatch.undo()
            monkeypatch.setattr(SizedGreedy, "launch", note)
        else:
            monkeypatch.setattr(Pipeline, "_goes_on", lambda *_: False)
        model.arena.poison()
        device = start(model, info)
        first = np.array(await fill(device))
        text, tickets = [], collections.deque[Any]()
        for number, roster in enumerate([greedy] * 4 + [drawn] + [greedy] * 6):
            tokens = first if number in (0, 8) else unknown
            positions = np.array([len(ids) for ids in PROMPTS]) + number
            tickets.append(device.submit(StepPlan(10 + number, (), DecodeRows(roster, positions, tokens))))
            if len(tickets) == 2:
                text.append([*(await device.wait(tickets.popleft())).row_tokens])
        text += [[*(await device.wait(ticket)).row_tokens] for ticket in tickets]
        texts.append(text)
        await device.aclose()
    assert texts[0] == texts[1]
    assert told == [2, 1, 0, 0, 2, 1, 0, 2, 1, 0]
