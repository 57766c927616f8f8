"""The hand-off of a prompt's KV from its prefill rank to its decode rank, as two transition tables.

Theory of operation. The decode rank grants pages and a state slab to one writer, under an *epoch*: a number that it
never uses again. The prefill rank writes them with one-sided pushes that the decode rank can neither see nor stop. So
memory that was granted may be used for something else on exactly two events: the writer said that the epoch ended
(EpochEnded, or PrefillCommitted, which ends it with success), or the writer's process is confirmed dead (PeerDown). A
deadline, an abort or a broken link end the *request*; its granted memory stays in quarantine until one of the two.

The prefill side owes the mirror image: it says that an epoch ended only once no transfer of it runs and none will
start, and reuses its own pages only when no transfer and no submitted step still reads them (`QUIET`). Its waiting has
three states (STARTED, GRANTED, QUEUED), its working has two counters (computed, pushed), since chunks are pushed while
later ones are computed.

A write that *failed* is worse than one that is slow: it may still land later, and nobody will say when. Its epoch can
not be ended by the writer's word any more (BURNT); the decode rank gets that memory back when the writer dies.

A pair (state, event) that is not in a table can not happen by the protocol: where the peer caused the event it is a
RemoteProtocolError, else a LocalProtocolError. `diagram` draws docs/protocol.md from these tables.
"""

from __future__ import annotations

import enum

from engine.core.tables import Table, Term
from engine.core.tables import go as _to


class Action(enum.Enum):
    """What a transition asks its side to do, in the order in which the table lists them."""

    # both sides
    FAIL = "RequestFailed to the head"
    ACK = "RequestAborted to the head"
    FREE = "free the memory"
    # prefill side
    ENQUEUE = "wait for own pages"
    PUSH = "push finished pages"
    TELL = "PagesPushed to the decode rank"
    COMMIT = "PrefillCommitted to the decode rank"
    END_EPOCH = "EpochEnded to the decode rank"
    # decode side
    GRANT = "PagesGranted to the prefill rank"
    COUNT = "count pages"
    OWN = "own the memory"
    RUN = "emit the first token"
    READ_BACK = "checksum what was written"
    QUARANTINE = "quarantine granted memory, free the rest"
    REVOKE = "GrantRevoked to the prefill rank"
    FINISH = "RequestFinished to the head"


class PrefillPhase(Term):
    """A prompt's state on its prefill rank.

    STARTED has its ids and no grant, GRANTED the reverse, QUEUED both. ENDING was given up but steps or transfers still
    name its memory; ORPHANED is the same with no link left over which the epoch's end could be told; TAINTED is the
    same with an end that may not be told. BURNT holds no memory here, only the duty to keep silent about its epoch.
    """

    NEW = "new"
    STARTED = "started"
    GRANTED = "granted"
    QUEUED = "queued"
    WORKING = "working"
    ENDING = "ending"
    ORPHANED = "orphaned"
    TAINTED = "tainted"
    BURNT = "burnt"
    CLOSED = "closed"


class PrefillEvent(Term):
    START = "StartPrefill"
    REFUSE = "StartPrefill refused"
    GRANT = "PagesGranted"
    BAD_GRANT = "PagesGranted, wrong count"
    ADMIT = "own pages found"
    CHUNK = "chunk computed"
    PUSHED = "pages written"
    COMPLETE = "everything written"
    PUSH_VOID = "write not started, or its target is dead"
    PUSH_OVERDUE = "write overdue"
    PUSH_FAILED = "write failed"
    ABORT = "Abort"
    REVOKE = "GrantRevoked"
    LINK_LOST = "link lost"
    PEER_DOWN = "PeerDown"
    QUIET = "nothing in flight"


class DecodePhase(Term):
    """A request's state on its decode rank.

    QUARANTINED: the request is over, its epoch is not. CHECKING: its epoch is over, and what was written is read back.
    """

    NEW = "new"
    WAITING = "waiting"
    GRANTED = "granted"
    CHECKING = "checking"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    CLOSED = "closed"


class DecodeEvent(Term):
    RESERVE = "ReservePages"
    REFUSE = "ReservePages refused"
    ROOM = "room found"
    PUSHED = "PagesPushed"
    COMMIT = "PrefillCommitted"
    COMMIT_UNREAD = "PrefillCommitted, checksums on"
    BAD_COMMIT = "PrefillCommitted, wrong counts"
    EPOCH_ENDED = "EpochEnded"
    ABORT = "Abort"
    OVERDUE = "grant_s over"
    READ_LATE = "transfer_s over"
    LINK_LOST = "link lost"
    LINK_UP = "link up again"
    PEER_DOWN = "PeerDown"
    SOUND = "checksums agree"
    CORRUPT = "checksums differ"
    FINISH = "last token"


_P, _E, _A = PrefillPhase, PrefillEvent, Action

PREFILL: Table[PrefillPhase, PrefillEvent, Action] = Table(
    (_E.START, _E.GRANT, _E.REVOKE),
    {
        (_P.NEW, _E.START): _to(_P.STARTED),
        (_P.NEW, _E.REFUSE): _to(_P.CLOSED, _A.FAIL),
        (_P.NEW, _E.GRANT): _to(_P.GRANTED),
        (_P.STARTED, _E.GRANT): _to(_P.QUEUED, _A.ENQUEUE),
        (_P.STARTED, _E.ABORT): _to(_P.CLOSED, _A.ACK),
        (_P.STARTED, _E.LINK_LOST): _to(_P.CLOSED, _A.FAIL),
        (_P.GRANTED, _E.START): _to(_P.QUEUED, _A.ENQUEUE),
        (_P.GRANTED, _E.REFUSE): _to(_P.CLOSED, _A.FAIL, _A.END_EPOCH),
        (_P.GRANTED, _E.ABORT): _to(_P.CLOSED, _A.ACK, _A.END_EPOCH),
        (_P.GRANTED, _E.REVOKE): _to(_P.CLOSED, _A.END_EPOCH),
        (_P.GRANTED, _E.LINK_LOST): _to(_P.CLOSED),
        (_P.QUEUED, _E.BAD_GRANT): _to(_P.CLOSED, _A.FAIL, _A.END_EPOCH),
        (_P.QUEUED, _E.ADMIT): _to(_P.WORKING),
        (_P.QUEUED, _E.ABORT): _to(_P.CLOSED, _A.ACK, _A.END_EPOCH),
        (_P.QUEUED, _E.REVOKE): _to(_P.CLOSED, _A.END_EPOCH),
        (_P.QUEUED, _E.LINK_LOST): _to(_P.CLOSED, _A.FAIL),
        (_P.WORKING, _E.CHUNK): _to(_P.WORKING, _A.PUSH),
        (_P.WORKING, _E.PUSHED): _to(_P.WORKING, _A.TELL),
        (_P.WORKING, _E.COMPLETE): _to(_P.CLOSED, _A.COMMIT, _A.FREE),
        (_P.WORKING, _E.PUSH_VOID): _to(_P.ENDING, _A.FAIL),
        (_P.WORKING, _E.PUSH_OVERDUE): _to(_P.ENDING, _A.FAIL),
        (_P.WORKING, _E.PUSH_FAILED): _to(_P.TAINTED, _A.FAIL),
        (_P.WORKING, _E.ABORT): _to(_P.ENDING, _A.ACK),
        (_P.WORKING, _E.REVOKE): _to(_P.ENDING),
        (_P.WORKING, _E.LINK_LOST): _to(_P.ORPHANED, _A.FAIL),
        (_P.ENDING, _E.CHUNK): _to(_P.ENDING),
        (_P.ENDING, _E.PUSHED): _to(_P.ENDING),
        (_P.ENDING, _E.PUSH_VOID): _to(_P.ENDING),
        (_P.ENDING, _E.PUSH_OVERDUE): _to(_P.ENDING),
        (_P.ENDING, _E.PUSH_FAILED): _to(_P.TAINTED),
        (_P.ENDING, _E.ABORT): _to(_P.ENDING, _A.ACK),
        (_P.ENDING, _E.REVOKE): _to(_P.ENDING),
        (_P.ENDING, _E.LINK_LOST): _to(_P.ORPHANED),
        (_P.ENDING, _E.QUIET): _to(_P.CLOSED, _A.END_EPOCH, _A.FREE),
        (_P.ORPHANED, _E.CHUNK): _to(_P.ORPHANED),
        (_P.ORPHANED, _E.PUSHED): _to(_P.ORPHANED),
        (_P.ORPHANED, _E.PUSH_VOID): _to(_P.ORPHANED),
        (_P.ORPHANED, _E.PUSH_OVERDUE): _to(_P.ORPHANED),
        (_P.ORPHANED, _E.PUSH_FAILED): _to(_P.TAINTED),
        (_P.ORPHANED, _E.PEER_DOWN): _to(_P.ORPHANED),
        (_P.ORPHANED, _E.ABORT): _to(_P.ORPHANED, _A.ACK),
        # The same decode process came back over a new link and asks for the epoch's end: now there is somebody to tell.
        (_P.ORPHANED, _E.REVOKE): _to(_P.ENDING),
        (_P.ORPHANED, _E.QUIET): _to(_P.CLOSED, _A.FREE),
        (_P.TAINTED, _E.CHUNK): _to(_P.TAINTED),
        (_P.TAINTED, _E.PUSHED): _to(_P.TAINTED),
        (_P.TAINTED, _E.PUSH_VOID): _to(_P.TAINTED),
        (_P.TAINTED, _E.PUSH_OVERDUE): _to(_P.TAINTED),
        (_P.TAINTED, _E.PUSH_FAILED): _to(_P.TAINTED),
        (_P.TAINTED, _E.ABORT): _to(_P.TAINTED, _A.ACK),
        (_P.TAINTED, _E.REVOKE): _to(_P.TAINTED),
        (_P.TAINTED, _E.LINK_LOST): _to(_P.TAINTED),
        # The memory that it could have harmed died with its process.
        (_P.TAINTED, _E.PEER_DOWN): _to(_P.ORPHANED),
        (_P.TAINTED, _E.QUIET): _to(_P.BURNT, _A.FREE),
        (_P.BURNT, _E.ABORT): _to(_P.BURNT, _A.ACK),
        (_P.BURNT, _E.REVOKE): _to(_P.BURNT),
        (_P.BURNT, _E.LINK_LOST): _to(_P.BURNT),
        (_P.BURNT, _E.PEER_DOWN): _to(_P.CLOSED),
    },
)
"""An epoch that P does not know any more has ended, so a REVOKE of it is answered by EpochEnded outside the table."""

_D, _F = DecodePhase, DecodeEvent

DECODE: Table[DecodePhase, DecodeEvent, Action] = Table(
    (_F.RESERVE, _F.PUSHED, _F.COMMIT, _F.COMMIT_UNREAD, _F.BAD_COMMIT, _F.EPOCH_ENDED),
    {
        (_D.NEW, _F.RESERVE): _to(_D.WAITING),
        (_D.NEW, _F.REFUSE): _to(_D.CLOSED, _A.FAIL),
        (_D.WAITING, _F.ROOM): _to(_D.GRANTED, _A.GRANT),
        (_D.WAITING, _F.ABORT): _to(_D.CLOSED, _A.ACK),
        (_D.WAITING, _F.OVERDUE): _to(_D.CLOSED, _A.FAIL),
        (_D.WAITING, _F.LINK_LOST): _to(_D.CLOSED, _A.FAIL),
        (_D.WAITING, _F.PEER_DOWN): _to(_D.CLOSED, _A.FAIL),
        (_D.GRANTED, _F.PUSHED): _to(_D.GRANTED, _A.COUNT),
        (_D.GRANTED, _F.COMMIT): _to(_D.RUNNING, _A.OWN, _A.RUN),
        (_D.GRANTED, _F.COMMIT_UNREAD): _to(_D.CHECKING, _A.OWN, _A.READ_BACK),
        # A writer that miscounts is not believed when it says that it ended: it is asked again, by a revoke.
        (_D.GRANTED, _F.BAD_COMMIT): _to(_D.QUARANTINED, _A.FAIL, _A.QUARANTINE, _A.REVOKE),
        (_D.GRANTED, _F.EPOCH_ENDED): _to(_D.CLOSED, _A.FAIL, _A.FREE),
        (_D.GRANTED, _F.ABORT): _to(_D.QUARANTINED, _A.ACK, _A.QUARANTINE, _A.REVOKE),
        (_D.GRANTED, _F.OVERDUE): _to(_D.QUARANTINED, _A.FAIL, _A.QUARANTINE, _A.REVOKE),
        (_D.GRANTED, _F.LINK_LOST): _to(_D.QUARANTINED, _A.FAIL, _A.QUARANTINE),
        (_D.GRANTED, _F.PEER_DOWN): _to(_D.CLOSED, _A.FAIL, _A.FREE),
        (_D.QUARANTINED, _F.PUSHED): _to(_D.QUARANTINED),
        (_D.QUARANTINED, _F.COMMIT): _to(_D.CLOSED, _A.FREE),
        (_D.QUARANTINED, _F.BAD_COMMIT): _to(_D.QUARANTINED),
        (_D.QUARANTINED, _F.EPOCH_ENDED): _to(_D.CLOSED, _A.FREE),
        (_D.QUARANTINED, _F.ABORT): _to(_D.QUARANTINED, _A.ACK),
        (_D.QUARANTINED, _F.LINK_LOST): _to(_D.QUARANTINED),
        (_D.QUARANTINED, _F.LINK_UP): _to(_D.QUARANTINED, _A.REVOKE),
        (_D.QUARANTINED, _F.PEER_DOWN): _to(_D.CLOSED, _A.FREE),
        # The commit ended the epoch whatever was written, so nothing here is for quarantine.
        (_D.CHECKING, _F.SOUND): _to(_D.RUNNING, _A.RUN),
        (_D.CHECKING, _F.CORRUPT): _to(_D.CLOSED, _A.FAIL, _A.FREE),
        (_D.CHECKING, _F.ABORT): _to(_D.CLOSED, _A.ACK, _A.FREE),
        (_D.CHECKING, _F.READ_LATE): _to(_D.CLOSED, _A.FAIL, _A.FREE),
        (_D.RUNNING, _F.ABORT): _to(_D.CLOSED, _A.ACK, _A.FREE),
        (_D.RUNNING, _F.FINISH): _to(_D.CLOSED, _A.FINISH, _A.FREE),
    },
)
"""An epoch leaves the epoch map of a decode rank when its writer may write no more; an EpochEnded that answers a revoke
which a commit had overtaken finds nothing there and is ignored, outside the table."""


def diagram() -> str:
    """Both tables as Mermaid state diagrams, in Markdown, for docs/protocol.md."""
    return "\n".join([*PREFILL.draw("Prefill side"), *DECODE.draw("Decode side")])
