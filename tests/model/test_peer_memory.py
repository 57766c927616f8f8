"""Memory that processes map of one another: exchanges through it, its owner's death, and what is refused.

On the CPU and, where there are two GPUs, between them: the same processes with another device.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import DeviceError
from engine.model import cuda_memory
from engine.model.peer_memory import allocate, open_peer
from engine.model.shares import _MAGIC, _SHARE
from tests.model.mesh_processes import Answer, Group, Rank

CPU = torch.device("cpu")
SIZES = {"layers": 3, "capacity": 3, "hidden": 64, "top_k": 2}
DISPATCH = 0
Make = Callable[[], Group]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        ],
    ),
]


class Pair(Group):
    """Two ranks with mailboxes of `SIZES`."""

    def __init__(self, ranks: list[Rank], folder: Path, device: str) -> None:
        self.device = device
        super().__init__(ranks, folder)

    def joining(self, place: int, number: int = 1, limit_s: float = 5.0, wanted_s: float = 60.0, **more: Any) -> Answer:
        # Compiling counts as well.
        limit_s = limit_s if self.device == "cpu" or limit_s < 5.0 else 20.0
        return {**super().joining(place, number, limit_s, wanted_s), "sizes": SIZES, **more}

    def step(self, seed: int, counts: list[int], steps: int = 1) -> None:
        """In both, and what comes is right."""
        answers = self.every([("step", {"seed": seed, "counts": counts, "steps": steps})] * len(self.ranks))
        for answer in answers:
            assert (answer.get("wrong"), answer.get("steps"), answer.get("expiry")) == (0, steps, None), answers


def start(device: str, place: int) -> Rank:
    if device == "cpu":
        return Rank("tests.model.peer_rank", device, variables={"TRITON_INTERPRET": "1"})
    return Rank("tests.model.peer_rank", f"{device}:{place}")


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[str, int], Rank]]:
    """Ranks that live through several tests, by device and place."""
    ranks: dict[tuple[str, int], Rank] = {}
    yield ranks
    for rank in ranks.values():
        rank.end()


@pytest.fixture(params=DEVICES)
def pair(request: pytest.FixtureRequest, processes: dict[tuple[str, int], Rank], tmp_path: Path) -> Iterator[Pair]:
    keys = [(request.param, place) for place in range(2)]
    for key in keys:
        if key not in processes:
            processes[key] = start(*key)
    group = Pair([processes[key] for key in keys], tmp_path, request.param)
    yield group
    for rank in group.ranks:
        if rank not in processes.values():
            rank.end()
    for key in keys:
        rank = processes[key]
        if rank.owed or rank.process.poll() is not None:
            rank.end()
            del processes[key]
        else:
            rank.call("close")
            rank.call("drop")


def test_rows_and_sums_pass_between_processes(pair: Pair) -> None:
    pair.open()
    for seed, counts in enumerate(([3, 2], [0, 3], [1, 0], [0, 0])):
        pair.step(100 * seed, counts, steps=2)


def test_narrow_rows_pass_between_processes(pair: Pair) -> None:
    sizes = {"layers": 2, "capacity": 2, "hidden": 128, "top_k": 2, "narrow": True}
    pair.every([("open", pair.joining(place, sizes=sizes)) for place in range(2)])
    pair.step(7, [2, 1])


def test_memberships_one_after_another_leave_no_descriptor(pair: Pair) -> None:
    pair.open(1)
    pair.step(0, [2, 2])
    before = [rank.call("count_descriptors")["descriptors"] for rank in pair.ranks]
    for number in (2, 3, 4):
        pair.open(number)
        pair.step(number, [1, 3])
    assert [rank.call("count_descriptors")["descriptors"] for rank in pair.ranks] == before


def test_another_layout_is_refused_by_both(pair: Pair) -> None:
    sizes = [SIZES, {**SIZES, "capacity": 2}]
    answers = pair.every([("open", pair.joining(place, sizes=sizes[place])) for place in range(2)])
    for place, answer in enumerate(answers):
        # One may have left before the other has looked.
        if answer["error"] != "MeshBroken":
            assert answer["error"] == "RemoteProtocolError", answer
            assert f"rank {11 - place} shares" in answer["why"] and "of another layout than" in answer["why"]
            assert f"capacity={sizes[place]['capacity']}" in answer["why"]
    assert any(answer["error"] == "RemoteProtocolError" for answer in answers)


def test_a_member_that_shares_nothing_is_refused(make_one: Callable[[], Stranger]) -> None:
    stranger = make_one()
    stranger.meet()
    stranger.sock.sendall(bytes(_SHARE.size))
    answer = stranger.rank.answer()
    assert answer["error"] == "RemoteProtocolError" and "rank 10 shares no memory" in answer["why"], answer


def test_memory_that_is_shorter_than_was_said_is_refused(make_one: Callable[[], Stranger]) -> None:
    stranger = make_one()
    said = stranger.meet()
    short = allocate(64, CPU)
    socket.send_fds(stranger.sock, [said], [short.descriptor])
    answer = stranger.rank.answer()
    assert answer["error"] == "DeviceError" and "has 64 bytes, and should have" in answer["why"], answer
    short.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_who_does_not_say_its_memory_is_named(make_one: Callable[[], Stranger], is_closed: bool) -> None:
    stranger = make_one()
    stranger.meet()
    if is_closed:
        stranger.sock.shutdown(socket.SHUT_WR)
    answer = stranger.rank.answer()
    assert (answer["error"], answer["place"], answer["overdue"]) == ("MeshBroken", 0, not is_closed), answer
    assert answer["took_s"] < 3.0


class Stranger:
    """This process in the place of rank 10: it says its hello, and then whatever a test says."""

    def __init__(self, group: Pair) -> None:
        self.rank = group.ranks[1]
        self.rank.post("open", **group.joining(1, limit_s=1.0))
        self._group = group
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10.0)

    def meet(self) -> bytes:
        """What the rank says of its memory."""
        self.sock.connect(self._group.members[1][2])
        hello = self._group.hello(1, 1, 0)
        self.sock.sendall(self._group.hello(1, 0, 1))
        assert self.sock.recv(len(hello)) == hello
        said, descriptors, _, _ = socket.recv_fds(self.sock, _SHARE.size, 1)
        assert said[:8] == _MAGIC and len(descriptors) == 1
        os.close(descriptors[0])
        return said


@pytest.fixture
def make_one(processes: dict[tuple[str, int], Rank], tmp_path: Path) -> Iterator[Callable[[], Stranger]]:
    strangers = []

    def make() -> Stranger:
        for place in range(2):
            if ("cpu", place) not in processes:
                processes["cpu", place] = start("cpu", place)
        strangers.append(Stranger(Pair([processes["cpu", place] for place in range(2)], tmp_path, "cpu")))
        return strangers[-1]

    yield make
    for stranger in strangers:
        stranger.sock.close()


def test_an_owner_may_be_killed_while_its_peer_steps_or_puts(pair: Pair) -> None:
    survivor, killed = pair.ranks
    pair.open(1)
    pair.step(0, [2, 2])
    pair.open(2, limit_s=1.0)
    for rank in pair.ranks:
        rank.post("step", seed=5, counts=[3, 3], steps=1 << 20)
    time.sleep(0.3)
    killed.signal(signal.SIGKILL)
    answer = survivor.answer()
    # Whatever it was doing when the other died, it ends within the limit and says on whom it waited.
    assert answer.get("expiry") and answer["expiry"][3] == 1, answer
    # Alone, then with the next life of the same place, whose memory is another.
    survivor.call("enter", number=3, places=[])
    alone = survivor.call("step", seed=11, counts=[3, 0], steps=2)
    assert (alone["wrong"], alone["expiry"]) == (0, None), alone
    killed.end()
    pair.ranks[1] = killed = start(pair.device, 1)
    pair.members[1][1] += 1
    killed.call("listen", address=pair.members[1][2])
    pair.open(4)
    pair.step(20, [3, 2], steps=3)
    survivor.call("put", seconds=0.0)  # compiles
    survivor.post("put", seconds=0.6)
    time.sleep(0.3)
    killed.signal(signal.SIGKILL)
    killed.process.wait(10)
    for put in (survivor.answer(), survivor.call("put", seconds=0.1)):
        assert put.get("puts", 0) > 0 and put["expiry"] is None, put
    killed.end()
    survivor.call("enter", number=5, places=[])
    assert survivor.call("step", seed=12, counts=[2, 0])["wrong"] == 0


def test_memory_of_the_host_is_one_for_all_who_map_it() -> None:
    share = allocate(5000, CPU, "words")
    assert not share.memory.any() and share.address == share.memory.data_ptr()
    peer = open_peer(share.descriptor, 5000, CPU)
    assert peer.address != share.address
    share.memory[4999] = 7
    assert ctypes.string_at(peer.address + 4999, 1) == b"\7"
    share.close()
    share.close()
    assert share.descriptor == -1 and ctypes.string_at(peer.address + 4999, 1) == b"\7"
    peer.close()
    peer.close()
    assert peer.address == 0


def test_what_is_no_shared_memory_is_named() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        allocate(0, CPU)
    reading, writing = os.pipe()
    with pytest.raises(DeviceError, match=f"descriptor {reading} has 0 bytes, and should have 4096"):
        open_peer(reading, 4096, CPU)
    os.close(reading)
    os.close(writing)
    with pytest.raises(DeviceError, match=f"4096 bytes of descriptor {reading} can not be mapped"):
        open_peer(reading, 4096, CPU)


def test_the_driver_s_structures_have_its_sizes() -> None:
    # CUmemAllocationProp has a pointer behind 16 bytes and 8 bytes of flags; CUmemAccessDesc has three integers.
    assert (ctypes.sizeof(cuda_memory.Properties), ctypes.sizeof(cuda_memory.Access)) == (32, 12)
    assert (cuda_memory.Properties.win32.offset, cuda_memory.Properties.flags.offset) == (16, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_gpu_is_one_for_all_who_map_it() -> None:
    device = torch.device("cuda", 0)
    share = allocate(5000, device)
    assert share.memory.device == device and not share.memory.any()
    peer = open_peer(share.descriptor, 5000, device)
    assert peer.address not in (0, share.address)
    share.memory[4999] = 7
    torch.cuda.synchronize(device)
    share.close()
    # The owner has let go of it; who has mapped it has it still.
    seen = torch.as_tensor(cuda_memory.Window(peer.address, 5000), device=device)
    assert int(seen[4999]) == 7 and int(seen.sum()) == 7
    torch.cuda.synchronize(device)
    peer.close()
    with pytest.raises(DeviceError, match="cuMemCreate gave CUDA_ERROR_OUT_OF_MEMORY"):
        allocate(1 << 50, device)
    reading, writing = os.pipe()
    with pytest.raises(DeviceError, match="cuMemImportFromShareableHandle gave CUDA_ERROR"):
        open_peer(reading, 4096, device)
    os.close(reading)
    os.close(writing)
