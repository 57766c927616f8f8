"""Pushes with checksums between real ranks: one flipped bit anywhere is named, and its request goes on all the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from engine.settings import resolve_config
from tests.actors.head_process import HeadProcess, is_gone, talking_client, wait_for
from tests.e2e.duo import Duo, open_duo
from tests.e2e.prompts import fresh_seed, random_ids
from tests.e2e.truth import Truth
from transport.messages import RequestFailed, RequestFinished
from transport.nixl_fabric import is_available

needs_nixl = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")
FABRICS = ["memory", "tcp", pytest.param("nixl", marks=needs_nixl)]
FLIPPING_RANK = str(Path(__file__).with_name("flipping_rank.py"))


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_flipped_bit_is_named_before_it_becomes_a_token(fabric: str) -> None:
    rng = random.Random(fresh_seed())
    spoilt: list[int] = []

    def flip(duo: Duo, blocks: Sequence[int]) -> None:
        if not spoilt and len(duo.requests) == 2:
            block = rng.choice(blocks)
            arena, num_pages = duo.decode.device.model.arena, duo.decode.info.num_pages
            block_bytes = arena.page_bytes_of(block) if block < num_pages else arena.slab_bytes_of(block - num_pages)
            block_bytes[rng.randrange(len(block_bytes))] ^= 1 << rng.randrange(8)
            spoilt.append(block)

    truth = Truth()
    async with open_duo(fabric, chunk_tokens=128, spoil=flip, checksums=True) as duo:
        sound, bad, after = (
            duo.make_request(random_ids(rng, length), max_tokens=6, ignore_eos=True) for length in (300, 300, 140)
        )
        for request in (sound, bad, after):
            duo.requests = {r.number: r for r in (sound, bad, after) if r.number <= request.number}
            await duo.complete([request])
    assert spoilt and bad.failed is not None and bad.failed.code == "kv_corrupt" and bad.failed.retryable
    assert "that prefill rank 0 pushed for request 2" in bad.failed.message
    assert "(1 of 3 pushes are corrupt)" in bad.failed.message
    assert not bad.tokens and bad.started is None and bad.number not in duo.decode.arrived
    for request in (sound, after):
        assert not truth.judge(request, [64], duo.decode.arrived[request.number]).wrong


async def test_a_bit_that_flips_on_the_wire_between_processes_costs_an_attempt_and_no_token(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    sets = [
        "fabric=tcp", "checksum_pushes=true", "limits.prefill_chunk_tokens=128", "num_pages=200",
        "max_model_tokens=1024", "limits.snapshot_s=50ms", "log.format=json", f"admin.dir={directory}",
    ]  # fmt: skip
    config = resolve_config(None, flags={}, sets=sets, environ={}).config
    assert config.checksum_pushes
    rng = random.Random(fresh_seed())
    prompt = random_ids(rng, 300)
    # Three pushes for each attempt: one of the first attempt's is bad, the second attempt is sound.
    head = HeadProcess(config, tmp_path / "log", {"FLIP_PUSHES": "0:2"}, fake=FLIPPING_RANK)
    try:
        await wait_for_ready(head)
        async with talking_client(head) as client:
            client.submit(1, prompt, max_tokens=8, ignore_eos=True)
            end = await client.end_of(1, 60)
            assert isinstance(end, RequestFailed) and end.code == "kv_corrupt" and end.retryable and end.definite
            assert 1 not in client.tokens and 1 not in client.starts
            client.submit(2, prompt, max_tokens=8, ignore_eos=True)
            client.submit(3, prompt, max_tokens=8, ignore_eos=True)
            assert isinstance(await client.end_of(2, 60), RequestFinished)
            assert isinstance(await client.end_of(3, 60), RequestFinished)
            assert client.tokens[2] == client.tokens[3] and len(client.tokens[2]) == 8
            with trio.fail_after(5):
                while (found := await count_corrupt(head)) != [0, 1]:
                    assert not found or max(found) <= 1
                    await trio.sleep(0.02)
        (told,) = head.named("handoff.corrupt")
        assert told["level"] == "error" and (told["origin"], told["generation"], told["attempt"]) == (0, 1, 1)
        assert (told["first"], told["pages"]) == (2, 2) and told["sent"] != told["arrived"]
    finally:
        head.process.terminate()
        head.process.wait(20)
    assert all(is_gone(event["pid"]) for event in head.named("rank.start"))


async def wait_for_ready(head: HeadProcess) -> None:
    """The ranks load a model, which takes longer than fake ones."""
    await wait_for(lambda: head.named("head.ready") or None, 60, lambda: head.log.read_text()[-2000:])


async def count_corrupt(head: HeadProcess) -> list[int]:
    """What the ranks' snapshots say, by rank."""
    status = await head.status()
    return [rank.snapshot.corrupt_pushes for rank in status.ranks if rank.snapshot is not None]
