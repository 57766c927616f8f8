"""The mesh between real processes: what arrives, who is named when somebody does not answer, who may not come in."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import EngineError, LocalProtocolError, RemoteProtocolError
from engine.model.exchange import FRAME_LIMIT, Link
from engine.model.mesh import Mesh, MeshBroken, MeshListener
from tests.model.mesh_processes import Group, Rank

Make = Callable[[int], Group]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Rank]]:
    """Ranks that live through several tests; `make` replaces those that are gone or still owe an answer."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end()


@pytest.fixture
def make(processes: list[Rank], tmp_path: Path) -> Iterator[Make]:
    def make_group(count: int) -> Group:
        processes.extend(Rank() for _ in range(count - len(processes)))
        return Group(processes[:count], tmp_path)

    yield make_group
    for rank in list(processes):
        if rank.owed or rank.process.poll() is not None:
            rank.end()
            processes.remove(rank)
        else:
            rank.signal(signal.SIGCONT)
            rank.call("close")


@pytest.mark.parametrize("places", [2, 3, 4])
def test_frames_of_random_sizes_arrive_whole_at_unequal_speeds(make: Make, places: int) -> None:
    group = make(places)
    group.open()
    sizes = [0, 0, 1, 40, 4096, 70_000, 300_001]
    calls = [("play", {"seed": places, "exchanges": 60, "sizes": sizes, "pause_s": 0.004 * p}) for p in range(places)]
    answers = group.every(calls)
    assert all(answer.get("bytes", 0) > 60 * 4096 for answer in answers), answers


@pytest.mark.parametrize("places", [2, 4])
def test_large_frames_both_ways_at_once_do_not_deadlock(make: Make, places: int) -> None:
    group = make(places)
    group.open()
    size = 3 << 20
    answers = group.every([("play", {"seed": 1, "exchanges": 4, "sizes": [size], "pause_s": 0.0})] * places)
    assert [answer.get("bytes") for answer in answers] == [4 * size * (places - 1)] * places, answers


def test_a_member_that_was_lost_before_has_no_frames(make: Make) -> None:
    group = make(3)
    group.members[1] = [11, 0, ""]
    ranks = [group.ranks[0], group.ranks[2]]
    for rank, place in zip(ranks, (0, 2), strict=True):
        rank.post("open", **group.joining(place))
    assert [rank.answer().get("places") for rank in ranks] == [[0, 2], [0, 2]]
    for rank in ranks:
        rank.post("play", seed=1, exchanges=10, sizes=[0, 1000], pause_s=0.0)
    assert all("bytes" in rank.answer() for rank in ranks)


def test_frames_of_another_key_are_refused_by_both_names(make: Make) -> None:
    group = make(2)
    group.open()
    answers = group.every([("exchange", {"keys": [[3, 0, 1, phase]]}) for phase in (1, 2)])
    refused = [answer for answer in answers if answer.get("error") == "RemoteProtocolError"]
    assert refused, answers
    for answer in refused:
        assert "step 3, pass 0, layer 1, phase 1" in answer["why"] and "phase 2" in answer["why"]


@pytest.mark.parametrize("places", [2, 3])
def test_a_killed_peer_is_felt_at_once(make: Make, places: int) -> None:
    group = make(places)
    group.open(limit_s=20.0)
    rest = group.ranks[:-1]
    for rank in rest:
        rank.post("exchange", keys=[[0, 0, 0, 1]])
    group.ranks[-1].signal(signal.SIGKILL)
    killed = time.monotonic()
    answers = [rank.answer() for rank in rest]
    assert time.monotonic() - killed < 1.0
    assert all(answer.get("error") == "MeshBroken" and not answer["overdue"] for answer in answers), answers
    # Another survivor may be quicker to close than the killed one's end is read.
    assert places - 1 in [answer["place"] for answer in answers]
    group.ranks[-1].process.wait(10)


def test_a_peer_killed_amid_a_large_frame_is_felt_at_once(make: Make) -> None:
    group = make(2)
    group.open(limit_s=20.0)
    group.ranks[1].signal(signal.SIGSTOP)
    group.ranks[0].post("exchange", keys=[[0, 0, 0, 1]], size=3 << 20)
    group.ranks[1].signal(signal.SIGKILL)
    killed = time.monotonic()
    answer = group.ranks[0].answer()
    assert time.monotonic() - killed < 1.0
    assert (answer["error"], answer["place"], answer["overdue"]) == ("MeshBroken", 1, False)
    group.ranks[1].process.wait(10)


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_a_stopped_peer_is_named_once_the_limit_has_passed(make: Make, size: int) -> None:
    group = make(3)
    group.open(limit_s=1.0)
    group.ranks[2].signal(signal.SIGSTOP)
    for rank in group.ranks[:2]:
        rank.post("exchange", keys=[[7, 1, 2, 1]], size=size)
    answers = [rank.answer() for rank in group.ranks[:2]]
    assert all(answer.get("error") == "MeshBroken" for answer in answers), answers
    accused = [answer for answer in answers if answer["overdue"]]
    assert accused and {answer["place"] for answer in accused} == {2}
    for answer in accused:
        assert "step 7, pass 1, layer 2, phase 1 within 1 s" in answer["why"]
        assert 0.95 < answer["took_s"] < 1.9
        assert answer["used_s"] < 0.05, "it spins"


def test_one_that_waits_for_the_stopped_one_is_not_accused(make: Make) -> None:
    group = make(3)
    group.open(limit_s=0.6)
    # Place 2 stops between its frames for 0 and 1: 0 is an exchange further and misses two, 1 only the stopped one.
    group.ranks[2].call("send_one", key=[0, 0, 0, 1], target=0)
    group.ranks[2].signal(signal.SIGSTOP)
    keys = [[0, 0, 0, 1], [0, 0, 0, 2]]
    for rank in group.ranks[:2]:
        rank.post("exchange", keys=keys)
    near, far = group.ranks[1].answer(), group.ranks[0].answer()
    assert (near["place"], near["overdue"]) == (2, True), near
    assert (far["place"], far["overdue"]) == (1, False), far


def test_connections_of_other_memberships_and_lives_are_dropped(make: Make) -> None:
    group = make(2)
    strangers = []
    for said in (group.hello(6, 0, 1), group.hello(8, 0, 1), group.hello(7, 0, 1, generation=9), b"GET / HTTP/1.1\r\n"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.settimeout(5.0)
        stranger.connect(group.members[1][2])
        stranger.sendall(said)
        strangers.append(stranger)
    group.open(number=7)
    for stranger in strangers:
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # dropped before its last bytes were read
        stranger.close()
    answers = group.every([("exchange", {"keys": [[0, 0, 0, 1]]})] * 2)
    assert not any("error" in answer for answer in answers), answers


def test_a_hello_names_both_ends_with_their_generations(make: Make) -> None:
    group = make(2)
    group.ranks[1].post("open", **group.joining(1, number=7))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dialler:
        dialler.settimeout(5.0)
        dialler.connect(group.members[1][2])
        dialler.sendall(group.hello(7, 0, 1))
        assert dialler.recv(1000) == group.hello(7, 1, 0)
        assert group.ranks[1].answer().get("places") == [0, 1]


def test_members_of_different_memberships_do_not_meet_and_do_not_spin(make: Make) -> None:
    group = make(2)
    answers = group.every([("open", group.joining(place, number=1 + place, limit_s=0.6)) for place in range(2)])
    for place, answer in enumerate(answers):
        assert (answer["error"], answer["place"], answer["overdue"]) == ("MeshBroken", 1 - place, True)
        assert f"membership {1 + place} within 0.6 s" in answer["why"]
        assert answer["used_s"] < 0.05, "it spins"


def test_a_dialler_waits_for_one_that_is_still_in_an_older_membership(make: Make) -> None:
    group = make(2)
    group.ranks[0].post("open", **group.joining(0, number=2))
    older = group.ranks[1].call("open", **group.joining(1, number=1, wanted_s=0.2))
    assert (older["error"], older["place"], older["overdue"]) == ("MeshBroken", 0, False)
    assert older["took_s"] < 1.0
    assert group.ranks[1].call("open", **group.joining(1, number=2)).get("places") == [0, 1]
    assert group.ranks[0].answer().get("places") == [0, 1]


def test_a_member_that_calls_again_is_taken_and_its_first_connection_dropped(make: Make) -> None:
    group = make(3)
    group.ranks[1].post("open", **group.joining(1))
    first = group.ranks[0].call("open", **group.joining(0, wanted_s=0.2))
    assert (first["place"], first["overdue"]) == (2, False)  # so it had met place 1
    for place in (0, 2):
        group.ranks[place].post("open", **group.joining(place))
    assert [rank.answer().get("places") for rank in group.ranks] == [[0, 1, 2]] * 3
    answers = group.every([("exchange", {"keys": [[0, 0, 0, 1]]})] * 3)
    assert not any("error" in answer for answer in answers), answers


def test_a_member_that_gave_up_is_not_accused_but_the_one_it_missed(make: Make) -> None:
    group = make(3)
    for place, limit_s in ((0, 0.4), (1, 1.0)):
        group.ranks[place].post("open", **group.joining(place, limit_s=limit_s))
    assert [(answer["place"], answer["overdue"]) for answer in map(Rank.answer, group.ranks[:2])] == [(2, True)] * 2


def test_a_member_that_left_is_named_but_not_as_overdue(make: Make) -> None:
    group = make(3)
    group.ranks[1].post("open", **group.joining(1, limit_s=1.5))
    assert group.ranks[0].call("open", **group.joining(0, wanted_s=0.2))["place"] == 2
    group.ranks[2].post("open", **group.joining(2, wanted_s=0.3))
    left = group.ranks[1].answer()
    assert (left["place"], left["overdue"]) == (0, False), left
    assert "joined membership 1 and left" in left["why"]
    assert not group.ranks[2].answer()["overdue"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_mesh_that_is_not_wanted_any_more_is_given_up(make: Make, place: int) -> None:
    group = make(2)
    answer = group.ranks[place].call("open", **group.joining(place, limit_s=20.0, wanted_s=0.2))
    assert (answer["error"], answer["place"], answer["overdue"]) == ("MeshBroken", 1 - place, False)
    assert 0.15 < answer["took_s"] < 1.0


def test_a_member_whose_address_is_dead_is_overdue(make: Make) -> None:
    group = make(2)
    os.unlink(group.members[1][2])
    answer = group.ranks[0].call("open", **group.joining(0, limit_s=0.3))
    assert (answer["error"], answer["place"], answer["overdue"]) == ("MeshBroken", 1, True)


def test_the_next_membership_opens_after_one_has_broken(make: Make) -> None:
    group = make(3)
    for number in (1, 2):
        group.open(number)
        group.ranks[1].call("close")
        rest = [group.ranks[0], group.ranks[2]]
        for rank in rest:
            rank.post("exchange", keys=[[0, 0, 0, 1]])
        assert all(rank.answer()["error"] == "MeshBroken" for rank in rest)
    group.open(3)
    answers = group.every([("play", {"seed": 3, "exchanges": 5, "sizes": [0, 9000], "pause_s": 0.0})] * 3)
    assert all("bytes" in answer for answer in answers), answers


def open_pair(limit_s: float = 5.0) -> tuple[Mesh, socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Mesh(0, [Link(1, 11, near)], limit_s), far


def test_a_mesh_of_one_exchanges_nothing() -> None:
    mesh = Mesh(2, [], 1.0)
    assert mesh.places == (2,) and mesh.exchange((0, 0, 0, 1), {}) == {}


def test_wrong_use_is_named() -> None:
    mesh, far = open_pair()
    with pytest.raises(LocalProtocolError, match=r"frames for places \[0, 1\] from one of \(0, 1\)"):
        mesh.start((0, 0, 0, 1), {0: [], 1: []})
    mesh.start((0, 0, 0, 1), {1: []})
    with pytest.raises(LocalProtocolError, match="in the exchange of step 0, pass 0, layer 0, phase 1"):
        mesh.start((0, 0, 0, 2), {1: []})
    with pytest.raises(LocalProtocolError, match="the end of an exchange of step 0, pass 0, layer 0, phase 2"):
        mesh.finish((0, 0, 0, 2))
    mesh.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        mesh.start((0, 0, 0, 2), {1: []})
    far.close()


@pytest.mark.parametrize("size", [FRAME_LIMIT + 1, -1])
def test_a_frame_of_an_impossible_length_is_refused(size: int) -> None:
    mesh, far = open_pair()
    far.sendall(size.to_bytes(8, "little", signed=True) + bytes(32))
    with pytest.raises(RemoteProtocolError, match=f"rank 11 announces a frame of {size} bytes"):
        mesh.exchange((0, 0, 0, 0), {1: []})
    assert far.recv(100) and far.recv(100) == b"", "it did not close"
    far.close()


def test_a_peer_that_ends_after_its_frame_does_not_break_this_exchange_but_the_next() -> None:
    mesh, far = open_pair()
    far.sendall((3).to_bytes(8, "little") + bytes(32) + b"end")
    far.shutdown(socket.SHUT_WR)
    assert bytes(mesh.exchange((0, 0, 0, 0), {1: [b"x"]})[1]) == b"end"
    with pytest.raises(MeshBroken, match="place 1 closed its connection") as caught:
        mesh.exchange((0, 0, 0, 1), {1: [b"x"]})
    assert not caught.value.overdue
    far.close()


def test_an_expired_limit_is_for_good() -> None:
    """What comes too late must not be taken for the answer of a later exchange, and the others must feel it."""
    mesh, far = open_pair(limit_s=0.05)
    with pytest.raises(MeshBroken) as caught:
        mesh.exchange((3, 0, 1, 1), {1: [b"x"]})
    assert caught.value.overdue and caught.value.place == 1
    with pytest.raises(LocalProtocolError, match="closed"):
        mesh.start((3, 0, 1, 2), {1: [b"x"]})
    assert far.recv(100) and far.recv(100) == b"", "the other end does not feel it"
    far.close()


def test_a_listener_replaces_a_dead_ones_file_and_no_other(tmp_path: Path) -> None:
    address = str(tmp_path / "mesh")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(address)
    dead.close()
    listener = MeshListener(address)
    assert os.stat(address).st_mode & 0o777 == 0o600
    with pytest.raises(EngineError, match="in use by a live process"):
        MeshListener(address)
    listener.close()
    listener.close()
    assert not os.path.exists(address)
    Path(address).write_text("precious")
    with pytest.raises(EngineError, match="a file that is no socket"):
        MeshListener(address)
    assert Path(address).read_text() == "precious"
