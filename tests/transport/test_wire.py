"""Frames: round trips over any message and any cut of the bytes, and input that wants to hurt."""

from __future__ import annotations

import gc
import resource
import time
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgpack
import msgspec
import pytest

from transport import messages
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import KIND_TO_MESSAGE, MESSAGE_TO_KIND, Message, Sampling, Submit
from transport.wire import (
    ARRAY_LIMIT,
    BLOB_LIMITS,
    FRAME_VERSION,
    HEADER,
    IDS_LIMIT,
    META_LIMIT,
    REPORT_LIMIT,
    Frame,
    FrameReader,
    encode_frame,
)

EVERYTHING = frozenset(MESSAGE_TO_KIND)
SUBMIT = MESSAGE_TO_KIND[Submit]


def values(type_: Any) -> st.SearchStrategy[Any]:
    """Any value of a message field, by its msgspec description."""
    match type_:
        case msgspec.inspect.IntType(ge=low, le=high):
            return st.integers(-(2**40) if low is None else low, 2**40 if high is None else high)
        case msgspec.inspect.FloatType(ge=low, gt=above, le=high):
            return st.floats(low if low is not None else above, high, exclude_min=above is not None)
        case msgspec.inspect.StrType(max_length=limit):
            return st.text(max_size=min(limit or 20, 20))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=options):
            return st.sampled_from(options)
        case msgspec.inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            return st.lists(values(item), min_size=low or 0, max_size=min(3, high or 3)).map(tuple)
        case msgspec.inspect.UnionType(types=options):
            return st.one_of([values(option) for option in options])
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise TypeError(type_)


COUNTS: dict[type[Message], tuple[str, ...]] = {
    messages.TokensEmitted: ("num_rows", "num_tokens"),
    messages.LogprobsEmitted: ("num_rows", "num_tops"),
    messages.PromptScored: ("count", "tops"),
    messages.PagesGranted: ("num_pages",),
    messages.SlotsCopied: ("count",),
    messages.ExpertLoads: ("layers", "experts"),
    messages.PrepareEpoch: ("places", "slots", "copies", "released"),
    messages.NameGroup: (),
    messages.PairCounts: ("count",),
    messages.LinksReport: ("count",),
    messages.HeatReport: ("ranks", "layers", "slots_per_rank", "experts"),
}
"""Messages whose blob's length follows from their fields, and which fields those are; `frames` keeps them small."""


def count_blob(message: Message) -> int:
    """Bytes of such a message's blob, as its docstring says."""
    match message:
        case messages.TokensEmitted():
            return (8 + 4 + 4 + 4) * message.num_rows + 4 * message.num_tokens
        case messages.LogprobsEmitted():
            return (8 + 4 + 4 + 4 + 4 + 4) * message.num_rows + (4 + 4) * message.num_tops
        case messages.PromptScored():
            return (4 + 4) * message.count + (4 + 4) * message.count * message.tops
        case messages.PagesGranted(num_pages=count) | messages.SlotsCopied(count=count):
            return 4 * count
        case messages.ExpertLoads():
            return 4 * message.layers * message.experts
        case messages.PairCounts(count=count):
            return (4 + 8 + 8 + 4 + 4 + 4) * count
        case messages.LinksReport(count=count):
            return (4 + 4 + 4 + 8 + 8 + 4 + 4 + 4) * count
        case messages.HeatReport():
            slots = message.ranks * message.slots_per_rank
            return (4 + 4) * message.ranks * message.layers + (4 + 4 + 1) * slots + 4 * message.experts
        case messages.PrepareEpoch():
            return 4 * message.places * message.slots + 24 * message.copies + 8 * message.released
        case messages.NameGroup():
            slots = sum(part.slots for part in message.parts)
            return 4 * slots * len(message.members) + sum(member.description_bytes for member in message.members)
    raise TypeError(type(message))


def blob_for(message: Message, rng: Any) -> bytes:
    if type(message) in COUNTS:
        return rng.randbytes(count_blob(message))
    limit = BLOB_LIMITS.get(type(message), 0)
    return rng.randbytes(4 * rng.randrange(0, 2000)) if limit else b""


@st.composite
def frames(draw: st.DrawFn) -> tuple[Message, bytes]:
    cls = draw(st.sampled_from(sorted(EVERYTHING, key=lambda cls: cls.__name__)))
    message = draw(values(msgspec.inspect.type_info(cls)))
    if cls in COUNTS:
        small = st.integers(0, 20)
        message = msgspec.structs.replace(message, **{field: draw(small) for field in COUNTS[cls]})
    if isinstance(message, messages.NameGroup):
        members = [msgspec.structs.replace(member, description_bytes=draw(small)) for member in message.members]
        parts = [msgspec.structs.replace(part, slots=draw(small)) for part in message.parts]
        message = msgspec.structs.replace(message, members=tuple(members), parts=tuple(parts))
    return message, blob_for(message, draw(st.randoms(use_true_random=False)))


def read_all(reader: FrameReader) -> list[Frame]:
    got = []
    while (frame := reader.next()) is not None:
        got.append(frame)
    return got


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(frames(), max_size=5), st.data())
def test_any_messages_survive_any_cut_of_their_bytes(sent: list[tuple[Message, bytes]], data: st.DataObject) -> None:
    raw = b"".join(bytes(buffer) for message, blob in sent for buffer in encode_frame(message, blob))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader = FrameReader(EVERYTHING)
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        reader.feed(raw[start:end])
        if data.draw(st.booleans()):
            got += read_all(reader)
    got += read_all(reader)
    assert [(frame.message, bytes(frame.blob)) for frame in got] == sent
    assert not reader.inside_frame


def test_a_large_blob_is_received_in_place_and_read_only() -> None:
    blob = bytes(range(256)) * (IDS_LIMIT // 256)
    raw = b"".join(encode_frame(Submit(1, 1, 0, Sampling()), blob))
    reader = FrameReader(frozenset({Submit}))
    at = 0
    while at < len(raw):
        room = reader.room()
        n = min(room.nbytes, len(raw) - at, 70_001)
        room[:n] = raw[at : at + n]
        reader.received(n)
        at += n
    frame = reader.next()
    assert frame is not None and frame.blob == blob and frame.blob.readonly
    assert reader.next() is None


def test_a_blob_outlives_the_readers_buffer() -> None:
    reader = FrameReader(frozenset({Submit}))
    reader.feed(b"".join(encode_frame(Submit(1, 1, 0, Sampling()), b"abcd" * 10)))
    frame = reader.next()
    for _ in range(50):
        reader.feed(b"".join(encode_frame(Submit(2, 1, 0, Sampling()), b"wxyz" * 1000)))
        read_all(reader)
    assert frame is not None and bytes(frame.blob) == b"abcd" * 10


def test_bytes_on_the_wire_are_the_ones_documented() -> None:
    message = messages.CancelRequest(300)
    assert b"".join(encode_frame(message)) == bytes.fromhex("05000000 00000000 0400 01 00 92cd012cc2")


# ---------------------------------------------------------------- refusals


def refusal(meta: bytes, kind: int = SUBMIT, blob_len: int = 0, accepts: frozenset[type[Message]] = EVERYTHING) -> str:
    reader = FrameReader(accepts)
    reader.feed(HEADER.pack(len(meta), blob_len, kind, FRAME_VERSION, 0) + meta)
    with pytest.raises(RemoteProtocolError) as caught:
        reader.next()
    with pytest.raises(RemoteProtocolError):  # for ever
        reader.next()
    reader.feed(b"".join(encode_frame(messages.AskStatus())))
    with pytest.raises(RemoteProtocolError):
        reader.next()
    return str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER.pack(META_LIMIT + 1, 0, 4, 1, 0), "kind 4, CancelRequest: meta of 65537 bytes (limit 65536)"),
        (HEADER.pack(2**32 - 1, 0, SUBMIT, 1, 0), "kind 3, Submit: meta of 4294967295 bytes (limit 131072)"),
        (HEADER.pack(5, IDS_LIMIT + 4, SUBMIT, 1, 0), "kind 3, Submit: blob of 4194308 bytes (limit 4194304)"),
        (HEADER.pack(5, 6, SUBMIT, 1, 0), "kind 3, Submit: blob of 6 bytes is not a whole number of int32"),
        (HEADER.pack(5, 1, 4, 1, 0), "kind 4, CancelRequest: blob of 1 bytes (limit 0)"),
        (HEADER.pack(5, 0, 999, 1, 0), "kind 999 is not accepted on this link"),
        (HEADER.pack(5, 0, 24, 1, 0), "kind 24 (PeerDown) is not accepted on this link"),
        (HEADER.pack(5, 0, SUBMIT, 2, 0), "frame version 2, flags 0: this side speaks version 1, flags 0"),
        (HEADER.pack(5, 0, SUBMIT, 1, 1), "frame version 1, flags 1: this side speaks version 1, flags 0"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame version 47, flags 49: this side speaks version 1, flags 0"),
    ],
)
def test_a_header_is_refused_before_anything_is_kept(header: bytes, message: str) -> None:
    reader = FrameReader(messages.HEAD_FROM_CLIENT)
    reader.feed(header)
    with pytest.raises(RemoteProtocolError) as caught:
        reader.next()
    assert str(caught.value) == message


GOOD = msgpack.packb([1, 1, 0, [0.0, 1.0, 0, 0, 16, 0, False, []], 0, ""])


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        (b"", "incomplete"),
        (GOOD[:-1], "incomplete"),
        (GOOD + b"\0", "extra data"),
        (GOOD + GOOD, "extra data"),
        (b"\xc1", "FormatError"),
        (b"\x91" * 60_000, "StackError"),
        (b"\x81" * 60_000, "max_map_len"),
        (b"\x80", "Expected `array`, got `object`"),
        (b"\x81\x01\x02", "max_map_len(0)"),
        (b"\xdf\xff\xff\xff\xff", "max_map_len(0)"),
        (b"\xdd\xff\xff\xff\xff", f"max_array_len({ARRAY_LIMIT})"),
        (b"\xdb\xff\xff\xff\xff", "incomplete"),
        (b"\x91\xdb\x00\x01\x00\x01" + b"x" * 0x10001, "max_str_len(65536)"),
        (b"\xc6\xff\xff\xff\xff", "incomplete"),
        (b"\x91\xc4\x01x", "max_bin_len(0)"),
        (b"\xc9\xff\xff\xff\xff\x01", "max_ext_len(0)"),
        (b"\xc7\x00\x05", "extension type 5"),
        (b"\xc7\x00\xff", "timestamp"),
        (b"\xd6\xff\0\0\0\0", "max_ext_len(0)"),
        (b"\x91\xa2\xff\xff", "UnicodeDecodeError"),
        (msgpack.packb([1, 1, 0, [9e9], 0, ""]), "temperature|`float` <= 100.0"),
        (msgpack.packb([-1, 1, 0, []]), "Expected `int` >= 0"),
        (msgpack.packb([2**63, 1, 0, []]), "Expected `int` <= 9007199254740991"),
        (msgpack.packb([True, 1, 0, []]), "Expected `int`, got `bool`"),
        (msgpack.packb(["1", 1, 0, []]), "Expected `int`, got `str`"),
        (msgpack.packb([1, 1]), "Expected `array` of at least length 4"),
        (msgpack.packb([1, 1, 0, [], 0, "", "", "", 7]), "Expected `array` of at most length 8"),
        (msgpack.packb([1, 1, 0, [0.0, 1.0, 0, 0, 16, 0, False, [1] * 65]]), "length <= 64"),
        (msgpack.packb([1, 1, 0, [], 0, "x" * 257]), "length <= 256"),
        (msgpack.packb([1, 1, 0, [float("nan")], 0, ""]), "float"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_bad_meta_is_refused_and_named(meta: bytes, reason: str) -> None:
    message = refusal(meta)
    assert message.startswith(f"kind 3, Submit: bad meta of {len(meta)} bytes (limit 65536)")
    assert any(part in message for part in reason.split("|")), message
    assert len(message) < 400


@pytest.mark.parametrize(
    "meta",
    [
        b"\xdc\x0f\xff" + b"\x90" * 0xFFF,
        b"\xdc\x00\x10" + (b"\xdc\x0f\xff" + b"\x90" * 0xFFF) * 15 + b"\x90",
        b"\xdc\x0f\xff" + (b"\xcb" + bytes(8)) * 0xFFF,
        b"\x91" * 500,
        b"\xdc\x0f\xff" + b"\xa1x" * 0xFFF,
    ],
    ids=["empty arrays", "arrays of empty arrays", "floats", "nested", "strings"],
)
def test_small_metas_can_not_be_blown_up(meta: bytes) -> None:
    """64 KiB of the densest MessagePack there is: milliseconds and a few MiB at worst, then an ordinary refusal."""
    assert len(meta) <= META_LIMIT
    gc.freeze()  # as in a rank: what other tests left in memory is not looked through
    begun = time.process_time()
    refusal(meta)
    spent = time.process_time() - begun
    gc.unfreeze()
    assert spent < 0.05


def test_a_claimed_blob_costs_nothing_until_it_comes() -> None:
    head = HEADER.pack(len(GOOD), IDS_LIMIT, SUBMIT, FRAME_VERSION, 0) + GOOD
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    readers = [FrameReader(messages.HEAD_FROM_CLIENT) for _ in range(100)]
    for reader in readers:
        reader.feed(head)
        assert reader.next() is None and reader.inside_frame
        assert reader.room().nbytes <= 256 << 10
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 * 512  # of 400 MiB claimed


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.binary(max_size=200), st.sampled_from(sorted(KIND_TO_MESSAGE)))
def test_random_metas_give_a_message_or_a_protocol_error(meta: bytes, kind: int) -> None:
    reader = FrameReader(EVERYTHING)
    reader.feed(HEADER.pack(len(meta), 0, kind, FRAME_VERSION, 0) + meta)
    try:
        frame = reader.next()
    except RemoteProtocolError:
        return
    assert frame is not None
    again = FrameReader(EVERYTHING)
    again.feed(b"".join(encode_frame(frame.message)))
    assert again.next() == frame


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(frames(), st.integers(0, 255), st.data())
def test_one_flipped_byte_gives_frames_or_a_protocol_error(
    sent: tuple[Message, bytes], value: int, data: st.DataObject
) -> None:
    raw = bytearray(b"".join(encode_frame(*sent)))
    raw[data.draw(st.integers(0, min(len(raw), 80) - 1))] = value
    reader = FrameReader(EVERYTHING)
    reader.feed(raw)
    try:
        read_all(reader)
    except RemoteProtocolError as error:
        assert str(error)


def test_blobs_must_have_the_length_their_message_says() -> None:
    member, part = messages.Member(1, 1, "", 7), messages.PartTable("main", 0, 1, 3, 3)
    for message in (
        messages.TokensEmitted(1, 2, 3),
        messages.PagesGranted(1, 1, 1, 0, 13),
        messages.SlotsCopied("main", 1, 0, 13, 10, 1),
        messages.ExpertLoads("main", 1, 1, 1, 1, 13),
        messages.PrepareEpoch("main", 1, 1, 3, 1, 5, 1, 1, 1),
        messages.NameGroup(1, (member, messages.Member(2, 1, "", 21)), (part,)),
    ):
        assert len(encode_frame(message, bytes(52))) == 2
        with pytest.raises(LocalProtocolError, match="its fields say 52"):
            encode_frame(message, bytes(48))
        meta = msgspec.msgpack.encode(message)
        kind = MESSAGE_TO_KIND[type(message)]
        assert refusal(meta, kind, 56).endswith("blob of 56 bytes, but its fields say 52")
    with pytest.raises(LocalProtocolError, match="PairCounts: blob of 31 bytes, but its fields say 32"):
        encode_frame(messages.PairCounts(1, 1, 1), bytes(31))
    heat = messages.HeatReport("decode", 0, "main", 0, 3, 5, 2, 4, False, 1, 0.0, 0.0)
    with pytest.raises(LocalProtocolError, match="HeatReport: blob of 8 bytes, but its fields say 140"):
        encode_frame(heat, bytes(8))


def test_what_we_may_not_send_is_our_error() -> None:
    with pytest.raises(LocalProtocolError, match="Sampling has no kind number"):
        encode_frame(Sampling())
    with pytest.raises(LocalProtocolError, match="CancelRequest: blob of 1 bytes"):
        encode_frame(messages.CancelRequest(1), b"x")
    with pytest.raises(LocalProtocolError, match=r"Submit: blob of 4194308 bytes \(limit 4194304\)"):
        encode_frame(Submit(1, 1, 0, Sampling()), bytes(IDS_LIMIT + 4))
    report = messages.StatusReport(1, "", "", 1, 0, True, ("x" * 4096,) * 1100, 0, 0, 0, 0, ())
    with pytest.raises(LocalProtocolError, match=r"StatusReport: meta of \d+ bytes \(limit 4194304\)"):
        encode_frame(report)


def test_every_message_that_documents_a_blob_has_a_limit_for_it() -> None:
    documented = {cls for cls in EVERYTHING if "Blob:" in (cls.__doc__ or "")}
    assert documented == set(BLOB_LIMITS)


def test_a_report_longer_than_the_ring_comes_whole_and_in_pieces() -> None:
    event = messages.HeadEvent(1, 2, "info", "rank.ready", "x" * 4000)
    report = messages.EventsHappened(0, (event,) * 200)
    sent = b"".join(encode_frame(report))
    assert len(sent) > 800_000
    for piece in (len(sent), 65_537, 1_000):
        reader = FrameReader(messages.OPERATOR_FROM_HEAD)
        for at in range(0, len(sent), piece):
            reader.feed(sent[at : at + piece])
        reader.feed(sent)
        assert [frame.message for frame in reader.take()] == [report, report]
        assert not reader.inside_frame


def test_a_claimed_report_costs_nothing_until_it_comes() -> None:
    reader = FrameReader(messages.OPERATOR_FROM_HEAD)
    kind = MESSAGE_TO_KIND[messages.EventsHappened]
    reader.feed(HEADER.pack(REPORT_LIMIT, 0, kind, FRAME_VERSION, 0) + bytes(200_000))
    assert reader.room().nbytes <= 256 << 10
    reader = FrameReader(messages.OPERATOR_FROM_HEAD)
    reader.feed(HEADER.pack(REPORT_LIMIT + 1, 0, kind, FRAME_VERSION, 0))
    with pytest.raises(RemoteProtocolError, match="meta of 4194305 bytes"):
        reader.next()
