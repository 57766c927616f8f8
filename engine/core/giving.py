"""Giver: a decode rank's side of the hand-back: which finished turns it offers, and what becomes of their memory.

States and transitions are `handback.GIVER`. The memory of an offer stays IN_FLIGHT: its request is over, and nothing
but a push reads it. A request that waits for room has it back at once, unless a push runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from engine.core.arena import Arena, Holding
from engine.core.effects import Effect, PushFailure, StartPush, ToHead, ToPeer
from engine.core.handback import GIVER, Action, GiverEvent, GiverPhase
from engine.core.pages import PageState
from engine.core.request import RequestKey, Sequence, count_pages
from engine.core.runs import NO_UNITS, Runs
from engine.core.schedule import SideSizes
from engine.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import (
    EpochEnded,
    GrantRevoked,
    PagesGranted,
    PeerHello,
    TurnCommitted,
    TurnCounts,
    TurnDeclined,
    TurnOffered,
    WriterOverdue,
)

SPARE_IDS = 8
"""Positions behind its end that a slab may have been written at: its rings have room for so many more than is read."""


@dataclasses.dataclass(slots=True, eq=False)
class Offer:
    """A finished turn.

    Attributes:
        rank, generation: of the prefill rank that had computed its prompt.
        num_ids: ids whose state is complete.
        pages: from the page on that the first id behind the prompt is in, up to `num_ids`.
        offered_us: when it was offered.
        grant: what it may be written to, once that is known.
        is_overdue: its push takes longer than it may.
    """

    key: RequestKey
    rank: int
    generation: int
    link: int
    num_ids: int
    pages: Runs
    slab: int
    offered_us: int
    phase: GiverPhase = GiverPhase.NEW
    grant: PagesGranted | None = None
    remote_pages: Runs = NO_UNITS
    is_overdue: bool = False


class Giver:
    """See the module.

    Args:
        arena: borrowed; the memory of offers is in it.
        tell: takes effects.
    """

    def __init__(self, sizes: SideSizes, arena: Arena, tell: Callable[[Effect], None]) -> None:
        self._sizes, self._arena, self._tell = sizes, arena, tell
        self._back = sizes.hand_back
        self._offers: dict[RequestKey, Offer] = {}
        """In the order in which they were made."""
        self._epochs: dict[tuple[int, int, int], Offer] = {}
        self._broken: set[tuple[int, int]] = set()
        self._accused: set[tuple[int, int]] = set()
        self._num_pages = 0
        self._offered = self._withdrawn = self._declined = self._failed = 0

    # ------------------------------------------------------------ offers

    def is_worth(self, sequence: Sequence) -> bool:
        """Whether a sequence that has just finished may be offered: it is long enough, and what its slab was written at
        behind its end does no harm to what is read."""
        if self._back is None or sequence.reason is None:
            return False
        num_said = len(sequence.history) // 4
        spilt = sequence.beyond + sequence.steps * (1 + self._sizes.step.drafts)
        return num_said >= max(2, self._back.tokens) and spilt <= SPARE_IDS

    def offer(self, sequence: Sequence, link: int, hello: PeerHello, now_us: int) -> bool:
        """Takes over the memory of a finished sequence that no step names any more, as far as the turn is handed back;
        False if it is not, and nothing was taken.

        Args:
            link: to the prefill rank; hello: its greeting.
        """
        back, page_tokens = self._back, self._sizes.step.page_tokens
        life = (hello.rank, hello.generation)
        if back is None or not hello.num_pages or life in self._broken:
            return False
        if sequence.prefill_generation != hello.generation or sequence.key in self._offers:
            return False
        num_prompt = sequence.reserve.num_ids
        num_ids = num_prompt + len(sequence.history) // 4 - 1
        pages = sequence.pages[num_prompt // page_tokens : count_pages(num_ids, page_tokens)]
        most_pages, most_slabs = back.bounds(self._sizes)
        if self._num_pages + len(pages) > most_pages or self._num_holding >= most_slabs:
            return False
        offer = Offer(sequence.key, *life, link, num_ids, pages, sequence.slab, now_us)
        rest = sequence.pages[: num_prompt // page_tokens] + sequence.pages[count_pages(num_ids, page_tokens) :]
        self._arena.pages.free(rest, PageState.IN_FLIGHT)
        self._offers[offer.key] = offer
        self._num_pages += len(pages)
        self._move(offer, GiverEvent.OFFER, said=sequence.history)
        return True

    def withdraw_oldest(self) -> bool:
        """Gives the memory of the oldest unanswered offer back; False if there is none."""
        offer = next((offer for offer in self._offers.values() if offer.phase is GiverPhase.OFFERED), None)
        if offer is None:
            return False
        self._move(offer, GiverEvent.WITHDRAW)
        return True

    def accuse(self) -> None:
        """A request finds no room, though nothing is left to withdraw: has the processes ended, once each, to which a
        push is overdue, because only that ends it."""
        pages: dict[tuple[int, int], int] = {}
        for offer in self._offers.values():
            life = (offer.rank, offer.generation)
            if offer.is_overdue and offer.slab >= 0 and life not in self._accused:
                pages[life] = pages.get(life, 0) + len(offer.pages)
        for life, count in pages.items():
            self._accused.add(life)
            self._tell(ToHead(WriterOverdue(*life, pages=count)))

    def withdraw_all(self) -> None:
        while self.withdraw_oldest():
            pass

    def expire(self, now_us: int) -> None:
        """Withdraws offers that found no answer in time."""
        due_us = self.next_us
        while due_us is not None and due_us <= now_us:
            self.withdraw_oldest()
            due_us = self.next_us

    @property
    def next_us(self) -> int | None:
        """When the oldest unanswered offer is withdrawn."""
        if self._back is None or not self._offers:
            return None
        waiting = (o.offered_us for o in self._offers.values() if o.phase is GiverPhase.OFFERED)
        oldest_us = next(waiting, None)
        return None if oldest_us is None else oldest_us + self._back.wait_us

    # ------------------------------------------------------------ what peers say

    def on_peer(self, link: int, peer: PeerHello, message: object, blob: memoryview) -> bool:
        """A frame of a prefill rank; False if it is about something else.

        Raises:
            RemoteProtocolError: the link must be dropped.
        """
        match message:
            case PagesGranted():
                self._on_grant(link, peer, message, blob)
            case TurnDeclined():
                offer = self._offers.get((message.request, message.attempt))
                if offer is not None and offer.rank == peer.rank:
                    self._declined += 1
                    self._move(offer, GiverEvent.DECLINED)
            case GrantRevoked():
                offer = self._epochs.get((peer.rank, peer.generation, message.epoch))
                if offer is None:
                    # Ended before, and the word of it crossed the revoke or was lost with an older link.
                    self._tell(ToPeer(link, EpochEnded(message.request, message.epoch)))
                else:
                    if offer.phase is GiverPhase.ORPHANED:
                        offer.link = link
                    self._move(offer, GiverEvent.REVOKE)
            case _:
                return False
        return True

    def _on_grant(self, link: int, peer: PeerHello, message: PagesGranted, blob: memoryview) -> None:
        offer = self._offers.get((message.request, message.attempt))
        epoch_key = (peer.rank, peer.generation, message.epoch)
        if offer is None or (offer.rank, offer.generation) != epoch_key[:2] or offer.link != link:
            # Withdrawn meanwhile: nothing was or will be written under it.
            self._tell(ToPeer(link, EpochEnded(message.request, message.epoch)))
            return
        pages = Runs.from_bytes(bytes(blob))
        if len(pages) != len(offer.pages) or not pages.is_within(peer.num_pages) or message.slab >= peer.num_slabs:
            raise RemoteProtocolError(
                f"epoch {message.epoch}: {len(pages)} pages and slab {message.slab} granted for the {len(offer.pages)}"
                f" of request {offer.key}; the peer has {peer.num_pages} and {peer.num_slabs}"
            )
        if epoch_key in self._epochs:
            raise RemoteProtocolError(f"epoch {message.epoch} of prefill rank {peer.rank} is granted twice")
        offer.remote_pages = pages
        grant, offer.grant = offer.grant, message
        try:
            self._move(offer, GiverEvent.GRANT)
        except RemoteProtocolError:
            offer.grant = grant
            raise

    def on_link_lost(self, link: int) -> None:
        for offer in [*self._offers.values()]:
            if offer.link == link and offer.phase is not GiverPhase.ORPHANED:
                self._move(offer, GiverEvent.LINK_LOST)

    def on_peer_down(self, rank: int, generation: int) -> None:
        """A prefill process, and its lives before, are dead; their links were lost before."""
        for offer in [*self._offers.values()]:
            if offer.rank == rank and offer.generation <= generation:
                if offer.phase in (GiverPhase.OFFERED, GiverPhase.PUSHING, GiverPhase.ENDING):
                    self._move(offer, GiverEvent.LINK_LOST)
                if offer.phase in (GiverPhase.ORPHANED, GiverPhase.BURNT):
                    self._move(offer, GiverEvent.PEER_DOWN)
        self._broken = {life for life in self._broken if life[0] != rank or life[1] > generation}

    # ------------------------------------------------------------ pushes

    def on_push_done(self, key: RequestKey, num_bytes: int, checksum: int | None) -> None:
        """All of a turn is written."""
        self._move(self._offers[key], GiverEvent.PUSHED, num_bytes=num_bytes, checksum=checksum)

    def on_push_failed(self, key: RequestKey, how: PushFailure, *, is_dead: Callable[[int, int], bool]) -> None:
        """A turn's push went wrong. Nothing but turns goes that way, so the link stays; after a failed write nothing
        more is offered to that life of the rank.

        Args:
            is_dead: whether that life of a rank is.
        """
        offer = self._offers[key]
        if how == "failed" and is_dead(offer.rank, offer.generation):
            how = "void"
        if how == "failed":
            self._broken.add((offer.rank, offer.generation))
        offer.is_overdue |= how == "overdue"
        self._move(offer, _FAILURE_TO_EVENT[how])

    # ------------------------------------------------------------ what others ask

    @property
    def _num_holding(self) -> int:
        return sum(offer.slab >= 0 for offer in self._offers.values())

    @property
    def is_quiet(self) -> bool:
        """No push runs."""
        return self._num_holding == 0

    def holdings(self) -> Iterator[Holding]:
        """Memory of offers, for `Arena.check`."""
        state = PageState.IN_FLIGHT
        return ((offer.pages, offer.slab, state, (), state) for offer in self._offers.values() if offer.slab >= 0)

    def counts(self) -> TurnCounts:
        """Of this life."""
        return TurnCounts(self._offered, self._withdrawn, self._declined, self._failed)

    # ------------------------------------------------------------ inside

    def _move(
        self,
        offer: Offer,
        event: GiverEvent,
        *,
        said: bytes = b"",
        num_bytes: int = 0,
        checksum: int | None = None,
    ) -> None:
        before = offer.phase
        transition = GIVER.follow(before, event, "turn", offer.key)
        offer.phase = transition.phase
        self._withdrawn += event is GiverEvent.WITHDRAW or (event is GiverEvent.LINK_LOST and offer.grant is None)
        if event in _FAILING and before is GiverPhase.PUSHING:
            self._failed += 1
        if transition.phase is GiverPhase.CLOSED:
            del self._offers[offer.key]
            if offer.grant is not None:
                del self._epochs[offer.rank, offer.generation, offer.grant.epoch]
        for action in transition.actions:
            match action:
                case Action.OFFER:
                    self._offered += 1
                    word = TurnOffered(*offer.key, num_ids=offer.num_ids, num_pages=len(offer.pages))
                    self._tell(ToPeer(offer.link, word, said))
                case Action.PUSH:
                    self._push(offer)
                case Action.COMMIT:
                    assert offer.grant is not None
                    request, epoch = offer.key[0], offer.grant.epoch
                    commit = TurnCommitted(request, epoch, offer.num_ids, len(offer.pages), num_bytes, checksum)
                    self._tell(ToPeer(offer.link, commit))
                case Action.END_EPOCH:
                    assert offer.grant is not None
                    self._tell(ToPeer(offer.link, EpochEnded(offer.key[0], offer.grant.epoch)))
                case Action.FREE:
                    self._free(offer)
                case _:
                    raise LocalProtocolError(f"{action.name} is not an action of {event.value}")

    def _push(self, offer: Offer) -> None:
        assert offer.grant is not None
        self._epochs[offer.rank, offer.generation, offer.grant.epoch] = offer
        count, slabs = len(offer.pages), (offer.slab, offer.grant.slab)
        self._tell(StartPush(offer.key, offer.link, 0, count, offer.pages, offer.remote_pages, slabs))

    def _free(self, offer: Offer) -> None:
        self._arena.free(offer.pages, offer.slab, PageState.IN_FLIGHT)
        self._num_pages -= len(offer.pages)
        offer.slab = -1


_FAILURE_TO_EVENT: dict[PushFailure, GiverEvent] = {
    "void": GiverEvent.PUSH_VOID,
    "overdue": GiverEvent.PUSH_OVERDUE,
    "failed": GiverEvent.PUSH_FAILED,
}
_FAILING = (*_FAILURE_TO_EVENT.values(), GiverEvent.REVOKE, GiverEvent.LINK_LOST)
"""Events after which a turn that was being pushed is not committed."""
