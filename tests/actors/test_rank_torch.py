"""Whole ranks on the real CPU device and the real clock: what is handed over continues as if one device had done it."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import trio

from engine.core.plan import DecodeRow, PrefillChunk, StepPlan
from engine.model.device import TorchDevice, open_torch_device
from tests.actors.rack import Rack, wait_done, wait_free
from tests.model.paged_cases import write_checkpoint
from tests.model.test_device import config_for, ignore
from transport.messages import Sampling


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


async def complete_alone(device: TorchDevice, ids: list[int], sampling: Sampling) -> tuple[list[int], str]:
    """One prompt on one device, one chunk of 32 after the other, one token after the other."""
    pages, tokens = tuple(range(20)), []
    for start in range(0, len(ids), 32):
        part = memoryview(array("i", ids[start : start + 32]).tobytes())
        is_last = start + 32 >= len(ids)
        chunk = PrefillChunk(1, 0, start, part, pages, sampling if is_last else None)
        result = await device.wait(device.submit(StepPlan(1, (chunk,), ())))
    while True:
        token = result.chunk_tokens[0] if result.chunk_tokens else result.row_tokens[0]
        assert token is not None
        tokens.append(token)
        if token in device.info.eos_ids:
            return tokens, "stop"
        if len(tokens) == sampling.max_tokens:
            return tokens, "length"
        row = DecodeRow(1, 0, len(ids) + len(tokens) - 1, token, pages, sampling)
        result = await device.wait(device.submit(StepPlan(1, (), (row,))))


async def test_tokens_over_two_ranks_are_those_of_one_device(checkpoint: Path) -> None:
    rng = random.Random(5)
    config = config_for(checkpoint)
    alone = await open_torch_device(config, ignore, poison=True)
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery,
            rng,
            make_device=lambda rank: open_torch_device(config, ignore, poison=True),
        )
        requests = []
        for number in range(6):
            sampling = Sampling(temperature=(number % 2) * 0.8, seed=number, max_tokens=rng.randrange(1, 20))
            request = rack.make_request(number, rng.randrange(1, 90), max_tokens=sampling.max_tokens)
            request.prompt = [rng.randrange(2, 320) for _ in request.prompt]
            request.sampling = sampling
            request.expected, request.reason = await complete_alone(alone, request.prompt, sampling)
            requests.append(request)
        await rack.start()
        for request in requests:
            rack.submit(request)
        await wait_done(requests, 60)
        assert all(request.outcome == "finished" for request in requests)
        await wait_free(rack, num_slabs=config.num_slabs)
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()
    await alone.aclose()
