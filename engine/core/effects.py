"""Effects: what a rank's state machine asks of the world. Values only; the step actor carries them out in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from engine.core.group import Membership
from engine.core.placement import Placement
from engine.core.request import RequestKey
from transport.messages import Message


class ToHead(NamedTuple):
    """Send to the head."""

    message: Message
    blob: bytes = b""


class ToPeer(NamedTuple):
    """Send over the pair stream `link`; a link that is gone meanwhile swallows it."""

    link: int
    message: Message
    blob: bytes = b""


PushFailure = Literal["void", "overdue", "failed"]
"""How a push went wrong: it was not started; it is late, and its end will be told; it failed, and may land yet."""


@dataclasses.dataclass(slots=True)  # as core.plan.StepPlan
class StartPush:
    """Write local blocks into a peer's blocks, then report with (key, first, count).

    `pages` and `remote_pages` pair up; `slabs` is (local, remote) for the last push of a prompt, and for a turn's.
    """

    key: RequestKey
    link: int
    first: int
    count: int
    pages: Sequence[int]
    remote_pages: Sequence[int]
    slabs: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectPush:
    """This push will be asked for soon, as a rule: what it takes beforehand can be done now."""

    push: StartPush


Stretch = tuple[Sequence[int], int]
"""What one push wrote: pages in order, then a slab, or -1 for none."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadBack:
    """Compute the checksum of each stretch of memory, then report them all with `key`."""

    key: RequestKey
    stretches: tuple[Stretch, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TellCorrupt:
    """For the log: pages [first, first + count) of a request, pushed by that life of `rank`, are not what it sent."""

    key: RequestKey
    rank: int
    generation: int
    first: int
    count: int
    told: int
    found: int


@dataclasses.dataclass(frozen=True, slots=True)
class DropLink:
    """Close the pair stream `link`: it can not be trusted any more. `why` is for the log."""

    link: int
    why: str


Effect = ToHead | ToPeer | StartPush | ExpectPush | ReadBack | TellCorrupt | DropLink


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """Have the device load what the membership's placements name here; then report with its number."""

    membership: Membership


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Have the device step with the members of the prepared membership."""

    membership: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadTable:
    """Give the device the placement of an epoch that is not active."""

    part: int
    epoch: int
    placement: Placement


@dataclasses.dataclass(frozen=True, slots=True)
class SetReady:
    """The device's ready word of a part."""

    part: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Withdraw:
    """The device's ready word back to the epoch before."""

    part: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class NoteCopied:
    """Slot to expert key: a member's writes into these slots are complete."""

    part: int
    slots: Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class FreeSlots:
    """These slots are empty."""

    part: int
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StartCopy:
    """Write slot `slot` into slot `remote_slot` of the member that is life `generation` of `rank`, then report."""

    part: int
    epoch: int
    slot: int
    place: int
    rank: int
    generation: int
    remote_slot: int


DeviceEffect = Join | LoadTable | SetReady | Withdraw | NoteCopied | FreeSlots
"""What is a call of the device's expert slots."""
ExpertEffect = ToHead | Prepare | StartCopy | DeviceEffect
"""What a rank's part in a group asks for."""
