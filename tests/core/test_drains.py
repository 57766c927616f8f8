"""Ranks that operators take out of routing: what is refused, with which way out, and how it is told."""

from __future__ import annotations

import pytest

from engine.core.drains import Drains, name_ranks
from transport.messages import Role

ROLES: dict[int, Role] = {0: "prefill", 1: "prefill", 2: "decode", 3: "decode", 4: "decode", 5: "decode"}
ALL = frozenset(ROLES)


def test_ranks_are_drained_and_put_back():
    drains = Drains(ROLES)
    done, changed = drains.drain((2, 3), "drained by alice (fans)", ALL)
    assert done == "ranks 2-3 take no new requests from now on" and changed == {2, 3}
    done, changed = drains.drain((3, 5), "drained by bob", ALL)
    assert done == "rank 5 takes no new requests from now on; rank 3 had been drained before" and changed == {5}
    assert drains.sentences() == (
        "rank 2 takes no new requests: drained by alice (fans)",
        "ranks 3, 5 take no new requests: drained by bob",
    )
    done, changed = drains.undrain((0, 2, 2, 3))
    assert done == "ranks 2-3 take new requests again; rank 0 had not been drained" and changed == {2, 3}
    assert drains.reasons == {5: "drained by bob"}
    assert drains.undrain((5,)) == ("rank 5 takes new requests again", {5}) and drains.sentences() == ()


def test_nobody_said_why():
    drains = Drains(ROLES)
    drains.drain((4,), "", ALL)
    assert drains.sentences() == ("rank 4 takes no new requests: drained by an operator",)


@pytest.mark.parametrize(
    ("drained", "ranks", "ready", "says"),
    [
        ((), (2, 9, 11), ALL, "there are no ranks 9, 11; this cluster has ranks 0-5"),
        ((), (2, 3, 4, 5), ALL, "ranks 2-5 are the last decode ranks that take requests; leave one of them out, or"),
        ((0,), (1,), ALL, "rank 1 is the last prefill rank that takes requests; undrain rank 0 first, or end"),
        ((3,), (2,), {0, 1, 2, 3}, "rank 2 is the last decode rank that takes requests; wait until ranks 4-5 are"),
        ((3, 4), (2,), {0, 1, 2}, "wait until rank 5 is ready, or end the engine with engine down"),
    ],
)
def test_a_refusal_names_the_thing_and_the_way_out_and_changes_nothing(drained, ranks, ready, says):
    drains = Drains(ROLES)
    if drained:
        drains.drain(drained, "before", ALL)
    with pytest.raises(ValueError, match=r"engine|cluster") as caught:
        drains.drain(ranks, "x", ready)
    assert says in str(caught.value)
    assert drains.reasons == dict.fromkeys(drained, "before")


def test_the_only_rank_of_a_pool_stays():
    with pytest.raises(ValueError, match=r"give the pool more ranks \(pools.prefill.ranks\)"):
        Drains({0: "prefill", 1: "decode"}).drain((0,), "", {0, 1})


def test_a_rank_that_takes_nothing_as_it_is_may_be_drained():
    drains = Drains(ROLES)
    assert drains.drain((2,), "", {0, 1})[1] == {2}
    assert drains.drain((3,), "", {0, 1, 4})[1] == {3}


def test_an_unknown_rank_can_not_be_put_back():
    with pytest.raises(ValueError, match="there is no rank 7"):
        Drains(ROLES).undrain((7,))


def test_ranks_are_named_as_spans():
    assert [name_ranks(ranks) for ranks in ((4,), (5, 4), (1, 2, 3, 7))] == ["rank 4", "ranks 4-5", "ranks 1-3, 7"]
