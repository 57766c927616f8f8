"""Frames: bytes to messages and back, without any I/O.

A frame is a 12-byte header `<IIHBB` (meta_len, blob_len, kind, version, flags), then the *meta* (one message of
`transport.messages` as MessagePack, at most 64 KiB), then the *blob* (raw bytes that are never parsed here).

What a peer can make us spend is bounded by what it has really sent: lengths are checked against the kind's limits as
soon as the header is there; the meta is decoded with every cap of `msgpack` set, where it is long enough for one to
matter, and converted into the kind's struct before a byte of blob is kept; a blob's buffer grows with the bytes that
arrive, not with what the header claims.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgpack
import msgspec

from transport import messages
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import KIND_TO_MESSAGE, MESSAGE_TO_KIND, Message

HEADER = struct.Struct("<IIHBB")
FRAME_VERSION = 1
"""Version of the header and of the two-part body. What the messages say has `messages.PROTOCOL_VERSION`."""

META_LIMIT = 64 << 10
REPORT_LIMIT = 4 << 20
META_LIMITS: dict[type[Message], int] = {
    messages.StatusReport: REPORT_LIMIT,
    messages.ExpertsReport: REPORT_LIMIT,
    messages.RebalanceAnswer: REPORT_LIMIT,
    messages.RequestsReport: REPORT_LIMIT,
    messages.EventsHappened: REPORT_LIMIT,
    messages.Submit: META_LIMIT + messages.GRAMMAR_LIMIT,
    messages.StartPrefill: META_LIMIT + messages.GRAMMAR_LIMIT,
    messages.ReservePages: META_LIMIT + messages.GRAMMAR_LIMIT,
}
"""Bytes of a meta by message: what a head tells operators grows with ranks and requests, a grammar is as long as
a client makes it. All others: META_LIMIT."""
STR_LIMIT = messages.GRAMMAR_LIMIT
"""Bytes of one string: those of a grammar; all others are shorter (`messages.Text`)."""
ARRAY_LIMIT = 4096
"""Elements of one array: the longest tuple of any message."""

IDS_LIMIT = 4 << 20
"""Bytes of token ids in one blob: a million ids."""
BLOB_LIMITS: dict[type[Message], int] = {
    messages.Submit: IDS_LIMIT,
    messages.StartPrefill: IDS_LIMIT,
    messages.ReservePages: IDS_LIMIT,
    messages.TokensEmitted: 1 << 20,
    messages.LogprobsEmitted: 8 << 20,
    messages.PromptScored: 4 << 20,
    messages.PagesGranted: 1 << 20,
    messages.TurnOffered: IDS_LIMIT,
    messages.PeerHello: 64 << 10,
    messages.PeerWelcome: 64 << 10,
    messages.RankReady: 64 << 10,
    messages.NameGroup: 16 << 20,
    messages.PrepareEpoch: 16 << 20,
    messages.SlotsCopied: 1 << 20,
    messages.ExpertLoads: 1 << 20,
    messages.PairCounts: 1 << 20,
    messages.LinksReport: 16 << 20,
    messages.HeatReport: 16 << 20,
}
"""Blob bytes by message; a message that is not here has no blob."""
_INT32_BLOBS = frozenset({messages.Submit, messages.StartPrefill, messages.ReservePages, messages.TurnOffered})
_BLOB_BYTES: dict[type[Message], Callable[[Any], int]] = {
    messages.TokensEmitted: lambda m: 20 * m.num_rows + 4 * m.num_tokens,
    messages.LogprobsEmitted: lambda m: 28 * m.num_rows + 8 * m.num_tops,
    messages.PromptScored: lambda m: 8 * m.count * (1 + m.tops),
    messages.PagesGranted: lambda m: 4 * m.num_pages,
    messages.SlotsCopied: lambda m: 4 * m.count,
    messages.ExpertLoads: lambda m: 4 * m.layers * m.experts,
    messages.PrepareEpoch: lambda m: 4 * (m.places * m.slots + 6 * m.copies + 2 * m.released),
    messages.PairCounts: lambda m: 32 * m.count,
    messages.LinksReport: lambda m: 40 * m.count,
    messages.HeatReport: lambda m: m.ranks * (8 * m.layers + 9 * m.slots_per_rank) + 4 * m.experts,
    messages.NameGroup: lambda m: (
        4 * sum(len(m.members) * part.slots for part in m.parts) + sum(member.description_bytes for member in m.members)
    ),
}
"""Bytes of the blob by what the message says, where it says so."""



class _Rule(NamedTuple):
    """All that bounds frames of one message, for the way on which nothing is wrong: one look instead of five."""

    cls: type[Message]
    kind: int
    meta_limit: int
    blob_limit: int
    is_ids: bool
    say_bytes: Callable[[Any], int] | None
    decoder: msgspec.msgpack.Decoder[Any]


_RULES = {
    cls: _Rule(
        cls,
        kind,
        META_LIMITS.get(cls, META_LIMIT),
        BLOB_LIMITS.get(cls, 0),
        cls in _INT32_BLOBS,
        _BLOB_BYTES.get(cls),
        msgspec.msgpack.Decoder(cls),
    )
    for cls, kind in MESSAGE_TO_KIND.items()
}
SHORT_META = 256
"""Bytes of a meta in which nothing can be as long, or nested as deeply, as msgpack's caps forbid."""
_RING_BYTES = 128 << 10
_BLOB_FIRST_BYTES = 256 << 10
_NO_BLOB = memoryview(b"")

Buffer = bytes | bytearray | memoryview
_S = TypeVar("_S")


class Frame(NamedTuple):
    """One received frame. `blob` is read-only and belongs to the frame: it stays valid as long as somebody holds it."""

    message: Message
    blob: memoryview


_make_frame: Callable[[tuple[Message, memoryview]], Frame] = functools.partial(tuple.__new__, Frame)
"""For half of what its own constructor takes."""


def _refuse_ext(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not allowed")


def unpack_struct(data: Buffer, type_: type[_S], *, bin_limit: int = 0) -> _S:
    """Decodes one MessagePack value into `type_`; nothing may follow it.

    Args:
        data: the bytes; the caller has checked how many.
        type_: a msgspec struct. Its fields bound everything that msgpack's own caps do not.
        bin_limit: bytes of one binary value; messages have none.

    Raises:
        ValueError: malformed, longer than a cap, nested too deeply, or not a `type_`.
    """
    raw = msgpack.unpackb(
        data,
        raw=False,
        use_list=True,
        strict_map_key=True,
        ext_hook=_refuse_ext,
        max_str_len=STR_LIMIT,
        max_bin_len=bin_limit,
        max_array_len=ARRAY_LIMIT,
        max_map_len=0,
        max_ext_len=0,
    )
    return msgspec.convert(raw, type_, strict=True)


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Message, blob: Buffer = b"") -> list[memoryview]:
    """The buffers of one frame in order: header with meta, then the blob if there is one (borrowed, not copied).

    Raises:
        LocalProtocolError: not a message of the vocabulary, or a length beyond the kind's limit.
    """
    cls = type(message)
    rule = _RULES.get(cls)
    if rule is None:
        raise LocalProtocolError(f"{cls.__name__} has no kind number")
    _, kind, meta_limit, blob_limit, is_ids, say_bytes, _ = rule
    head = bytearray(HEADER.size)
    _encoder.encode_into(message, head, HEADER.size)
    meta_len = len(head) - HEADER.size
    body = memoryview(blob) if blob else _NO_BLOB
    if type(blob) is not bytes:
        body = body.cast("B")
    blob_len = len(body)
    if (
        meta_len > meta_limit
        or blob_len > blob_limit
        or (is_ids and blob_len % 4)
        or (say_bytes is not None and say_bytes(message) != blob_len)
    ):
        raise LocalProtocolError(_check_lengths(cls, meta_len, blob_len) or _check_blob(message, blob_len) or "")
    HEADER.pack_into(head, 0, meta_len, blob_len, kind, FRAME_VERSION, 0)
    if blob_len == 0:
        return [memoryview(head)]
    return [memoryview(head), body]


def _check_lengths(cls: type[Message], meta_len: int, blob_len: int) -> str | None:
    limit = META_LIMITS.get(cls, META_LIMIT)
    if meta_len > limit:
        return f"{cls.__name__}: meta of {meta_len} bytes (limit {limit})"
    limit = BLOB_LIMITS.get(cls, 0)
    if blob_len > limit:
        return f"{cls.__name__}: blob of {blob_len} bytes (limit {limit})"
    if cls in _INT32_BLOBS and blob_len % 4:
        return f"{cls.__name__}: blob of {blob_len} bytes is not a whole number of int32"
    return None


def _check_blob(message: Message, blob_len: int) -> str | None:
    """Where the message says how long its blob is, it must be: so receivers may slice without looking."""
    say = _BLOB_BYTES.get(type(message))
    if say is None:
        return None
    expected = say(message)
    if blob_len != expected:
        return f"{type(message).__name__}: blob of {blob_len} bytes, but its fields say {expected}"
    return None


class FrameReader:
    """Cuts a byte stream into frames. All partial state lives here, so whoever reads may be cancelled anywhere.

    Either `feed` bytes, or receive into `room()` and tell with `received(n)`, which saves a copy for large blobs.
    Then take frames with `next()` until it gives None. After a violation the frames before it can still be taken; then
    `next()` raises, for ever.
    """

    def __init__(self, accepts: frozenset[type[Message]]) -> None:
        self._kind_to_message = {MESSAGE_TO_KIND[cls]: cls for cls in accepts}
        self._kind_to_rule = {MESSAGE_TO_KIND[cls]: _RULES[cls] for cls in accepts}
        # Made when it is needed first: who feeds whole frames never needs it.
        self._ring = bytearray()
        self._view = memoryview(self._ring)
        self._lo = self._hi = 0
        # The frame being read: its class and lengths once the header is there, its message once the meta is.
        self._cls: type[Message] | None = None
        self._meta_len = self._blob_len = 0
        self._message: Message | None = None
        # A blob too large for what is left of the ring has a buffer of its own.
        self._blob: bytearray | None = None
        self._blob_have = 0
        self._ready: list[Frame] = []
        self._violation: str | None = None
        self._lent = self._view[:0]

    @property
    def inside_frame(self) -> bool:
        """Whether the stream would be torn if it ended here."""
        return self._cls is not None or self._lo != self._hi

    def feed(self, data: Buffer) -> None:
        """Takes bytes in (copies them)."""
        rest = memoryview(data) if isinstance(data, bytes) else memoryview(data).cast("B")
        if self._lo == self._hi and self._cls is None and self._blob is None and self._violation is None:
            try:
                taken = self._take_whole(rest, 0, rest.nbytes, is_ring=not isinstance(data, bytes))
                if taken == rest.nbytes:
                    return
                rest = rest[taken:]
            except RemoteProtocolError as error:
                self._violation = str(error)
        while rest.nbytes and self._violation is None:
            room = self.room()
            n = min(room.nbytes, rest.nbytes)
            room[:n] = rest[:n]
            self.received(n)
            rest = rest[n:]

    def room(self) -> memoryview:
        """Where the next bytes go; never empty. Valid until the next call of `room` or `received`."""
        self._lent.release()  # a bytearray with a live view can not grow
        self._lent = self._find_room()
        return self._lent

    def _find_room(self) -> memoryview:
        if self._blob is not None:
            if self._blob_have == len(self._blob):
                # Doubling follows what really came: a header alone can not make us allocate its blob.
                grow = min(self._blob_len, 2 * len(self._blob)) - len(self._blob)
                self._blob.extend(bytes(grow))
            return memoryview(self._blob)[self._blob_have :]
        if self._lo == self._hi:
            self._lo = self._hi = 0
        elif self._lo and len(self._ring) - self._hi < len(self._ring) // 2:
            pending = self._hi - self._lo
            self._ring[:pending] = self._ring[self._lo : self._hi]
            self._lo, self._hi = 0, pending
        if self._hi == len(self._ring):
            # The first bytes, or a meta longer than the ring: doubling follows what really came, here too.
            size = max(2 * len(self._ring), _RING_BYTES)
            self._ring = self._ring[self._lo : self._hi] + bytes(size - self._hi + self._lo)
            self._hi -= self._lo
            self._lo = 0
            self._view = memoryview(self._ring)
        return self._view[self._hi :]

    def received(self, n: int) -> None:
        """`n` bytes were written to the start of `room()`."""
        self._lent.release()
        if self._blob is not None:
            self._blob_have += n
        else:
            self._hi += n
        try:
            if self._cls is None and self._violation is None:
                self._lo = self._take_whole(self._view, self._lo, self._hi, is_ring=True)
            while self._violation is None and self._advance():
                pass
        except RemoteProtocolError as error:
            self._violation = str(error)

    def next(self) -> Frame | None:
        """The next complete frame, or None if more bytes are needed.

        Raises:
            RemoteProtocolError: the peer broke the protocol; the connection must be dropped.
        """
        if self._ready:
            return self._ready.pop(0)
        self._raise_violation()
        return None

    def take(self) -> list[Frame]:
        """All complete frames; raises like `next()` only when there is none before the violation."""
        frames = self._ready
        if not frames:
            self._raise_violation()
            return []
        self._ready = []
        return frames

    def _raise_violation(self) -> None:
        if self._violation is not None:
            raise RemoteProtocolError(self._violation)

    def _take_whole(self, view: memoryview, at: int, end: int, *, is_ring: bool) -> int:
        """Takes the frames that lie in `view[at:end]` from their first byte to their last; where they end. `is_ring`:
        the view will have other bytes."""
        size, kind_to_rule, most = HEADER.size, self._kind_to_rule, view.nbytes
        while end - at >= size:
            meta_len, blob_len, kind, version, flags = HEADER.unpack_from(view, at)
            rule = kind_to_rule.get(kind)
            if (
                rule is None
                or version != FRAME_VERSION
                or flags
                or meta_len > rule.meta_limit
                or blob_len > rule.blob_limit
                or (rule.is_ids and blob_len % 4)
            ):
                self._read_header(view, at)  # says what is wrong
                raise AssertionError("a header looks wrong, and is not")
            blob_at = at + size + meta_len
            if blob_at + blob_len > end:
                break
            message = _read_meta(rule, view[at + size : blob_at], blob_len)
            at = blob_at + blob_len
            if not blob_len:
                blob = _NO_BLOB
            elif is_ring or 2 * blob_len < most:
                # One copy out of what will be used again, so that the frame outlives it; and out of what the frame
                # would keep from being freed, where that is more than itself.
                blob = memoryview(bytes(view[blob_at:at]))
            else:
                blob = view[blob_at:at]
            self._ready.append(_make_frame((message, blob)))
        return at

    def _advance(self) -> bool:
        """One stage of one frame; False if it needs more bytes."""
        if self._blob is not None:
            if self._blob_have < self._blob_len:
                return False
            self._finish(memoryview(self._blob).toreadonly())
            self._blob = None
            return True
        have = self._hi - self._lo
        if self._cls is None:
            if have < HEADER.size:
                return False
            self._cls, self._meta_len, self._blob_len = self._read_header(self._view, self._lo)
            self._lo += HEADER.size
            return True
        if self._message is None:
            if have < self._meta_len:
                return False
            meta = self._view[self._lo : self._lo + self._meta_len]
            self._message = _read_meta(_RULES[self._cls], meta, self._blob_len)
            self._lo += self._meta_len
            return True
        if have >= self._blob_len:
            # One copy out of the ring, so that the frame outlives the ring's reuse.
            blob = bytes(self._view[self._lo : self._lo + self._blob_len])
            self._lo += self._blob_len
            self._finish(memoryview(blob) if blob else _NO_BLOB)
            return True
        if self._blob_len <= len(self._ring) // 4:
            return False  # small: wait for the rest in the ring
        self._blob = bytearray(max(have, min(self._blob_len, _BLOB_FIRST_BYTES)))
        self._blob[:have] = self._view[self._lo : self._hi]
        self._blob_have = have
        self._lo = self._hi = 0
        return False

    def _read_header(self, view: memoryview, at: int) -> tuple[type[Message], int, int]:
        meta_len, blob_len, kind, version, flags = HEADER.unpack_from(view, at)
        if version != FRAME_VERSION or flags != 0:
            raise RemoteProtocolError(
                f"frame version {version}, flags {flags}: this side speaks version {FRAME_VERSION}, flags 0"
            )
        cls = self._kind_to_message.get(kind)
        if cls is None:
            known = KIND_TO_MESSAGE.get(kind)
            name = f" ({known.__name__})" if known else ""
            raise RemoteProtocolError(f"kind {kind}{name} is not accepted on this link")
        problem = _check_lengths(cls, meta_len, blob_len)
        if problem:
            raise RemoteProtocolError(f"kind {kind}, {problem}")
        return cls, meta_len, blob_len

    def _finish(self, blob: memoryview) -> None:
        assert self._message is not None
        self._ready.append(Frame(self._message, blob))
        self._cls = self._message = None


def _read_meta(rule: _Rule, meta: memoryview, blob_len: int) -> Message:
    cls = rule.cls
    message: Message | None = None
    if meta.nbytes <= SHORT_META:
        try:  # `contextlib.suppress` costs as much as the decoding
            message = rule.decoder.decode(meta)
        except msgspec.DecodeError:
            pass
    try:
        if message is None:
            message = unpack_struct(meta, cls)  # or it says what is wrong
    except (ValueError, TypeError, OverflowError) as error:
        raise RemoteProtocolError(
            f"kind {MESSAGE_TO_KIND[cls]}, {cls.__name__}: bad meta of {meta.nbytes} bytes"
            f" (limit {META_LIMIT}): {type(error).__name__}: {str(error)[:200]}"
        ) from None
    if rule.say_bytes is not None and rule.say_bytes(message) != blob_len:
        raise RemoteProtocolError(f"kind {MESSAGE_TO_KIND[cls]}, {_check_blob(message, blob_len)}")
    return message
