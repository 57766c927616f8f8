"""A prompt's KV over the fabric: what the decode rank goes on with is, bit for bit, what one pass computes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.e2e.duo import Duo, Request, open_duo
from tests.e2e.prompts import boundary_lengths, cut, fresh_seed, page_sizes, random_ids, text_ids
from tests.e2e.truth import Truth, written_bytes
from transport.nixl_fabric import is_available

needs_nixl = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")
FABRICS = [
    pytest.param("nixl", 64, 128, 30, marks=needs_nixl),
    ("tcp", 64, 64, 32),
    ("memory", 32, 96, 32),
]


def make_requests(duo: Duo, rng: random.Random, count: int, page_tokens: int, text: Sequence[int]) -> list[Request]:
    """Half random ids, half text, all boundary lengths before any repeats; every fourth answer is drawn."""
    lengths = boundary_lengths(page_tokens)
    rng.shuffle(lengths)
    requests = []
    for place in range(count):
        length = lengths[place % len(lengths)]
        prompt = cut(rng, text, length) if place % 2 else random_ids(rng, length)
        requests.append(
            duo.make_request(
                prompt,
                max_tokens=rng.randint(2, 10),
                temperature=0.8 if place % 4 == 3 else 0.0,
                seed=rng.randrange(1 << 30),
                ignore_eos=True,
            )
        )
    return requests


async def generate_text(duo: Duo, rng: random.Random, count: int, max_tokens: int) -> list[Request]:
    """What the model itself writes after a few words of English, at temperature 1."""
    requests = [
        duo.make_request(
            cut(rng, text_ids(), rng.randint(2, 30)),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=rng.randrange(1 << 30),
            ignore_eos=True,
        )
        for _ in range(count)
    ]
    await duo.complete(requests)
    return requests


async def hand_over(fabric: str, page_tokens: int, chunk_tokens: int, count: int, *, long: Sequence[int] = ()) -> None:
    """`count` prompts over a fabric, each held against the truth; those of the lengths `long` are among them."""
    rng = random.Random(fresh_seed())
    truth = Truth(page_tokens)
    async with open_duo(fabric, page_tokens=page_tokens, chunk_tokens=chunk_tokens) as duo:
        written = await generate_text(duo, rng, 6, 64)
        text = [token for request in written for token in request.tokens]
        requests = make_requests(duo, rng, count - len(written) - len(long), page_tokens, text)
        requests += [duo.make_request(random_ids(rng, length), max_tokens=6, ignore_eos=True) for length in long]
        await duo.complete(requests)
    verdicts = []
    for request in [*written, *requests]:
        verdicts.append(truth.judge(request, page_sizes(rng, page_tokens), duo.decode.arrived[request.number]))
        assert request.started is not None and request.started.pushed_bytes > 0
    wrong = [line for verdict in verdicts for line in verdict.wrong]
    excused = [line for verdict in verdicts for line in verdict.excused]
    print(*wrong, *excused, sep="\n")
    assert not wrong
    assert len(excused) <= count // 50


@pytest.mark.parametrize(("fabric", "page_tokens", "chunk_tokens", "count"), FABRICS)
async def test_pushed_prompts_go_on_as_one_device_would(
    fabric: str, page_tokens: int, chunk_tokens: int, count: int
) -> None:
    # A selection of entries and blocks bites only in a long one, which takes seconds: one fabric has to do.
    await hand_over(fabric, page_tokens, chunk_tokens, count, long=[900] if fabric == "nixl" else [])


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [64, 192, 512])
@pytest.mark.parametrize("fabric", ["tcp", pytest.param("nixl", marks=needs_nixl)])
async def test_many_pushed_prompts_go_on_as_one_device_would(fabric: str, chunk_tokens: int) -> None:
    await hand_over(fabric, 64, chunk_tokens, 300, long=[767, 1024, 1601])


@pytest.mark.parametrize("layer", [2, 4, 5])
async def test_one_flipped_byte_in_a_pushed_page_is_noticed(layer: int) -> None:
    """The control: were the comparison blind, the tests above would pass as well."""
    rng = random.Random(fresh_seed())
    truth = Truth()
    plane = next(plane for plane in truth.layout.planes if plane.layer == layer and plane.kind == "entry")

    def flip(duo: Duo, blocks: Sequence[int]) -> None:
        # One byte makes a number not a number where the byte below it ends the exponent with a one. The first entry is
        # every later row's to see.
        page = duo.decode.device.model.arena.page_bytes_of(blocks[0])
        tops = [plane.offset + at + 3 for at in range(0, plane.row_bytes, 4) if page[plane.offset + at + 2] > 0x80]
        page[rng.choice(tops)] = 0x7F

    async with open_duo("memory", spoil=flip) as duo:
        request = duo.make_request(random_ids(rng, 40), max_tokens=8, ignore_eos=True)
        await duo.complete([request])
    verdict = truth.judge(request, [64], duo.decode.arrived[1])
    print(verdict)
    assert any(line.endswith("as it was pushed differs from one cut into [64]") for line in verdict.wrong)
    assert any("one pass says" in line for line in [*verdict.wrong, *verdict.excused]), "the tokens tell as well"


async def test_any_flipped_bit_in_a_pushed_page_is_noticed() -> None:
    rng = random.Random(fresh_seed())
    truth = Truth()
    ids = random_ids(rng, 200)

    def flip(duo: Duo, blocks: Sequence[int]) -> None:
        pages = [block for block in blocks if block < duo.decode.info.num_pages]
        index = rng.randrange(len(pages))
        written = torch.nonzero(written_bytes(truth.layout, len(ids), index)).flatten().tolist()
        duo.decode.device.model.arena.page_bytes_of(pages[index])[rng.choice(written)] ^= 1 << rng.randrange(8)

    async with open_duo("memory", chunk_tokens=256, spoil=flip) as duo:
        requests = [duo.make_request(ids, max_tokens=2, ignore_eos=True) for _ in range(5)]
        for request in requests:
            await duo.complete([request])
    for request in requests:
        assert truth.judge(request, [64], duo.decode.arrived[request.number]).wrong
