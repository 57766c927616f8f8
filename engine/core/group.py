"""Memberships and stages as values, and as the messages that carry them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from engine.core.moves import Copy, Stage
from engine.core.pact import PARTS
from engine.core.placement import Placement
from engine.errors import RemoteProtocolError
from transport.messages import Member, NameGroup, PartTable, PrepareEpoch


@dataclasses.dataclass(frozen=True, slots=True)
class PartPlacement:
    """The experts of one part in one membership. `epoch`: in force when the membership begins."""

    epoch: int
    placement: Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Who steps together, and which experts are where when they begin.

    Attributes:
        number: counts up within the head's life.
        members: all places of the group in order; a lost one has generation 0.
        descriptions: each member's fabric description, empty for a lost one.
        parts: in the order of `pact.PARTS`; a model without a drafter has only the first.
    """

    number: int
    members: tuple[Member, ...]
    descriptions: tuple[bytes, ...]
    parts: tuple[PartPlacement, ...]

    def place_of(self, rank: int) -> int:
        """The rank's index among the members. Raises ValueError if it is none."""
        for place, member in enumerate(self.members):
            if member.rank == rank and member.generation:
                return place
        raise ValueError(f"rank {rank} is not in membership {self.number}")

    @property
    def living(self) -> tuple[int, ...]:
        """Places that are not lost."""
        return tuple(place for place, member in enumerate(self.members) if member.generation)


def encode_membership(membership: Membership) -> tuple[NameGroup, bytes]:
    """As a message with its blob."""
    message = NameGroup(
        membership=membership.number,
        members=tuple(
            Member(member.rank, member.generation, member.mesh_address, len(description))
            for member, description in zip(membership.members, membership.descriptions, strict=True)
        ),
        parts=tuple(
            PartTable(name, part.epoch, part.placement.layers, part.placement.experts, part.placement.slots)
            for name, part in zip(PARTS, membership.parts, strict=False)
        ),
    )
    tables = [part.placement.table.astype("<i4").tobytes() for part in membership.parts]
    return message, b"".join([*tables, *membership.descriptions])


def decode_membership(message: NameGroup, blob: memoryview) -> Membership:
    """The reverse. The frame's reader has compared the blob's length with the fields.

    Raises:
        RemoteProtocolError: a table is not a placement, or parts are in another order.
    """
    names = tuple(part.part for part in message.parts)
    if names != PARTS[: len(names)]:
        raise RemoteProtocolError(f"membership {message.membership} has parts {names}, not a beginning of {PARTS}")
    at, places = 0, len(message.members)
    parts = []
    for part in message.parts:
        table, at = _take_table(blob, at, places, part.slots)
        parts.append(PartPlacement(part.epoch, _placement(part.layers, part.experts, table, part.part)))
    descriptions = []
    for member in message.members:
        descriptions.append(bytes(blob[at : at + member.description_bytes]))
        at += member.description_bytes
    return Membership(message.membership, message.members, tuple(descriptions), tuple(parts))


@dataclasses.dataclass(frozen=True, slots=True)
class EpochStage:
    """What PrepareEpoch says: an epoch's copies, the table once it is active, and what that releases."""

    part: int
    epoch: int
    after: Placement
    copies: tuple[Copy, ...]
    released: tuple[tuple[int, int], ...]
    step_bytes: int


def encode_stage(part: int, epoch: int, stage: Stage, step_bytes: int) -> tuple[PrepareEpoch, bytes]:
    """As a message with its blob. Whether a copy is far is not said: sources do not need it."""
    after = stage.after
    message = PrepareEpoch(
        part=PARTS[part],
        epoch=epoch,
        layers=after.layers,
        experts=after.experts,
        places=after.ranks,
        slots=after.slots,
        copies=len(stage.copies),
        released=len(stage.released),
        step_bytes=step_bytes,
    )
    copies = [(copy.layer, copy.expert, *copy.source, *copy.target) for copy in stage.copies]
    columns = (after.table, np.array(copies, "<i4"), np.array(stage.released, "<i4"))
    return message, b"".join(column.astype("<i4").tobytes() for column in columns)


def decode_stage(message: PrepareEpoch, blob: memoryview) -> EpochStage:
    """The reverse.

    Raises:
        RemoteProtocolError: not a placement, or a copy that does not fit it.
    """
    table, at = _take_table(blob, 0, message.places, message.slots)
    after = _placement(message.layers, message.experts, table, message.part)
    copies, at = _take_table(blob, at, message.copies, 6)
    released, at = _take_table(blob, at, message.released, 2)
    stage = EpochStage(
        part=PARTS.index(message.part),
        epoch=message.epoch,
        after=after,
        copies=tuple(Copy(row[0], row[1], (row[2], row[3]), (row[4], row[5]), False) for row in copies.tolist()),
        released=tuple((row[0], row[1]) for row in released.tolist()),
        step_bytes=message.step_bytes,
    )
    for copy in stage.copies:
        for place, slot in (copy.source, copy.target):
            if not (0 <= place < after.ranks and 0 <= slot < after.slots):
                raise RemoteProtocolError(f"epoch {message.epoch} copies slot {slot} of place {place}, there is none")
        if after.table[copy.target] != copy.layer * after.experts + copy.expert:
            raise RemoteProtocolError(f"epoch {message.epoch} copies what its table does not name")
    return stage


def pack_slots(slots: Sequence[int]) -> bytes:
    """The blob of SlotsCopied."""
    return np.array(slots, "<i4").tobytes()


def unpack_slots(blob: memoryview) -> list[int]:
    """The reverse of `pack_slots`."""
    slots: list[int] = np.frombuffer(blob, "<i4").tolist()
    return slots


def _take_table(blob: memoryview, at: int, rows: int, columns: int) -> tuple[np.ndarray, int]:
    end = at + 4 * rows * columns
    return np.frombuffer(blob[at:end], "<i4").reshape(rows, columns).astype(np.int32), end


def _placement(layers: int, experts: int, table: np.ndarray, part: str) -> Placement:
    try:
        return Placement(layers, experts, table)
    except ValueError as error:
        raise RemoteProtocolError(f"the table of part {part} is no placement: {error}") from None
