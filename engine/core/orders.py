"""What the head and a group's ranks say of epochs, as messages: orders of a Migration out, words of ranks in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from engine.core.epochs import Action
from engine.core.group import encode_stage
from engine.core.migrate import Order
from engine.core.moves import Stage
from engine.core.pact import PARTS
from transport.messages import (
    AdoptEpoch,
    AskWake,
    BurnEpoch,
    CopyFailed,
    EpochFlipped,
    EpochReady,
    EpochReclaimed,
    EpochWithdrawn,
    ExpertLoads,
    GroupJoined,
    GroupPrepared,
    HoldCopies,
    Message,
    PeerAccused,
    ReleaseCopies,
    SlotsCopied,
    WithdrawEpoch,
)

Word = Literal["ready", "flipped", "withdrawn", "reclaimed"]

WORDS: dict[type[Message], Word] = {
    EpochReady: "ready",
    EpochFlipped: "flipped",
    EpochWithdrawn: "withdrawn",
    EpochReclaimed: "reclaimed",
}
GROUP_WORDS: frozenset[type[Message]] = frozenset(
    {GroupPrepared, GroupJoined, AskWake, PeerAccused, ExpertLoads, SlotsCopied, CopyFailed, *WORDS}
)
"""What a rank says to the keeper of its group; the router has nothing to do with it."""


def encode_orders(
    part: int, orders: Iterable[Order], stage: Stage | None, step_bytes: int
) -> list[tuple[int, Message, bytes]]:
    """Orders of one turn as (place, message, blob). `stage`: the one at hand, for PREPARE."""
    name, said = PARTS[part], []
    prepare: tuple[Message, bytes] | None = None
    for action, place, epoch in orders:
        message: Message
        blob = b""
        match action:
            case Action.PREPARE:
                assert stage is not None
                prepare = prepare or encode_stage(part, epoch, stage, step_bytes)
                message, blob = prepare
            case Action.HOLD:
                message = HoldCopies(name, epoch)
            case Action.RELEASE:
                message = ReleaseCopies(name, epoch)
            case Action.WITHDRAW:
                message = WithdrawEpoch(name, epoch)
            case Action.ADOPT:
                message = AdoptEpoch(name, epoch)
            case Action.BURN:
                message = BurnEpoch(name, epoch)
            case _:
                raise AssertionError(f"{action} is not an order of the head")
        said.append((place, message, blob))
    return said
