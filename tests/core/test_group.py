"""Memberships and stages as values: round trips through their messages, and blobs that say what can not be."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from engine.core.group import (
    EpochStage,
    Membership,
    PartPlacement,
    decode_membership,
    decode_stage,
    encode_membership,
    encode_stage,
    pack_slots,
    unpack_slots,
)
from engine.core.moves import order_moves
from engine.core.placement import EMPTY, Placement
from engine.errors import RemoteProtocolError
from transport.messages import Member, PartTable, PrepareEpoch
from transport.wire import encode_frame


@st.composite
def placements(draw: st.DrawFn, ranks: int) -> Placement:
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    keys = list(range(layers * experts))
    slots = -(-len(keys) // ranks) + draw(st.integers(1, 2))
    extra = draw(st.lists(st.sampled_from([EMPTY, *keys]), min_size=ranks * slots - len(keys), max_size=ranks * slots))
    cells = draw(st.permutations([*keys, *extra[: ranks * slots - len(keys)]]))
    return Placement(layers, experts, np.array(cells, np.int32).reshape(ranks, slots))


@st.composite
def memberships(draw: st.DrawFn) -> Membership:
    ranks = draw(st.integers(1, 4))
    descriptions = tuple(draw(st.binary(max_size=9)) for _ in range(ranks))
    members = tuple(
        Member(7 + place, draw(st.integers(0, 3)), f"at-{place}", len(descriptions[place])) for place in range(ranks)
    )
    parts = tuple(
        PartPlacement(draw(st.integers(0, 9)), draw(placements(ranks))) for _ in range(draw(st.integers(1, 2)))
    )
    return Membership(draw(st.integers(1, 99)), members, descriptions, parts)


@hypothesis.given(memberships())
def test_a_membership_survives_its_message(membership: Membership) -> None:
    message, blob = encode_membership(membership)
    encode_frame(message, blob)
    assert decode_membership(message, memoryview(blob)) == membership


@hypothesis.given(memberships())
def test_places_are_those_of_living_ranks(membership: Membership) -> None:
    living = [member.rank for member in membership.members if member.generation]
    assert [membership.members[place].rank for place in membership.living] == living
    for place, member in enumerate(membership.members):
        if member.generation:
            assert membership.place_of(member.rank) == place
        else:
            with pytest.raises(ValueError, match=f"rank {member.rank} is not in membership {membership.number}"):
                membership.place_of(member.rank)


BEFORE = Placement(1, 4, np.array([[0, 1, EMPTY], [2, 3, EMPTY]], np.int32))
AFTER = Placement(1, 4, np.array([[0, 2, EMPTY], [1, 3, EMPTY]], np.int32))


def encode() -> tuple[PrepareEpoch, bytearray]:
    message, blob = encode_stage(1, 6, order_moves(BEFORE, AFTER, (0, 0))[0], 99)
    encode_frame(message, blob)
    return message, bytearray(blob)


def test_a_stage_survives_its_message_but_for_which_copies_are_far() -> None:
    (stage,) = order_moves(BEFORE, AFTER, (0, 0))
    message, blob = encode()
    assert decode_stage(message, memoryview(blob)) == EpochStage(1, 6, stage.after, stage.copies, stage.released, 99)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, 9, "the table of part draft is no placement: slot 0 of rank 0 holds 9"),
        (0, 2, "the table of part draft is no placement: expert 0 of layer 0 has no slot"),
        (6 + 4, 7, "epoch 6 copies slot 2 of place 7, there is none"),
        (6 + 5, -1, "there is none"),
        (6 + 1, 3, "epoch 6 copies what its table does not name"),
    ],
)
def test_a_stage_that_contradicts_itself_is_refused(at: int, value: int, why: str) -> None:
    message, blob = encode()
    blob[4 * at : 4 * at + 4] = value.to_bytes(4, "little", signed=True)
    with pytest.raises(RemoteProtocolError, match=why):
        decode_stage(message, memoryview(blob))


def test_parts_come_in_their_order() -> None:
    message, blob = encode_membership(
        Membership(3, (Member(0, 1, "", 0),), (b"",), (PartPlacement(0, Placement(1, 1, np.array([[0]], np.int32))),))
    )
    wrong = type(message)(3, message.members, (PartTable("draft", 0, 1, 1, 1),))
    with pytest.raises(RemoteProtocolError, match="membership 3 has parts"):
        decode_membership(wrong, memoryview(blob))


@hypothesis.given(st.lists(st.integers(0, 2**31 - 1)))
def test_slots_survive_their_blob(slots: list[int]) -> None:
    assert unpack_slots(memoryview(pack_slots(slots))) == slots
