"""Drafting changes how many tokens a step brings, and no token: every text is the one without drafts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from engine.core.plan import DecodeRow, DecodeRows, StepPlan, build_roster
from engine.errors import DeviceError
from tests.model.conftest import Golden
from tests.model.paged_cases import Source, random_ids, random_model, small_config, smallest_page
from tests.model.speculation_cases import Figures, Host, Knowing, Request, open_device, run_host
from tests.model.test_paged_drafts import small_ahead_config, small_v4_block_config, source_of
from transport.messages import Sampling

EOS = 7
SETTINGS = [
    Sampling(),
    Sampling(ignore_eos=True, logprobs=2),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=1.1, top_p=0.9, seed=6, logprobs=0),
    Sampling(temperature=0.9, top_k=40, seed=7, min_tokens=9),
    Sampling(temperature=1.3, seed=8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5),
    Sampling(frequency_penalty=1.2, stop_ids=tuple(range(11, 43))),
    Sampling(temperature=1.3, seed=9, bias_ids=(21,), biases=(2.0,), stop_ids=tuple(range(40, 72))),
]


def make_requests(source: Source, lengths: list[int], limit: int, page_tokens: int) -> list[Request]:
    requests, used = [], 0
    for slab, length in enumerate(lengths):
        own = limit - slab % 3
        count = -(-(length + own) // page_tokens)
        pages = tuple(range(used, used + count))
        used += count
        prompt = random_ids(length, source.shape.vocab_size, seed=slab)
        requests.append(Request(slab, pages[::-1], prompt, SETTINGS[slab % len(SETTINGS)], own))
    return requests


async def run_plain(source: Source, requests: list[Request]) -> list[Request]:
    """The same requests with no drafter at all, one after the other."""
    done = [request.again() for request in requests]
    device = open_device(source, requests, None, EOS)
    for request in done:
        await run_host(device, Host([request], (EOS,), [0], 1), queued=1)
    await device.aclose()
    return done


SOURCES = ["v4.1 blocks", "v4 blocks", "v4 ahead", "v4 golden"]


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, golden: Callable[[str], Golden]) -> Source:
    if request.param == "v4 golden":
        # Entries of 4 and of 128 tokens.
        return source_of(golden("v4-tiny"))
    make = {"v4.1 blocks": small_config, "v4 blocks": small_v4_block_config, "v4 ahead": small_ahead_config}
    return random_model(seed=3, config=make[request.param]())


@dataclasses.dataclass
class Plain:
    """A model, requests, and what comes of them without drafts."""

    source: Source
    requests: list[Request]
    eos: int = EOS


@pytest.fixture(scope="module")
def plain(source: Source) -> Plain:
    page = smallest_page(source.shape)
    lengths = [1, 3, 122, 2, 125, 19, 127, 64] if page == 128 else [1, 3, 13, 2, 31, 19, 62, 64]
    return Plain(source, make_requests(source, lengths, 20, page))


@pytest.fixture(scope="module")
def texts(plain: Plain) -> dict[int, Request]:
    import trio

    done = trio.run(run_plain, plain.source, plain.requests)
    assert all(request.is_over for request in done)
    early = [len(request.text) for request in done if len(request.text) < request.limit]
    assert any(length > 2 for length in early), early
    return {request.slab: request for request in done}


def check(host: Host, texts: dict[int, Request]) -> None:
    for request in host.requests:
        wanted = texts[request.slab]
        assert request.text == wanted.text, (request.slab, request.sampling)
        assert request.scored == wanted.scored


@pytest.mark.parametrize("queued", [1, 2])
async def test_the_models_own_drafts_change_no_text(plain: Plain, texts: dict[int, Request], queued: int) -> None:
    device = open_device(plain.source, plain.requests, "own", EOS)
    for seed, drafts in enumerate([[3], [0, 5, 5], [7]]):
        host = Host([request.again() for request in plain.requests], (EOS,), drafts, seed)
        await run_host(device, host, queued=queued)
        check(host, texts)
        assert sum(tried > 0 for tried, _ in host.figures.accepted.elements()) > 20
    await device.aclose()


async def test_drafts_that_hold_up_to_any_place_change_no_text(plain: Plain, texts: dict[int, Request]) -> None:
    """Every number of accepted drafts of every number proposed, in steps with one length and with another each."""
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    for seed, drafts in enumerate(
        [[1], [2], [3], [4], [5], [6], [6], [7], [0, 3, 7], [0, 0, 5], [1, 2, 3, 4, 5, 6, 7]]
    ):
        knowing = Knowing(list(texts.values()), plain.source.shape.vocab_size, seed)
        device = open_device(plain.source, plain.requests, knowing, EOS)
        host = Host([request.again() for request in plain.requests], (EOS,), drafts, seed)
        await run_host(device, host, queued=1 + seed % 2)
        check(host, texts)
        seen += host.figures.accepted
        await device.aclose()
    assert all(seen[tried, held] for tried in range(8) for held in range(tried + 1)), seen


async def test_as_many_tokens_come_as_are_right(plain: Plain, texts: dict[int, Request]) -> None:
    """A drafter that is always right: each step brings k + 1 tokens until the end."""

    class Right(Knowing):
        def choose_place(self, count: int) -> int:
            return count

    one = next(r for r in plain.requests if r.sampling.ignore_eos and len(texts[r.slab].text) == r.limit)
    knowing = Right(list(texts.values()), plain.source.shape.vocab_size, 1)
    device = open_device(plain.source, plain.requests, knowing, EOS)
    host = Host([one.again()], (EOS,), [4], 1)
    host._rng.random = lambda: 0.0  # type: ignore[method-assign]
    await run_host(device, host, queued=1)
    check(host, texts)
    # The prompt's end brings the first; the row that follows it has no drafts yet, then five at a time.
    assert host.figures.steps == 1 + -(-(one.limit - 2) // 5)
    await device.aclose()


def rows_of(request: Request, position: int, token: int | None, sampling: Sampling, end: int | None) -> DecodeRows:
    roster = build_roster(np.array([1]), np.array([request.slab]), (request.pages,), (sampling,))
    ends = None if end is None else np.array([end])
    return DecodeRows(
        dataclasses.replace(roster, ends=ends), np.array([position]), np.array([-1 if token is None else token])
    )


async def test_a_row_past_its_end_computes_nothing_and_brings_nothing(plain: Plain, texts: dict[int, Request]) -> None:
    request = plain.requests[1]
    knowing = Knowing(list(texts.values()), plain.source.shape.vocab_size, 3)
    device = open_device(plain.source, plain.requests, knowing, EOS)
    done = request.again()
    await run_host(device, Host([done], (EOS,), [3], 1))
    before = device.model.arena.slabs.clone()
    result = await device.wait(
        device.submit(StepPlan(90, (), rows_of(request, -1, None, Sampling(), request.end - 30), drafts=2))
    )
    assert (list(result.row_counts or ()), list(result.row_proposed or ()), list(result.row_tokens)) == ([0], [0], [])
    assert (device.model.arena.slabs == before).all()
    await device.aclose()


async def test_places_and_numbers_that_nobody_can_mean_are_refused(plain: Plain) -> None:
    for rows, drafts, message in [
        (rows_of(plain.requests[0], -1, None, Sampling(), 20), 2, "no pass of this device has left it anywhere"),
        (rows_of(plain.requests[0], 1, 5, Sampling(), 20), 8, "8 drafts are asked for, a slab has room for 7"),
    ]:
        device = open_device(plain.source, plain.requests, "own", EOS)
        with pytest.raises(DeviceError, match=message):
            await device.wait(device.submit(StepPlan(1, (), rows, drafts=drafts)))
        await device.aclose()


async def test_a_fresh_sequence_on_a_used_slab_has_no_drafts(plain: Plain, texts: dict[int, Request]) -> None:
    """What was proposed belongs to the sequence that was there: another place or token says that it is another."""
    request = next(r for r in plain.requests if len(texts[r.slab].text) == r.limit and len(r.prompt) > 2)
    knowing = Knowing(list(texts.values()), plain.source.shape.vocab_size, 3)
    device = open_device(plain.source, plain.requests, knowing, EOS)
    plans = Host([request.again()], (EOS,), [3], 1)
    while len(plans.requests[0].text) < 4:
        plan = plans.plan()
        if plan is not None:
            plans.apply(await device.wait(device.submit(plan)))
    position = len(request.prompt) + len(plans.requests[0].text) - 1
    token = plans.requests[0].text[-1]
    settings = msgspec.structs.replace(request.sampling, min_tokens=0)
    other = (token + 1) % plain.source.shape.vocab_size
    for place, first in ((position, other), (position - 1, token)):
        rows = rows_of(request, place, first, settings, request.end)
        result = await device.wait(device.submit(StepPlan(99, (), rows, drafts=3)))
        assert list(result.row_proposed or ()) == [0] and list(result.row_counts or ()) == [1]
    await device.aclose()


async def test_steps_without_drafts_say_what_they_always_said(plain: Plain, texts: dict[int, Request]) -> None:
    request = plain.requests[1]
    device = open_device(plain.source, plain.requests, "own", EOS)
    host = Host([request.again()], (EOS,), [0], 1)
    while not host.is_done:
        plan = host.plan()
        if plan is not None:
            result = await device.wait(device.submit(plan))
            assert result.row_counts is None and result.row_proposed is None
            host.apply(result)
    check(host, texts)
    assert isinstance(host.figures, Figures) and set(host.figures.accepted) == {(0, 0)}
    await device.aclose()


def test_rows_can_be_told_as_values_too() -> None:
    row = DecodeRow(1, 0, -1, None, (0,), Sampling())
    assert DecodeRows.of([row])[0] == row
