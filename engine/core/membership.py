"""Roster: who belongs to a group, and which membership its ranks are told to step in. One group, as the head keeps it.

    forming --all ranks ready--> named --all prepared--> joining --all joined--> joined
                                   ^  `----- a member dies, in whichever state -----'  |
                                   |                                                   v
                                   `-- a rank is ready again (only from joined) <-- broken

Naming has two phases: members *prepare* (their experts are loaded beside running steps), and only when all have are
they told to *join*; so nobody stalls for a rank that loads. A membership whose member died is never finished: the next
one, with a greater number, replaces it. It takes the ranks that were stepping, so that they go on at once; a rank that
comes back waits until they have joined, unless they can not hold all experts without it. Ranks that all died start
over together.

Which expert is where in a membership is a question to the caller (`Place`), and so is whether a membership may be
named now: not while it is open whether an epoch became active (`Migration.blocks_membership`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.core.group import Membership, PartPlacement
from engine.core.pact import PARTS
from engine.errors import RemoteProtocolError
from transport.messages import Member, PartInfo

Place = Callable[[frozenset[int]], tuple[PartPlacement, ...] | str]
"""The experts of all parts on these places, or why they can not be there."""


class RosterPhase(enum.Enum):
    """BROKEN: a member of the last membership that was named is dead, and no other has been named yet."""

    FORMING = "forming"
    NAMED = "named"
    JOINING = "joining"
    JOINED = "joined"
    BROKEN = "broken"


class NameMembers(NamedTuple):
    """NameGroup to all members."""

    membership: Membership


class JoinMembers(NamedTuple):
    """JoinGroup to these places."""

    number: int
    places: tuple[int, ...]


class ServeMembers(NamedTuple):
    """These places have joined for the first time in their life: requests may go there."""

    number: int
    places: tuple[int, ...]


RosterOrder = NameMembers | JoinMembers | ServeMembers


@dataclasses.dataclass(frozen=True, slots=True)
class Chair:
    """A living rank of the group, since its RankReady."""

    generation: int
    mesh_address: str
    description: bytes


class Roster:
    """See the module.

    Args:
        ranks: rank of each place.

    Attributes:
        number: of the last membership that was named, 0 before the first.
        named: that membership.
        phase: of it.
        parts: what every rank says of its slots; empty before the first is ready.
        lack: why no membership can be named although one is needed; empty otherwise.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.number = 0
        self.named: Membership | None = None
        self.phase = RosterPhase.FORMING
        self.parts: tuple[PartInfo, ...] = ()
        self.lack = ""
        self._chairs: dict[int, Chair] = {}
        self._told: dict[int, int] = {}
        self._told_number = 0
        self._prepared: set[int] = set()
        self._joined: set[int] = set()
        self._serving: dict[int, int] = {}
        self._accused_in = 0

    @property
    def living(self) -> frozenset[int]:
        """Places with a ready rank, whether it has joined or not."""
        return frozenset(self._chairs)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without which the group steps, or would step."""
        present = self._members() if self.phase is RosterPhase.JOINED else self.living
        return tuple(rank for place, rank in enumerate(self.ranks) if place not in present)

    @property
    def is_complete(self) -> bool:
        """All ranks step together."""
        return self.phase is RosterPhase.JOINED and not self.missing

    @property
    def generations(self) -> dict[int, int]:
        """Place to generation of the living."""
        return {place: chair.generation for place, chair in sorted(self._chairs.items())}

    @property
    def running(self) -> frozenset[int]:
        """Places that were told to join a membership and have lived since: they hold sequences."""
        return frozenset(place for place, generation in self._told.items() if self._is_alive(place, generation))

    # ------------------------------------------------------------ words

    def note_ready(self, place: int, chair: Chair, parts: tuple[PartInfo, ...]) -> None:
        """RankReady of a new life.

        Raises:
            RemoteProtocolError: it has other slots than the others, or no way to meet them.
        """
        name = f"rank {self.ranks[place]}"
        if not parts or tuple(part.name for part in parts) != PARTS[: len(parts)] or not chair.mesh_address:
            raise RemoteProtocolError(f"{name} of a group must say where it meets the others and which slots it has")
        for part in parts:
            if len(self.ranks) * part.slots < part.layers * part.experts:
                raise RemoteProtocolError(
                    f"{name} has {part.slots} slots of part {part.name}: {len(self.ranks)} ranks can not hold "
                    f"{part.layers} x {part.experts} experts in them"
                )
        if self.parts and parts != self.parts:
            raise RemoteProtocolError(f"{name} has slots {_describe(parts)}, its group has {_describe(self.parts)}")
        self.parts = parts
        self._chairs[place] = chair

    def note_down(self, place: int, generation: int) -> bool:
        """Its process is confirmed dead. False if that life was not here."""
        if not self._is_alive(place, generation):
            return False
        del self._chairs[place]
        if self.named is not None and self.named.members[place].generation == generation:
            self.phase = RosterPhase.BROKEN
        return True

    def note_prepared(self, place: int, generation: int, number: int) -> tuple[RosterOrder, ...]:
        """GroupPrepared. A word of an earlier life or about an earlier membership changes nothing.

        Raises:
            RemoteProtocolError: a membership that was not named, or not to this rank.
        """
        if not self._is_current(place, generation, number) or self.phase is not RosterPhase.NAMED:
            return ()
        self._prepared.add(place)
        if self._prepared != self._members():
            return ()
        self.phase, self._told_number = RosterPhase.JOINING, number
        self._told = {member: self._chairs[member].generation for member in self._members()}
        return (JoinMembers(number, tuple(sorted(self._members()))),)

    def note_joined(self, place: int, generation: int, number: int) -> tuple[RosterOrder, ...]:
        """GroupJoined.

        Raises:
            RemoteProtocolError: it was not told to join.
        """
        if not self._is_current(place, generation, number):
            return ()
        if self.phase is RosterPhase.NAMED:
            raise RemoteProtocolError(f"rank {self.ranks[place]} joined membership {number} before it was told to")
        if self.phase is not RosterPhase.JOINING:
            return ()
        self._joined.add(place)
        if self._joined != self._members():
            return ()
        self.phase = RosterPhase.JOINED
        fresh = tuple(at for at in sorted(self._joined) if self._serving.get(at) != self._chairs[at].generation)
        self._serving.update({at: self._chairs[at].generation for at in fresh})
        return (ServeMembers(number, fresh),)

    def accuse(self, rank: int, generation: int, number: int) -> int | None:
        """The place of a rank that did not answer its peers and has to be ended; None if the word is out of date.

        One in a membership: others that wait for it may look silent themselves.

        Raises:
            RemoteProtocolError: it is not a rank of this group.
        """
        if rank not in self.ranks:
            raise RemoteProtocolError(f"accuses rank {rank}, which is not of its group")
        place = self.ranks.index(rank)
        if not self._is_alive(place, generation) or number <= self._accused_in or number < self._told_number:
            return None
        self._accused_in = number
        return place

    # ------------------------------------------------------------ naming

    def advance(self, place: Place, blocked: bool) -> tuple[RosterOrder, ...]:
        """Names the next membership if one is needed; call it after every word, and when `blocked` may have changed."""
        if blocked:
            return ()
        for candidates in self._list_candidates():
            parts = place(candidates)
            if not isinstance(parts, str):
                return self._name(candidates, parts)
            self.lack = parts
        return ()

    def _list_candidates(self) -> list[frozenset[int]]:
        running, living = self.running, self.living
        if self.phase is RosterPhase.JOINED:
            return [living] if living != self._members() else []
        if self.phase not in (RosterPhase.FORMING, RosterPhase.BROKEN):
            return []
        if not running:  # nobody waits to go on, so nobody has to load experts of those who are late
            return [living] if len(living) == len(self.ranks) else []
        return [running, living] if running != living else [living]

    def _name(self, places: frozenset[int], parts: tuple[PartPlacement, ...]) -> tuple[RosterOrder, ...]:
        self.number += 1
        chairs = [self._chairs[at] if at in places else None for at in range(len(self.ranks))]
        descriptions = tuple(b"" if chair is None else chair.description for chair in chairs)
        members = tuple(
            Member(rank, 0, "", 0) if chair is None
            else Member(rank, chair.generation, chair.mesh_address, len(chair.description))
            for rank, chair in zip(self.ranks, chairs, strict=True)
        )  # fmt: skip
        self.named = Membership(self.number, members, descriptions, parts)
        self.phase, self.lack = RosterPhase.NAMED, ""
        self._prepared.clear()
        self._joined.clear()
        return (NameMembers(self.named),)

    # ------------------------------------------------------------ inner

    def _members(self) -> set[int]:
        """Places of the last membership that was named."""
        return set() if self.named is None else set(self.named.living)

    def _is_alive(self, place: int, generation: int) -> bool:
        chair = self._chairs.get(place)
        return chair is not None and chair.generation == generation

    def _is_current(self, place: int, generation: int, number: int) -> bool:
        if number > self.number:
            raise RemoteProtocolError(
                f"rank {self.ranks[place]} speaks of membership {number}, the last one named is {self.number}"
            )
        if number < self.number or not self._is_alive(place, generation):
            return False
        assert self.named is not None
        if self.named.members[place].generation != generation:
            raise RemoteProtocolError(f"rank {self.ranks[place]} is not in membership {number}, and speaks of it")
        return True


def _describe(parts: tuple[PartInfo, ...]) -> str:
    return ", ".join(f"{p.name} {p.slots} x {p.slot_bytes} bytes for {p.layers} x {p.experts}" for p in parts)
