"""Who steps together: two-phase naming, deaths in every state, and a group to which anything happens in any order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.core.group import Membership, PartPlacement
from engine.core.membership import (
    Chair,
    JoinMembers,
    NameMembers,
    Roster,
    RosterPhase,
    ServeMembers,
)
from engine.core.placement import EMPTY, Placement
from engine.core.seating import Seating, place_members
from engine.errors import RemoteProtocolError
from transport.messages import PartInfo

RANKS = (4, 5, 6)
PARTS = (PartInfo("main", 1, 6, 4, 100),)
ANY = Placement(1, 6, np.array([[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]], dtype=np.int32))


class Desk:
    """A roster with the rest of the head around it: what was ordered, and who is alive."""

    def __init__(self) -> None:
        self.roster = Roster(RANKS)
        self.named: list[Membership] = []
        self.joins: list[JoinMembers] = []
        self.served: list[tuple[int, int]] = []
        self.lives = dict.fromkeys(range(3), 0)
        self.blocked = False
        self.least = 1
        """So many places can hold all experts."""

    def place(self, living: frozenset[int]) -> tuple[PartPlacement, ...] | str:
        return (PartPlacement(1, ANY),) if len(living) >= self.least else "no room"

    def take(self, orders: tuple) -> None:
        for order in orders:
            match order:
                case NameMembers(membership=membership):
                    assert not self.blocked
                    self.named.append(membership)
                case JoinMembers():
                    self.joins.append(order)
                case ServeMembers(places=places):
                    self.served += [(place, self.lives[place]) for place in places]
        if orders:
            self.advance()

    def advance(self) -> None:
        self.take(self.roster.advance(self.place, self.blocked))

    def ready(self, place: int) -> None:
        self.lives[place] += 1
        self.roster.note_ready(place, Chair(self.lives[place], f"at {place}", b"d%d" % place), PARTS)
        self.advance()

    def down(self, place: int) -> None:
        assert self.roster.note_down(place, self.lives[place])
        self.advance()

    def prepared(self, *places: int, number: int = 0) -> None:
        for place in places:
            self.take(self.roster.note_prepared(place, self.lives[place], number or self.roster.number))

    def joined(self, *places: int, number: int = 0) -> None:
        for place in places:
            self.take(self.roster.note_joined(place, self.lives[place], number or self.roster.number))

    @property
    def members(self) -> tuple[int, ...]:
        return self.named[-1].living


def joined_desk() -> Desk:
    desk = Desk()
    for place in range(3):
        desk.ready(place)
    desk.prepared(0, 1, 2)
    desk.joined(0, 1, 2)
    assert desk.roster.is_complete
    return desk


def test_a_group_is_named_once_all_ranks_are_ready_and_serves_once_all_have_joined() -> None:
    desk = Desk()
    desk.ready(0)
    desk.ready(2)
    assert not desk.named and desk.roster.phase is RosterPhase.FORMING
    desk.ready(1)
    (membership,) = desk.named
    assert membership.number == 1 and [member.rank for member in membership.members] == list(RANKS)
    assert membership.descriptions == (b"d0", b"d1", b"d2") and membership.members[1].mesh_address == "at 1"
    desk.prepared(0, 1)
    assert not desk.joins
    desk.prepared(2)
    assert desk.joins == [JoinMembers(1, (0, 1, 2))]
    desk.joined(0, 1)
    assert not desk.served
    desk.joined(2)
    assert desk.served == [(0, 1), (1, 1), (2, 1)]


def test_survivors_go_on_without_a_lost_member_and_then_with_its_next_life() -> None:
    desk = joined_desk()
    desk.down(1)
    assert desk.members == (0, 2) and desk.named[-1].members[1].generation == 0
    desk.ready(1)
    assert desk.members == (0, 2), "survivors do not wait for a rank that loads"
    desk.prepared(0, 2)
    desk.joined(0, 2)
    assert desk.members == (0, 1, 2) and desk.roster.number == 3
    assert desk.roster.missing == () and not desk.roster.is_complete
    desk.prepared(0, 2, 1)
    desk.joined(0, 1, 2)
    assert desk.roster.is_complete and desk.served[3:] == [(1, 2)]


def test_without_room_for_its_experts_survivors_wait_for_the_lost_rank() -> None:
    desk = joined_desk()
    desk.least = 3
    desk.down(0)
    assert len(desk.named) == 1 and desk.roster.lack == "no room" and desk.roster.missing == (4,)
    desk.ready(0)
    assert desk.members == (0, 1, 2) and not desk.roster.lack


def test_nothing_is_named_while_it_is_open_what_became_of_an_epoch() -> None:
    desk = joined_desk()
    desk.blocked = True
    desk.down(2)
    desk.ready(2)
    assert len(desk.named) == 1
    desk.blocked = False
    desk.advance()
    assert desk.members == (0, 1)


@pytest.mark.parametrize("words", ["nobody prepared", "victim prepared", "others prepared", "join told", "some joined"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_a_lost_rank_comes_back_is_followed_by_a_greater_number(words: str, victim: int) -> None:
    desk = joined_desk()
    desk.down(1)
    desk.prepared(0, 2)
    desk.joined(0, 2)
    desk.ready(1)
    number = desk.roster.number
    if words == "victim prepared":
        desk.prepared(victim)
    elif words == "others prepared":
        desk.prepared(*({0, 1, 2} - {victim}))
    elif words != "nobody prepared":
        desk.prepared(0, 1, 2)
    if words == "some joined":
        desk.joined(2)
    joins = len(desk.joins)
    desk.down(victim)
    assert desk.roster.number == number + 1
    told = words in ("join told", "some joined")
    # Who was told to join holds sequences; a rank that was still loading is not waited for.
    assert desk.members == ((0, 2) if victim == 1 else (1, 2) if told else (2,))
    desk.prepared(0 if victim == 1 else 1, 2, number=number)
    assert len(desk.joins) == joins, "words about a membership with a dead member make nobody join"


def test_ranks_that_all_died_start_over_together() -> None:
    desk = joined_desk()
    desk.blocked = True
    for place in range(3):
        desk.down(place)
    desk.blocked = False
    desk.ready(2)
    desk.ready(0)
    assert len(desk.named) == 1
    desk.ready(1)
    assert desk.members == (0, 1, 2)


def test_words_of_earlier_lives_and_memberships_change_nothing_and_invented_ones_raise() -> None:
    desk = joined_desk()
    assert not desk.roster.note_down(1, 7)
    desk.down(1)
    assert desk.roster.note_prepared(1, 1, 2) == () and desk.roster.note_joined(0, 1, 1) == ()
    with pytest.raises(RemoteProtocolError, match="before it was told"):
        desk.roster.note_joined(0, 1, 2)
    with pytest.raises(RemoteProtocolError, match="membership 3, the last one named is 2"):
        desk.roster.note_prepared(0, 1, 3)
    desk.ready(1)
    with pytest.raises(RemoteProtocolError, match="not in membership 2"):
        desk.roster.note_prepared(1, 2, 2)


def test_ranks_whose_slots_differ_do_not_make_a_group() -> None:
    roster = Roster(RANKS)
    roster.note_ready(0, Chair(1, "a", b""), PARTS)
    with pytest.raises(RemoteProtocolError, match="its group has main 4 x 100"):
        roster.note_ready(1, Chair(1, "a", b""), (PartInfo("main", 1, 6, 5, 100),))
    with pytest.raises(RemoteProtocolError, match="must say where"):
        roster.note_ready(1, Chair(1, "", b""), PARTS)
    with pytest.raises(RemoteProtocolError, match="must say where"):
        roster.note_ready(1, Chair(1, "a", b""), (PartInfo("draft", 1, 6, 4, 100),))
    with pytest.raises(RemoteProtocolError, match="can not hold"):
        Roster(RANKS).note_ready(1, Chair(1, "a", b""), (PartInfo("main", 2, 9, 4, 100),))


def test_one_rank_is_ended_for_a_membership_that_stands_still() -> None:
    desk = joined_desk()
    assert desk.roster.accuse(5, 1, 1) == 1
    assert desk.roster.accuse(6, 1, 1) is None, "it may have waited for the one that is being ended"
    desk.down(1)
    desk.prepared(0, 2)
    assert desk.roster.accuse(4, 1, 1) is None
    assert desk.roster.accuse(4, 9, 2) is None
    assert desk.roster.accuse(4, 1, 2) == 0
    with pytest.raises(RemoteProtocolError, match="not of its group"):
        desk.roster.accuse(9, 1, 2)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_numbers_go_up_and_nobody_joins_the_unprepared(seed: int) -> None:
    chance = random.Random(seed)
    desk = Desk()
    desk.least = chance.choice([1, 2, 3])
    prepared: set[tuple[int, int, int]] = set()
    told: set[tuple[int, int, int]] = set()
    for turn in range(400):
        alive = sorted(desk.roster.living)
        roll = chance.random()
        if turn > 300:
            desk.blocked = False
            roll = 0.3 + 0.7 * roll
        if roll < 0.05 and alive:
            desk.down(chance.choice(alive))
        elif roll < 0.3:
            desk.blocked = chance.random() < 0.3
            desk.advance()
        elif roll < 0.45 and len(alive) < 3:
            desk.ready(chance.choice([place for place in range(3) if place not in alive]))
        elif desk.named:
            membership = chance.choice(desk.named[-2:])
            place = chance.choice(range(3))
            generation = membership.members[place].generation
            key = (membership.number, place, generation)
            if roll < 0.75 and generation:
                prepared.add(key)
                desk.take(desk.roster.note_prepared(place, generation, membership.number))
            elif key in told:
                desk.take(desk.roster.note_joined(place, generation, membership.number))
        for join in desk.joins:
            named = desk.named[join.number - 1]
            keys = {(join.number, place, named.members[place].generation) for place in named.living}
            assert join.places == named.living and keys <= prepared
            told |= keys
    assert [membership.number for membership in desk.named] == list(range(1, len(desk.named) + 1))
    assert len({join.number for join in desk.joins}) == len(desk.joins)
    assert len(set(desk.served)) == len(desk.served), "a life is served once"
    for place in sorted({0, 1, 2} - desk.roster.living):
        desk.ready(place)
    desk.advance()
    for _ in range(3):
        places = [place for place in desk.members if place in desk.roster.living]
        desk.prepared(*places)
        desk.joined(*places)
    assert desk.roster.is_complete, desk.roster.phase


# ---------------------------------------------------------------- placements


def test_stranded_experts_go_only_into_slots_that_are_truly_empty() -> None:
    current = Placement(1, 6, np.array([[0, 1, 4, EMPTY], [2, 3, EMPTY, EMPTY], [4, 5, 1, EMPTY]], dtype=np.int32))
    placed = place_members(current, {0, 1}, {}, {(1, 2)})
    assert isinstance(placed, Placement)
    assert placed.table.tolist() == [[0, 1, 4, 5], [2, 3, EMPTY, EMPTY], [EMPTY] * 4]
    assert place_members(current, {0}, {}, {(0, 3)}) == 3, "2, 3 and 5 find no slot"
    assert place_members(current, {0}, {}, ()) == 2


def test_a_rank_that_is_back_gets_its_row_beside_what_others_took_over() -> None:
    current = Placement(1, 4, np.array([[0, 1, EMPTY], [2, 3, EMPTY], [0, 3, 1]], dtype=np.int32))
    lost = place_members(current, {0, 2}, {}, ())
    assert isinstance(lost, Placement) and lost.table.tolist() == [[0, 1, 2], [EMPTY] * 3, [0, 3, 1]]
    back = place_members(lost, {0, 1, 2}, {1: current.table[1]}, ())
    assert isinstance(back, Placement) and back.table.tolist() == [[0, 1, 2], [2, 3, EMPTY], [0, 3, 1]]


def test_what_was_taken_over_is_a_loan_until_it_is_moved_or_the_only_one() -> None:
    whole = Placement(1, 4, np.array([[0, EMPTY, EMPTY], [1, EMPTY, EMPTY], [2, 3, EMPTY]], dtype=np.int32))
    seating = Seating()
    everybody = {0, 1, 2}
    lost = seating.seat(whole, {0, 1}, ())
    assert isinstance(lost, Placement) and lost.table.tolist() == [[0, 2, EMPTY], [1, 3, EMPTY], [EMPTY] * 3]
    seating.note_named(whole, lost, {0, 1})
    back = seating.seat(lost, everybody, ())
    assert isinstance(back, Placement) and back.table.tolist() == [[0, 2, EMPTY], [1, 3, EMPTY], [2, 3, EMPTY]]
    seating.note_named(lost, back, everybody)
    assert seating.find_loans(back) == ((0, 1), (1, 1)), "the row of the rank that is back is its own"
    moved = Placement(1, 4, np.array([[0, 3, EMPTY], [1, 3, EMPTY], [2, EMPTY, EMPTY]], dtype=np.int32))
    assert seating.find_loans(moved) == ((1, 1),)
    only = Placement(1, 4, np.array([[0, EMPTY, EMPTY], [1, 3, EMPTY], [2, EMPTY, EMPTY]], dtype=np.int32))
    assert seating.find_loans(only) == ()
    assert seating.find_loans(moved) == (), "no loan once it was not"


def test_a_rank_that_died_and_came_back_before_any_membership_keeps_its_row() -> None:
    placed = place_members(ANY, {0, 1, 2}, {}, ())
    assert placed == ANY


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_that_is_in_use_ever_gets_another_expert(seed: int) -> None:
    chance = random.Random(seed)
    current, kept, living = ANY, {}, {0, 1, 2}
    for _ in range(30):
        after = set(chance.sample(range(3), chance.randint(1, 3)))
        placed = place_members(current, after, kept, ())
        if isinstance(placed, int):
            continue
        for place in after & living:
            row, new = current.table[place], placed.table[place]
            assert (new[row != EMPTY] == row[row != EMPTY]).all()
        for place in range(3):
            if place in after:
                kept.pop(place, None)
            elif (current.table[place] != EMPTY).any():
                kept[place] = current.table[place].copy()
        assert not placed.has_doubles()
        current, living = placed, after
