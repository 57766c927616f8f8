"""The live switch of one epoch of a placement, as two transition tables: the head's and each rank's.

Theory of operation. An epoch is a number given to one stage of moves (`moves.Stage`), once and never again. Its way is
copy -> ready -> flip -> reclaim. *Copy*: ranks write weights into slots that are empty in the placement in force.
*Ready*: a receiver whose copies are complete and visible sets its ready word, nobody does it for him. *Flip*: the pact
makes an epoch active once the least ready word of all ranks has reached it, at the same step everywhere; there is no
command for it, and ranks learn it from awaited steps. *Reclaim*: two awaited steps later no queued step uses the old
table, and the slots that only it named are empty.

An epoch can be given up until it is active. The danger is a rank that still becomes ready for it, or stays ready: when
the others later are ready for the *next* epoch, the least ready word reaches the abandoned one and activates it. So a
rank that is asked to withdraw either promises never to become ready (DECLINED), or, if it is ready, withdraws its word
in the pact and says so when it has awaited the step that carried the withdrawal and the epoch was not active in it
(WITHDRAWN). Only when every living rank has said one of the two is the epoch *burned*, and told so to all; its slots
are empty again when the last copy into them has ended and two more steps were awaited. Until it is burned its slots
and, on ranks that were ready, its table stay whole: if one rank says that the epoch did become active, all the others
must have been ready, and the head has them adopt it. (That takes a rank that died while it was decided; otherwise all
see the same.)

A rank that died is ready for nothing: words carry the generation of their rank. Its death ends the migration, since
the target counts on it; what was active stays. The head names the new membership only when the fate of the epoch is
known (`Migration.blocks_membership`): without the dead rank's word the least ready word might reach it. A rollback is
a migration to the placement before, under new epochs.

A pair (state, event) that is not in a table can not happen by the protocol: RemoteProtocolError where the peer caused
the event, else LocalProtocolError.
"""

from __future__ import annotations

import enum

from engine.core.tables import Table, Term
from engine.core.tables import go as _to


class Action(enum.Enum):
    """What a transition asks its side to do, in the order in which the table lists them."""

    # the group, that is, the head: to every living rank
    PREPARE = "PrepareEpoch: stage, table, copies"
    HOLD = "HoldCopies: start no more"
    RELEASE = "ReleaseCopies"
    WITHDRAW = "WithdrawEpoch"
    ADOPT = "AdoptEpoch, with the membership"
    BURN = "BurnEpoch"
    # a rank
    LOAD_TABLE = "load the table into the buffer that is not active"
    SET_READY = "set the ready word"
    SET_WITHDRAW = "set the withdraw word (and forget a flip that no awaited step has shown)"
    SET_ACTIVE = "make the table active"
    TELL_READY = "EpochReady to the head"
    TELL_FLIPPED = "EpochFlipped to the head"
    TELL_WITHDRAWN = "EpochWithdrawn to the head"
    TELL_RECLAIMED = "EpochReclaimed to the head"
    FREE_OLD = "slots that the stage releases are empty"
    FREE_NEW = "slots that the stage would have filled are empty"


class StagePhase(Term):
    """One epoch, as the head sees it.

    HELD is COPY with no new copies. READY: all ranks are, so it will flip unless one dies. FLIP: one saw it active.
    WITHDRAWING waits for every living rank's word, DRAINING for its empty slots. BURNED and DONE are ends.
    """

    NEW = "new"
    COPY = "copy"
    HELD = "held"
    READY = "ready"
    FLIP = "flip"
    RECLAIM = "reclaim"
    WITHDRAWING = "withdrawing"
    DRAINING = "draining"
    BURNED = "burned"
    DONE = "done"


class StageEvent(Term):
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"
    ALL_READY = "EpochReady of all"
    FLIPPED = "EpochFlipped"
    ALL_FLIPPED = "EpochFlipped of all"
    ALL_WITHDRAWN = "EpochWithdrawn of all"
    ALL_RECLAIMED = "EpochReclaimed of all"
    RANK_DOWN = "a rank died"


class RankPhase(Term):
    """One epoch on one rank.

    CUT is READY after a peer was lost: no step completes, and it is the head that knows what became of the epoch.
    DECLINED never was ready, WITHDRAWN was. DRAINING: burned, but copies into its slots may still run, or queued steps.
    """

    NEW = "new"
    RECEIVING = "receiving"
    READY = "ready"
    CUT = "cut"
    ACTIVE = "active"
    WITHDRAWING = "withdrawing"
    DECLINED = "declined"
    WITHDRAWN = "withdrawn"
    DRAINING = "draining"
    BURNED = "burned"
    SETTLED = "settled"


class RankEvent(Term):
    PREPARE = "PrepareEpoch"
    COMPLETE = "all copies here complete and visible"
    FLIPPED = "awaited a step in which the epoch is active"
    WITHDRAW = "WithdrawEpoch"
    UNSEEN = "awaited the step with the withdrawal, epoch not active"
    PEER_LOST = "RankLost, epoch not active"
    ADOPT = "AdoptEpoch"
    BURN = "BurnEpoch"
    QUIET = "two awaited steps, no copy runs"


_S, _E, _A = StagePhase, StageEvent, Action

STAGE: Table[StagePhase, StageEvent, Action] = Table(
    (_E.FLIPPED,),
    {
        (_S.NEW, _E.START): _to(_S.COPY, _A.PREPARE),
        (_S.NEW, _E.ABORT): _to(_S.BURNED),
        (_S.NEW, _E.RANK_DOWN): _to(_S.BURNED),
        (_S.COPY, _E.PAUSE): _to(_S.HELD, _A.HOLD),
        (_S.COPY, _E.ALL_READY): _to(_S.READY),
        # A rank's word that it flipped may overtake another's word that it is ready.
        (_S.COPY, _E.FLIPPED): _to(_S.FLIP),
        (_S.COPY, _E.ABORT): _to(_S.WITHDRAWING, _A.WITHDRAW),
        (_S.COPY, _E.RANK_DOWN): _to(_S.WITHDRAWING, _A.WITHDRAW),
        (_S.HELD, _E.RESUME): _to(_S.COPY, _A.RELEASE),
        (_S.HELD, _E.ALL_READY): _to(_S.READY),
        (_S.HELD, _E.FLIPPED): _to(_S.FLIP),
        (_S.HELD, _E.ABORT): _to(_S.WITHDRAWING, _A.WITHDRAW),
        (_S.HELD, _E.RANK_DOWN): _to(_S.WITHDRAWING, _A.WITHDRAW),
        (_S.READY, _E.FLIPPED): _to(_S.FLIP),
        (_S.READY, _E.ABORT): _to(_S.WITHDRAWING, _A.WITHDRAW),
        (_S.READY, _E.RANK_DOWN): _to(_S.WITHDRAWING, _A.WITHDRAW),
        (_S.FLIP, _E.FLIPPED): _to(_S.FLIP),
        (_S.FLIP, _E.ALL_FLIPPED): _to(_S.RECLAIM),
        # The others were ready, else it would be active nowhere; those whom the lost exchange kept from it adopt it.
        (_S.FLIP, _E.RANK_DOWN): _to(_S.FLIP, _A.ADOPT),
        (_S.RECLAIM, _E.ALL_RECLAIMED): _to(_S.DONE),
        (_S.RECLAIM, _E.RANK_DOWN): _to(_S.RECLAIM),
        # The flip was faster than the withdrawal, on this rank; so it was on all that live, or they adopt it.
        (_S.WITHDRAWING, _E.FLIPPED): _to(_S.FLIP, _A.ADOPT),
        (_S.WITHDRAWING, _E.ALL_WITHDRAWN): _to(_S.DRAINING, _A.BURN),
        (_S.WITHDRAWING, _E.RANK_DOWN): _to(_S.WITHDRAWING),
        (_S.DRAINING, _E.ALL_RECLAIMED): _to(_S.BURNED),
        (_S.DRAINING, _E.RANK_DOWN): _to(_S.DRAINING),
    },
)
"""ABORT in later phases, PAUSE and RESUME outside COPY and HELD concern the next stage only: `Migration` keeps them."""

_R, _F = RankPhase, RankEvent

RANK: Table[RankPhase, RankEvent, Action] = Table(
    (_F.PREPARE, _F.WITHDRAW, _F.ADOPT, _F.BURN),
    {
        (_R.NEW, _F.PREPARE): _to(_R.RECEIVING, _A.LOAD_TABLE),
        (_R.RECEIVING, _F.COMPLETE): _to(_R.READY, _A.SET_READY, _A.TELL_READY),
        (_R.RECEIVING, _F.WITHDRAW): _to(_R.DECLINED, _A.TELL_WITHDRAWN),
        # Without waiting for the head: to become ready while no step completes is a word that nobody could take back.
        (_R.RECEIVING, _F.PEER_LOST): _to(_R.DECLINED),
        (_R.READY, _F.FLIPPED): _to(_R.ACTIVE, _A.TELL_FLIPPED),
        (_R.READY, _F.WITHDRAW): _to(_R.WITHDRAWING, _A.SET_WITHDRAW),
        (_R.READY, _F.PEER_LOST): _to(_R.CUT),
        (_R.READY, _F.ADOPT): _to(_R.ACTIVE, _A.SET_ACTIVE, _A.TELL_FLIPPED),
        (_R.WITHDRAWING, _F.FLIPPED): _to(_R.ACTIVE, _A.TELL_FLIPPED),
        (_R.WITHDRAWING, _F.UNSEEN): _to(_R.WITHDRAWN, _A.TELL_WITHDRAWN),
        (_R.WITHDRAWING, _F.PEER_LOST): _to(_R.WITHDRAWN, _A.TELL_WITHDRAWN),
        (_R.WITHDRAWING, _F.ADOPT): _to(_R.ACTIVE, _A.SET_ACTIVE, _A.TELL_FLIPPED),
        (_R.CUT, _F.WITHDRAW): _to(_R.WITHDRAWN, _A.SET_WITHDRAW, _A.TELL_WITHDRAWN),
        (_R.CUT, _F.ADOPT): _to(_R.ACTIVE, _A.SET_ACTIVE, _A.TELL_FLIPPED),
        (_R.CUT, _F.PEER_LOST): _to(_R.CUT),
        # Copies that were under way land all the same. They make nobody ready any more.
        (_R.DECLINED, _F.COMPLETE): _to(_R.DECLINED),
        (_R.DECLINED, _F.PEER_LOST): _to(_R.DECLINED),
        (_R.DECLINED, _F.WITHDRAW): _to(_R.DECLINED, _A.TELL_WITHDRAWN),
        (_R.DECLINED, _F.BURN): _to(_R.DRAINING),
        (_R.WITHDRAWN, _F.PEER_LOST): _to(_R.WITHDRAWN),
        (_R.WITHDRAWN, _F.ADOPT): _to(_R.ACTIVE, _A.SET_ACTIVE, _A.TELL_FLIPPED),
        (_R.WITHDRAWN, _F.BURN): _to(_R.DRAINING),
        (_R.DRAINING, _F.COMPLETE): _to(_R.DRAINING),
        (_R.DRAINING, _F.PEER_LOST): _to(_R.DRAINING),
        (_R.DRAINING, _F.QUIET): _to(_R.BURNED, _A.FREE_NEW, _A.TELL_RECLAIMED),
        (_R.ACTIVE, _F.FLIPPED): _to(_R.ACTIVE),
        (_R.ACTIVE, _F.WITHDRAW): _to(_R.ACTIVE),
        (_R.ACTIVE, _F.ADOPT): _to(_R.ACTIVE),
        (_R.ACTIVE, _F.PEER_LOST): _to(_R.ACTIVE),
        (_R.ACTIVE, _F.QUIET): _to(_R.SETTLED, _A.FREE_OLD, _A.TELL_RECLAIMED),
        (_R.SETTLED, _F.WITHDRAW): _to(_R.SETTLED),
        (_R.SETTLED, _F.ADOPT): _to(_R.SETTLED),
        (_R.SETTLED, _F.PEER_LOST): _to(_R.SETTLED),
    },
)
"""ADOPT never meets DECLINED: an epoch that is active somewhere had every rank ready. A rank between a lost peer and
the new membership gives each epoch that it hears of PEER_LOST right after PREPARE."""


def diagram() -> str:
    """Both tables as Mermaid state diagrams, in Markdown, for docs/protocol.md."""
    return "\n".join([*STAGE.draw("Epoch, as the head sees it"), *RANK.draw("Epoch on a rank")])
