"""Taker: a prefill rank's side of the hand-back: which finished turns it takes into its cache, and their memory.

States and transitions are `handback.TAKER`. What a turn is granted comes from what is free or from cuts that are given
up for it, as that of a prompt does; a prompt that waits for room has it revoked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from engine.core.arena import Arena, Holding
from engine.core.effects import Effect, ReadBack, TellCorrupt, ToHead, ToPeer
from engine.core.fence import Fence, Writer
from engine.core.handback import TAKER, Action, TakerEvent, TakerPhase
from engine.core.pages import PageState
from engine.core.request import RequestKey
from engine.core.reuse import PrefixCache, Turn
from engine.core.schedule import SideSizes
from engine.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import (
    DeclineReason,
    EpochEnded,
    GrantRevoked,
    PagesGranted,
    PeerWelcome,
    TurnCommitted,
    TurnCounts,
    TurnDeclined,
    TurnOffered,
    WriterOverdue,
)


@dataclasses.dataclass(slots=True, eq=False)
class Gift:
    """A turn that is handed back here.

    Attributes:
        turn: its ids and its memory; None where it was declined.
        granted_us: when its memory was granted.
        quarantined_us: when `fence.Fence` first saw it in quarantine; 0 if it has not.
        commit: once it is there.
    """

    key: RequestKey
    writer: Writer
    link: int
    epoch: int = 0
    turn: Turn | None = None
    phase: TakerPhase = TakerPhase.NEW
    granted_us: int = 0
    quarantined_us: int = 0
    commit: TurnCommitted | None = None

    @property
    def is_quarantined(self) -> bool:
        return self.phase is TakerPhase.QUARANTINED

    @property
    def num_pages(self) -> int:
        return 0 if self.turn is None else len(self.turn.pages)


class Taker:
    """See the module.

    Args:
        arena, cache: borrowed; the memory of turns is in them.
        tell: takes effects.
    """

    def __init__(self, sizes: SideSizes, arena: Arena, cache: PrefixCache, tell: Callable[[Effect], None]) -> None:
        self._sizes, self._arena, self._cache, self._tell = sizes, arena, cache, tell
        self._gifts: dict[int, Gift] = {}
        """By epoch, in the order in which they were granted."""
        self._reading: dict[RequestKey, Gift] = {}
        # A quarantine of turns alone ends nobody: what is short does.
        self._fence = Fence(share=2.0, cap_us=sizes.cap_us, room_us=sizes.room_us)
        self._next_epoch = 1
        self._granted = self._kept = self._kept_pages = self._kept_bytes = self._corrupt = 0
        self._why: dict[DeclineReason, int] = {"gone": 0, "known": 0, "full": 0, "draining": 0}

    # ------------------------------------------------------------ what peers say

    def on_peer(
        self,
        link: int,
        peer: PeerWelcome,
        message: object,
        blob: memoryview,
        now_us: int,
        *,
        is_busy: bool,
        is_draining: bool,
    ) -> bool:
        """A frame of a decode rank; False if it is about something else.

        Args:
            is_busy: prompts wait for room.
            is_draining: nothing new is taken.

        Raises:
            RemoteProtocolError: the link must be dropped.
        """
        match message:
            case TurnOffered():
                self._on_offer(link, peer, message, blob, now_us, is_busy, is_draining)
            case TurnCommitted():
                self._on_commit(peer, message, now_us)
            case EpochEnded():
                if message.epoch >= self._next_epoch:
                    raise RemoteProtocolError(f"epoch {message.epoch} ended, which was never granted")
                if message.epoch in self._gifts:
                    self._move(self._find(peer, message.epoch), TakerEvent.EPOCH_ENDED)
            case _:
                return False
        return True

    def _on_offer(
        self,
        link: int,
        peer: PeerWelcome,
        message: TurnOffered,
        blob: memoryview,
        now_us: int,
        is_busy: bool,
        is_draining: bool,
    ) -> None:
        key = (message.request, message.attempt)
        if message.num_pages < 1 or len(blob) < 8 or int(np.frombuffer(blob, "<u4").max()) >= self._sizes.vocab_size:
            raise RemoteProtocolError(f"turn {key}: {len(blob)} bytes of ids for {message.num_pages} pages")
        gift = Gift(key, (peer.rank, peer.generation), link)
        reason = self._refuse(gift, message, blob, is_busy=is_busy, is_draining=is_draining)
        if reason is not None:
            self._why[reason] += 1
            self._move(gift, TakerEvent.REFUSE, reason=reason)
            return
        gift.granted_us = now_us
        self._move(gift, TakerEvent.OFFER)

    def _refuse(
        self, gift: Gift, message: TurnOffered, blob: memoryview, *, is_busy: bool, is_draining: bool
    ) -> DeclineReason | None:
        """Takes memory for the turn, or says why not."""
        back = self._sizes.hand_back
        if is_draining:
            return "draining"
        if back is None:
            return "gone"
        most_pages, most_slabs = back.bounds(self._sizes)
        held = sum(other.num_pages for other in self._gifts.values())
        if is_busy or held + message.num_pages > most_pages or len(self._gifts) + len(self._reading) >= most_slabs:
            self._cache.drop_turn(gift.key)
            return "full"
        turn = self._cache.open_turn(gift.key, blob)
        if not isinstance(turn, Turn):
            return turn
        if turn.num_ids != message.num_ids or len(turn.pages) != message.num_pages:
            # Both know the prompt's length and what a page holds.
            self._cache.close_turn(turn, PageState.OWNED)
            raise RemoteProtocolError(
                f"turn {gift.key}: {message.num_ids} ids and {message.num_pages} pages offered;"
                f" they are {turn.num_ids} and {len(turn.pages)}"
            )
        gift.turn = turn
        return None

    def _on_commit(self, peer: PeerWelcome, message: TurnCommitted, now_us: int) -> None:
        gift = self._find(peer, message.epoch)
        assert gift.turn is not None
        if message.num_ids != gift.turn.num_ids or message.num_pages != len(gift.turn.pages):
            self._move(gift, TakerEvent.BAD_COMMIT)
            return
        is_unread = self._sizes.checksums and gift.phase is TakerPhase.GRANTED
        if is_unread and message.checksum is None:
            raise RemoteProtocolError(f"epoch {message.epoch}: a commit without its checksum")
        gift.commit = message
        self._move(gift, TakerEvent.COMMIT_UNREAD if is_unread else TakerEvent.COMMIT, now_us=now_us)

    def _find(self, peer: PeerWelcome, epoch: int) -> Gift:
        gift = self._gifts.get(epoch)
        if gift is None or gift.writer != (peer.rank, peer.generation):
            raise RemoteProtocolError(f"epoch {epoch} is not granted to decode rank {peer.rank}")
        return gift

    # ------------------------------------------------------------ links and lives

    def on_link_up(self, link: int, peer: PeerWelcome) -> None:
        for gift in [*self._gifts.values()]:
            if gift.writer == (peer.rank, peer.generation):
                gift.link = link
                self._move(gift, TakerEvent.LINK_UP)

    def on_link_lost(self, link: int) -> None:
        for gift in [*self._gifts.values()]:
            if gift.link == link:
                self._move(gift, TakerEvent.LINK_LOST)

    def on_peer_down(self, rank: int, generation: int) -> None:
        """A decode process, and its lives before, are dead."""
        for gift in [*self._gifts.values()]:
            if gift.writer[0] == rank and gift.writer[1] <= generation:
                self._move(gift, TakerEvent.PEER_DOWN)

    # ------------------------------------------------------------ room and time

    def give_way(self) -> None:
        """A prompt waits for room: asks for all of it back."""
        for gift in [*self._gifts.values()]:
            if gift.phase is TakerPhase.GRANTED:
                self._move(gift, TakerEvent.NEEDED)

    def look(self, *, is_short: bool, now_us: int) -> None:
        """Has writers ended that owe the end of an epoch, as `fence.Fence` says, where a prompt can not run for them.

        One that has no link may get one: it is this rank that dials.
        """
        if not self._gifts:
            self._fence.rest()
            return
        gifts = self._gifts.values()
        late = self._fence.look(self._arena, gifts, is_short=is_short, is_linked=lambda rank: True, now_us=now_us)
        for writer, num_pages in late:
            self._tell(ToHead(WriterOverdue(*writer, pages=num_pages)))

    def expire(self, now_us: int) -> None:
        """Gives up what was granted and never committed. It stays in quarantine."""
        for gift in [*self._gifts.values()]:
            if gift.phase is TakerPhase.GRANTED and gift.granted_us + self._sizes.grant_us <= now_us:
                self._move(gift, TakerEvent.OVERDUE)

    @property
    def next_us(self) -> int | None:
        """When to take a turn, if nothing happens before: `expire`, then `look`."""
        if not self._gifts:
            return None
        granted = (gift.granted_us for gift in self._gifts.values() if gift.phase is TakerPhase.GRANTED)
        oldest_us, fence_us = next(granted, None), self._fence.next_us
        due_us = None if oldest_us is None else oldest_us + self._sizes.grant_us
        return min(due_us, fence_us) if due_us is not None and fence_us is not None else due_us or fence_us

    # ------------------------------------------------------------ reading back

    def on_pages_read(self, key: RequestKey, checksums: tuple[int, ...], now_us: int) -> None:
        """What was written for a turn was read back."""
        gift = self._reading.pop(key)
        assert gift.commit is not None and gift.commit.checksum is not None and gift.turn is not None
        told, found = gift.commit.checksum, checksums[0]
        if told != found:
            self._corrupt += 1
            self._tell(TellCorrupt(key, *gift.writer, 0, len(gift.turn.pages), told, found))
        self._move(gift, TakerEvent.SOUND if told == found else TakerEvent.CORRUPT, now_us=now_us)

    # ------------------------------------------------------------ what others ask

    @property
    def is_quiet(self) -> bool:
        """Nothing is granted or read back."""
        return not self._gifts and not self._reading

    @property
    def num_corrupt(self) -> int:
        """Turns whose bytes did not have the checksum that their writer told."""
        return self._corrupt

    def holdings(self) -> Iterator[Holding]:
        """Memory of turns that are not in the cache yet, for `Arena.check`."""
        for gift in (*self._gifts.values(), *self._reading.values()):
            if gift.turn is not None:
                state = _PHASE_TO_STATE[gift.phase]
                yield gift.turn.pages, gift.turn.slab, state, (), state

    def counts(self) -> TurnCounts:
        """Of this life."""
        return TurnCounts(
            granted=self._granted,
            kept=self._kept,
            kept_pages=self._kept_pages,
            kept_bytes=self._kept_bytes,
            **self._why,
        )

    # ------------------------------------------------------------ inside

    def _move(self, gift: Gift, event: TakerEvent, *, reason: DeclineReason = "gone", now_us: int = 0) -> None:
        before = gift.phase
        transition = TAKER.follow(before, event, "turn", gift.key)
        gift.phase = transition.phase
        if before in _WRITTEN and transition.phase not in _WRITTEN:
            del self._gifts[gift.epoch]
        for action in transition.actions:
            match action:
                case Action.GRANT:
                    self._grant(gift)
                case Action.DECLINE:
                    self._tell(ToPeer(gift.link, TurnDeclined(*gift.key, reason=reason)))
                case Action.OWN:
                    assert gift.turn is not None
                    self._arena.adopt(gift.turn.pages, gift.turn.slab)
                case Action.READ_BACK:
                    assert gift.turn is not None
                    self._reading[gift.key] = gift
                    self._tell(ReadBack(gift.key, ((gift.turn.pages, gift.turn.slab),)))
                case Action.KEEP:
                    self._keep(gift, now_us)
                case Action.QUARANTINE:
                    assert gift.turn is not None
                    self._arena.quarantine(gift.turn.pages, gift.turn.slab)
                    self._cache.unpin_turn(gift.turn)
                case Action.REVOKE:
                    self._tell(ToPeer(gift.link, GrantRevoked(gift.key[0], gift.epoch)))
                case Action.FREE:
                    assert gift.turn is not None
                    self._cache.close_turn(gift.turn, _PHASE_TO_STATE[before])
                case _:
                    raise LocalProtocolError(f"{action.name} is not an action of {event.value}")

    def _grant(self, gift: Gift) -> None:
        assert gift.turn is not None
        gift.epoch = self._next_epoch
        self._next_epoch += 1
        self._gifts[gift.epoch] = gift
        self._granted += 1
        pages, slab = gift.turn.pages, gift.turn.slab
        self._arena.grant(pages, slab)
        word = PagesGranted(*gift.key, epoch=gift.epoch, slab=slab, num_pages=len(pages))
        self._tell(ToPeer(gift.link, word, pages.to_bytes()))

    def _keep(self, gift: Gift, now_us: int) -> None:
        assert gift.turn is not None and gift.commit is not None
        self._kept += 1
        self._kept_pages += len(gift.turn.pages)
        self._kept_bytes += gift.commit.num_bytes
        self._cache.keep_turn(gift.turn, now_us)


_WRITTEN = (TakerPhase.GRANTED, TakerPhase.QUARANTINED)
"""Phases with an epoch that is not over."""
_PHASE_TO_STATE = {
    TakerPhase.GRANTED: PageState.GRANTED,
    TakerPhase.QUARANTINED: PageState.QUARANTINED,
    TakerPhase.CHECKING: PageState.OWNED,
}
