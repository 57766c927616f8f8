"""What the head keeps of clients, ready ranks and requests: the rows of the router's tables. They decide nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.core.routing import RankLoad
from engine.core.traffic import Turns
from engine.errors import Overflow, PeerGone
from transport.messages import Message, RankReady, RequestStarted, Role, Submit
from transport.stream import FrameStream


@dataclasses.dataclass(slots=True, eq=False)
class Client:
    """One connection to the request socket. `drop` ends the connection; it must not call back into the router."""

    key: int
    name: str
    link: FrameStream
    drop: Callable[[str], None]
    request_to_number: dict[int, int] = dataclasses.field(default_factory=dict)
    dropped: bool = False

    def tell(self, message: Message, blob: bytes = b"") -> None:
        """Queues a frame. A client that does not read is dropped whole: a stream with a gap would be a lie."""
        if self.dropped:
            return
        try:
            self.link.post(message, blob)
        except PeerGone:
            self.dropped = True  # it went by itself, and its own connection will notice
        except Overflow as error:
            self.dropped = True
            self.drop(str(error))


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a request costs on one of its ranks. `tokens`: as in `RankLoad`."""

    tokens: int
    pages: int


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """A ready rank. `fault` makes the supervisor end this life of it."""

    generation: int
    role: Role
    link: FrameStream
    ready: RankReady
    fault: Callable[[str], None]
    parts: dict[int, Part] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    pages: int = 0
    quarantined_pages: int = 0
    is_drained: bool = False
    turns: Turns = dataclasses.field(default_factory=Turns)
    _load: RankLoad | None = None
    """What `load` returned last, while it holds: every request that waits asks all seats."""

    def tell(self, message: Message, blob: bytes | memoryview = b"") -> None:
        try:
            self.link.post(message, blob)
        except (Overflow, PeerGone) as error:
            self.fault(f"does not take commands: {error}")

    def load(self) -> RankLoad:
        if self._load is None:
            ready = self.ready
            self._load = RankLoad(
                ready.rank,
                len(self.parts),
                self.tokens,
                self.pages,
                ready.page_tokens,
                ready.num_pages,
                self.quarantined_pages,
                self.is_drained,
            )
        return self._load

    def note_quarantine(self, pages: int) -> None:
        """Of the rank's last snapshot."""
        if pages != self.quarantined_pages:
            self.quarantined_pages, self._load = pages, None

    def set_drained(self, drained: bool) -> None:
        self.is_drained, self._load = drained, None

    def take(self, number: int, part: Part) -> None:
        self.parts[number] = part
        self.tokens += part.tokens
        self.pages += part.pages
        self._load = None

    def release(self, number: int) -> bool:
        part = self.parts.pop(number, None)
        if part is None:
            return False
        self.tokens -= part.tokens
        self.pages -= part.pages
        self._load = None
        self.turns.streams.discard(number)
        return True


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A submission.

    Attributes:
        client: None once the client needs to hear no more of it; `client_name` stays.
        state_at: when it came into the state that operators see.
        started_at: when its first token came.
        complete_at: when its client had all that it wants, and how many tokens it had then.
        cancel_words: why it was cancelled, for the client.
        affinity: its `core.affinity.affinity_key`; empty if no prompt is shared.
        guessed: ids of its prompt that its prefill rank was thought to have, when it was placed there.
    """

    number: int
    client: Client | None
    submit: Submit
    num_ids: int
    ids: bytes | memoryview
    queued_at: float
    prefill: int | None = None
    decode: int | None = None
    started: RequestStarted | None = None
    awaited: set[int] = dataclasses.field(default_factory=set)
    abort_deadline: float | None = None
    client_name: str = ""
    state_at: float = 0.0
    started_at: float = 0.0
    complete_at: tuple[float, int] | None = None
    cancel_words: str = "cancelled"
    affinity: bytes = b""
    guessed: int = 0

    @property
    def max_length(self) -> int:
        """Ids of the sequence at its longest."""
        return self.num_ids - self.submit.generated + self.submit.sampling.max_tokens

    @property
    def is_aborting(self) -> bool:
        return bool(self.awaited)
