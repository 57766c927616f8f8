"""The decode rank really decodes: one row a sequence and step, no prompt work, and no prompt ever comes near it."""

from __future__ import annotations

import collections
import random
import struct
from collections.abc import Callable, Sequence

import msgspec
import pytest

from engine.model.kv import ID_RING
from tests.e2e.duo import DECODE, PREFILL, Duo, Request, open_duo
from tests.e2e.prompts import fresh_seed
from tests.e2e.truth import Truth
from transport.messages import (
    DECODE_FROM_PREFILL,
    RANK_FROM_HEAD,
    Message,
    PagesPushed,
    PeerHello,
    PrefillCommitted,
    ReservePages,
    Sampling,
    StartPrefill,
)
from transport.nixl_fabric import is_available
from transport.wire import HEADER, Frame, FrameReader, encode_frame

FABRICS = [
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")),
]
"""Each puts its own description into the greeting."""
LENGTHS = [1, 2, 5, 63, 64, 65, 130, 257]
RUN = 4
"""So many ids of a prompt in a row count as a piece of it."""

ENCODINGS: dict[str, Callable[[Sequence[int]], bytes]] = {
    "int32 little-endian": lambda ids: struct.pack(f"<{len(ids)}i", *ids),
    "int32 big-endian": lambda ids: struct.pack(f">{len(ids)}i", *ids),
    "int64 little-endian": lambda ids: struct.pack(f"<{len(ids)}q", *ids),
    "int16 little-endian": lambda ids: struct.pack(f"<{len(ids)}h", *ids),
    # An array's elements follow each other without anything between them.
    "msgpack": lambda ids: b"".join(map(msgspec.msgpack.encode, ids)),
    "text": lambda ids: ", ".join(map(str, ids)).encode(),
    "dense text": lambda ids: ",".join(map(str, ids)).encode(),
}


def distinct_ids(rng: random.Random, length: int) -> list[int]:
    """Ids of two bytes, none twice: four of them in a row are nowhere by chance."""
    return rng.sample(range(256, 8192), length)


def find_pieces(data: bytes | bytearray, prompt: Sequence[int]) -> set[tuple[str, int]]:
    """(encoding, first index) of every run of RUN prompt ids that stands in the data, at any offset."""
    runs = range(len(prompt) - RUN + 1)
    return {
        (name, first)
        for name, encode in ENCODINGS.items()
        for first in runs
        if encode(prompt[first : first + RUN]) in data
    }


def read_frames(data: bytes | bytearray, accepts: frozenset[type[Message]]) -> list[Frame]:
    reader = FrameReader(accepts)
    reader.feed(bytes(data))
    frames = []
    while (frame := reader.next()) is not None:
        frames.append(frame)
    assert not reader.inside_frame
    return frames


async def complete_all(duo: Duo, rng: random.Random) -> list[Request]:
    """Every length, ended by `length`; then the same prompts, ended by an id that is known to come."""
    whole = [
        duo.make_request(distinct_ids(rng, length), max_tokens=rng.randint(5, 12), ignore_eos=True)
        for length in LENGTHS
    ]
    await duo.complete(whole)
    stopped = []
    for place, request in enumerate(whole):
        stop = request.tokens[place % 4]
        sampling = {"max_tokens": request.sampling.max_tokens, "stop_ids": (stop,), "ignore_eos": True}
        stopped.append(duo.make_request(request.prompt, **sampling))
    await duo.complete(stopped)
    for request, longer in zip(stopped, whole, strict=True):
        assert request.finished is not None and request.finished.reason == "stop"
        assert request.tokens == longer.tokens[: longer.tokens.index(request.sampling.stop_ids[0]) + 1]
    return whole + stopped


def expected_positions(request: Request) -> tuple[list[int], int | None]:
    """Positions of the rows a request needs on its decode rank, and of the one row that may be computed in vain.

    The first token comes with the push, so `count` tokens need `count - 1` rows. Steps are queued ahead: while the step
    that ends a text is awaited, its successor may be in the queue, with one row too many, and only with one, as the
    queue has two places. A text that ends by its length has none: the planner knows where that is.
    """
    first, count = len(request.prompt), len(request.tokens)
    needed = list(range(first, first + count - 1))
    assert request.finished is not None
    runs_over = request.finished.reason == "stop" and 1 < count < request.sampling.max_tokens
    return needed, first + count - 1 if runs_over else None


async def test_each_layer_of_the_decode_rank_sees_one_row_a_sequence_and_step_and_no_prompt() -> None:
    rng = random.Random(fresh_seed())
    truth = Truth()
    async with open_duo("tcp") as duo:
        requests = await complete_all(duo, rng)
    decode, prefill = duo.decode, duo.prefill
    assert decode.chunks == []
    assert not any(prefill.rows)
    assert sum(ids for _, _, ids in prefill.chunks) == sum(len(request.prompt) for request in requests)

    positions = collections.defaultdict(list)
    for step in decode.rows:
        numbers = [number for number, _ in step]
        assert step and len(set(numbers)) == len(numbers), "a sequence has one row in a step"
        for number, position in step:
            positions[number].append(position)
    overruns = 0
    for request in requests:
        needed, vain = expected_positions(request)
        ours = positions.pop(request.number, [])
        if ours != needed:
            assert vain is not None and ours == [*needed, vain], f"request {request.number}: rows at {ours}"
            overruns += 1
    assert not positions
    assert 0 < overruns <= sum(request.finished.reason == "stop" for request in requests if request.finished)

    rows = sum(len(step) for step in decode.rows)
    assert rows == sum(max(0, len(request.tokens) - 1) for request in requests) + overruns
    for watched, entered in ((decode, rows), (prefill, sum(len(request.prompt) for request in requests))):
        probe = watched.device.model.probe
        assert probe is not None
        assert probe.rows_entered == [entered] * watched.device.model.shape.num_layers

    # The arena was NaN everywhere: one read of what was neither pushed nor computed here would show in the tokens.
    for request in requests:
        if request.finished is not None and request.finished.reason == "length":
            verdict = truth.judge(request, [64], decode.arrived[request.number])
            assert not verdict.wrong and not verdict.excused, verdict


@pytest.mark.parametrize("fabric", FABRICS)
async def test_nothing_the_decode_rank_hears_holds_a_piece_of_a_prompt(fabric: str) -> None:
    rng = random.Random(fresh_seed())
    async with open_duo(fabric) as duo:
        requests = await complete_all(duo, rng)
    from_head, from_peer = duo.seats[DECODE].heard_from_head, duo.heard_from_peer
    to_prefill = duo.seats[PREFILL].heard_from_head
    for request in requests:
        prompt = request.prompt
        assert not find_pieces(from_head + from_peer, prompt)
        # The control: the search finds every piece on its way to the prefill rank.
        found = find_pieces(to_prefill, prompt)
        assert found == {("int32 little-endian", first) for first in range(len(prompt) - RUN + 1)}

    # The taps heard the links whole: they read as the frames that these links may carry, from the greeting on.
    heard, told = read_frames(from_head, RANK_FROM_HEAD), read_frames(from_peer, DECODE_FROM_PREFILL)
    assert [type(frame.message) for frame in heard] == [ReservePages] * len(requests)
    assert not any(len(frame.blob) for frame in heard)
    assert type(told[0].message) is PeerHello and len(told[0].blob)
    assert {type(frame.message) for frame in told[1:]} == {PagesPushed, PrefillCommitted}
    assert not any(len(frame.blob) for frame in told[1:])
    starts = [frame for frame in read_frames(to_prefill, RANK_FROM_HEAD) if isinstance(frame.message, StartPrefill)]
    assert [len(frame.blob) for frame in starts] == [4 * len(request.prompt) for request in requests]

    # What a request costs the decode rank does not grow with its prompt, but for one short word per chunk.
    chunks = collections.Counter(number for number, _, _ in duo.prefill.chunks)
    for number, frames in _by_request([*heard, *told[1:]]).items():
        size = sum(HEADER.size + len(msgspec.msgpack.encode(frame.message)) for frame in frames)
        assert size <= 160 + 32 * chunks[number], f"request {number}: {size} bytes"


def _by_request(frames: list[Frame]) -> dict[int, list[Frame]]:
    grouped = collections.defaultdict(list)
    for frame in frames:
        grouped[frame.message.request].append(frame)  # type: ignore[attr-defined]
    return grouped


def test_the_search_finds_a_prompt_in_every_encoding_it_claims() -> None:
    prompt = distinct_ids(random.Random(fresh_seed()), 12)
    for name, encode in ENCODINGS.items():
        data = b"\x93abc" + encode(prompt) + b"\x00\x01"
        assert {first for found, first in find_pieces(data, prompt) if found == name} == set(range(9))
        missing = encode(prompt[:3]) + b"\x00" + encode(prompt[3:6])
        assert not find_pieces(missing, prompt)
    # In frames: ids in a blob, and ids that a message would carry in its meta.
    start = StartPrefill(1, 1, DECODE, 0, Sampling(stop_ids=tuple(prompt)), 0)
    buffers = b"".join(map(bytes, encode_frame(start, ENCODINGS["int32 little-endian"](prompt))))
    assert {name for name, _ in find_pieces(buffers, prompt)} == {"int32 little-endian", "msgpack"}


async def test_the_fabric_carries_the_last_ids_in_the_slab_and_no_others() -> None:
    """The n-gram memory of the next row needs the ids before it. They go with the state, from device to device: the
    slab's ring has the last ID_RING ids, at their positions; the pages have none."""
    rng = random.Random(fresh_seed())
    async with open_duo("tcp") as duo:
        requests = [duo.make_request(distinct_ids(rng, length), max_tokens=2, ignore_eos=True) for length in LENGTHS]
        await duo.complete(requests)
    at = duo.decode.device.model.arena.layout.ids_offset
    for request in requests:
        state, prompt = duo.decode.arrived[request.number], request.prompt
        assert not find_pieces(state.pages.numpy().tobytes(), prompt)
        slab = state.slab.numpy().tobytes()
        ring = struct.unpack(f"<{ID_RING}i", slab[at : at + 4 * ID_RING])
        first = max(0, len(prompt) - ID_RING)
        assert [ring[position % ID_RING] for position in range(first, len(prompt))] == prompt[first:]
        assert not find_pieces(slab[:at] + slab[at + 4 * ID_RING :], prompt)
