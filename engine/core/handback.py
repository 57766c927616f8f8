"""The hand-back of a finished turn's KV from its decode rank to its prefill rank, as two transition tables.

Theory of operation. What a decode rank generated is, with the prompt before it, what the conversation's next prompt
begins with. So it offers the pages behind the prompt and the state slab to the prefill rank that had computed the
prompt, which grants memory for them under an epoch of its own, or declines. From there on it is the hand-off with its
roles exchanged: one-sided pushes that the owner of the memory can neither see nor stop, and memory that was granted may
be used for something else on exactly two events, the writer's word (EpochEnded, or TurnCommitted) or its confirmed
death. A deadline, a prompt that needs the room or a broken link end the *hand-back*; its granted memory stays in
quarantine until one of the two.

Nobody waits for a hand-back: the request was answered before. So the giver keeps its memory for the offer only while no
request needs it, and withdraws without a word: to a grant for an offer that it does not know any more it answers that
the epoch has ended, since nothing was ever written under it.

A turn is one push. So where that has ended nothing reads the giver's memory any more; one that *failed* may still land,
and its epoch can not be ended by the writer's word (BURNT): the owner gets that memory back when the writer dies.
"""

from __future__ import annotations

import enum

from engine.core.tables import Table, Term
from engine.core.tables import go as _to


class Action(enum.Enum):
    """What a transition asks its side to do, in the order in which the table lists them."""

    FREE = "free the memory"
    # giver, the decode rank
    OFFER = "TurnOffered to the prefill rank"
    PUSH = "push all pages and the slab"
    COMMIT = "TurnCommitted to the prefill rank"
    END_EPOCH = "EpochEnded to the prefill rank"
    # taker, the prefill rank
    GRANT = "PagesGranted to the decode rank"
    DECLINE = "TurnDeclined to the decode rank"
    OWN = "own the memory"
    KEEP = "enter it into the cache"
    READ_BACK = "checksum what was written"
    QUARANTINE = "quarantine the memory"
    REVOKE = "GrantRevoked to the decode rank"


class GiverPhase(Term):
    """A turn on its decode rank. ENDING was given up while its push runs; ORPHANED the same, with no link left over
    which the epoch's end could be told. BURNT holds no memory, only the duty to keep silent about its epoch."""

    NEW = "new"
    OFFERED = "offered"
    PUSHING = "pushing"
    ENDING = "ending"
    ORPHANED = "orphaned"
    BURNT = "burnt"
    CLOSED = "closed"


class GiverEvent(Term):
    OFFER = "turn finished"
    WITHDRAW = "offer withdrawn"
    DECLINED = "TurnDeclined"
    GRANT = "PagesGranted"
    PUSHED = "everything written"
    PUSH_VOID = "write not started, or its target is dead"
    PUSH_OVERDUE = "write overdue"
    PUSH_FAILED = "write failed"
    REVOKE = "GrantRevoked"
    LINK_LOST = "link lost"
    PEER_DOWN = "PeerDown"


class TakerPhase(Term):
    """A turn on its prefill rank. QUARANTINED: it was given up, its epoch is not over. CHECKING: its epoch is over, and
    what was written is read back."""

    NEW = "new"
    GRANTED = "granted"
    CHECKING = "checking"
    QUARANTINED = "quarantined"
    CLOSED = "closed"


class TakerEvent(Term):
    OFFER = "TurnOffered"
    REFUSE = "TurnOffered refused"
    COMMIT = "TurnCommitted"
    COMMIT_UNREAD = "TurnCommitted, checksums on"
    BAD_COMMIT = "TurnCommitted, wrong counts"
    EPOCH_ENDED = "EpochEnded"
    NEEDED = "a prompt needs the room"
    OVERDUE = "grant_s over"
    LINK_LOST = "link lost"
    LINK_UP = "link up again"
    PEER_DOWN = "PeerDown"
    SOUND = "checksums agree"
    CORRUPT = "checksums differ"


_G, _E, _A = GiverPhase, GiverEvent, Action

GIVER: Table[GiverPhase, GiverEvent, Action] = Table(
    (_E.DECLINED, _E.GRANT, _E.REVOKE),
    {
        (_G.NEW, _E.OFFER): _to(_G.OFFERED, _A.OFFER),
        (_G.OFFERED, _E.WITHDRAW): _to(_G.CLOSED, _A.FREE),
        (_G.OFFERED, _E.DECLINED): _to(_G.CLOSED, _A.FREE),
        (_G.OFFERED, _E.LINK_LOST): _to(_G.CLOSED, _A.FREE),
        (_G.OFFERED, _E.GRANT): _to(_G.PUSHING, _A.PUSH),
        (_G.PUSHING, _E.PUSHED): _to(_G.CLOSED, _A.COMMIT, _A.FREE),
        (_G.PUSHING, _E.PUSH_VOID): _to(_G.CLOSED, _A.END_EPOCH, _A.FREE),
        (_G.PUSHING, _E.PUSH_OVERDUE): _to(_G.ENDING),
        (_G.PUSHING, _E.PUSH_FAILED): _to(_G.BURNT, _A.FREE),
        (_G.PUSHING, _E.REVOKE): _to(_G.ENDING),
        (_G.PUSHING, _E.LINK_LOST): _to(_G.ORPHANED),
        (_G.ENDING, _E.PUSHED): _to(_G.CLOSED, _A.END_EPOCH, _A.FREE),
        (_G.ENDING, _E.PUSH_VOID): _to(_G.CLOSED, _A.END_EPOCH, _A.FREE),
        (_G.ENDING, _E.PUSH_OVERDUE): _to(_G.ENDING),
        (_G.ENDING, _E.PUSH_FAILED): _to(_G.BURNT, _A.FREE),
        (_G.ENDING, _E.REVOKE): _to(_G.ENDING),
        (_G.ENDING, _E.LINK_LOST): _to(_G.ORPHANED),
        (_G.ORPHANED, _E.PUSHED): _to(_G.CLOSED, _A.FREE),
        (_G.ORPHANED, _E.PUSH_VOID): _to(_G.CLOSED, _A.FREE),
        (_G.ORPHANED, _E.PUSH_OVERDUE): _to(_G.ORPHANED),
        (_G.ORPHANED, _E.PUSH_FAILED): _to(_G.BURNT, _A.FREE),
        (_G.ORPHANED, _E.PEER_DOWN): _to(_G.ORPHANED),
        # The same prefill process came back over a new link and asks for the epoch's end.
        (_G.ORPHANED, _E.REVOKE): _to(_G.ENDING),
        (_G.BURNT, _E.REVOKE): _to(_G.BURNT),
        (_G.BURNT, _E.LINK_LOST): _to(_G.BURNT),
        # The memory that it could have harmed died with its process.
        (_G.BURNT, _E.PEER_DOWN): _to(_G.CLOSED),
    },
)
"""A grant of an offer, or a revoke of an epoch, that is not known any more is answered by EpochEnded, and a
TurnDeclined of one is ignored, outside the table."""

_T, _F = TakerPhase, TakerEvent

TAKER: Table[TakerPhase, TakerEvent, Action] = Table(
    (_F.OFFER, _F.REFUSE, _F.COMMIT, _F.COMMIT_UNREAD, _F.BAD_COMMIT, _F.EPOCH_ENDED),
    {
        (_T.NEW, _F.OFFER): _to(_T.GRANTED, _A.GRANT),
        (_T.NEW, _F.REFUSE): _to(_T.CLOSED, _A.DECLINE),
        (_T.GRANTED, _F.COMMIT): _to(_T.CLOSED, _A.OWN, _A.KEEP),
        (_T.GRANTED, _F.COMMIT_UNREAD): _to(_T.CHECKING, _A.OWN, _A.READ_BACK),
        # A writer that miscounts is not believed when it says that it ended: it is asked again, by a revoke.
        (_T.GRANTED, _F.BAD_COMMIT): _to(_T.QUARANTINED, _A.QUARANTINE, _A.REVOKE),
        (_T.GRANTED, _F.EPOCH_ENDED): _to(_T.CLOSED, _A.FREE),
        (_T.GRANTED, _F.NEEDED): _to(_T.QUARANTINED, _A.QUARANTINE, _A.REVOKE),
        (_T.GRANTED, _F.OVERDUE): _to(_T.QUARANTINED, _A.QUARANTINE, _A.REVOKE),
        (_T.GRANTED, _F.LINK_LOST): _to(_T.QUARANTINED, _A.QUARANTINE),
        (_T.GRANTED, _F.PEER_DOWN): _to(_T.CLOSED, _A.FREE),
        (_T.QUARANTINED, _F.COMMIT): _to(_T.CLOSED, _A.FREE),
        (_T.QUARANTINED, _F.BAD_COMMIT): _to(_T.QUARANTINED),
        (_T.QUARANTINED, _F.EPOCH_ENDED): _to(_T.CLOSED, _A.FREE),
        (_T.QUARANTINED, _F.LINK_LOST): _to(_T.QUARANTINED),
        (_T.QUARANTINED, _F.LINK_UP): _to(_T.QUARANTINED, _A.REVOKE),
        (_T.QUARANTINED, _F.PEER_DOWN): _to(_T.CLOSED, _A.FREE),
        # The commit ended the epoch whatever was written, so nothing here is for quarantine.
        (_T.CHECKING, _F.SOUND): _to(_T.CLOSED, _A.KEEP),
        (_T.CHECKING, _F.CORRUPT): _to(_T.CLOSED, _A.FREE),
    },
)
"""As with the hand-off, an EpochEnded that a commit had overtaken finds nothing and is ignored, outside the table."""


def diagram() -> str:
    """Both tables as Mermaid state diagrams, in Markdown, for docs/protocol.md."""
    return "\n".join([*GIVER.draw("Giver: the decode rank"), *TAKER.draw("Taker: the prefill rank")])
