"""NIXL here: what the doctor says, and that an idle fabric leaves the core alone."""

from __future__ import annotations

import threading
import time

import msgspec
import numpy as np
import pytest
import trio

from transport import nixl_load
from transport.errors import FabricError
from transport.fabric import BlockRun
from transport.nixl_door import Door
from transport.nixl_fabric import PREPARED_LIMIT, is_available, nixl_status, open_nixl_fabric
from transport.nixl_naps import NAP_S, SHARE, choose_nap
from transport.nixl_owner import AgentThread

needs_nixl = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")


@needs_nixl
def test_status_names_version_plugins_and_transports() -> None:
    status = nixl_status()
    assert status["available"] is True
    assert status["module"].startswith("nixl")
    assert status["version"].count(".") == 2
    assert status["plugins"]["UCX"] == "usable"
    assert "tcp/lo" in status["transports"]
    assert status["errors"] == []


def test_status_of_a_machine_without_nixl_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_load, "MODULES", ("nixl_cu99",))
    assert not is_available()
    with pytest.raises(ImportError, match="nixl_cu99: No module named"):
        nixl_load.load_nixl()


def test_status_survives_a_probe_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_load.sys, "executable", "/bin/false")
    status = nixl_status()
    assert status["available"] is False
    assert "probe ended with code 1" in status["errors"][0]
    monkeypatch.setattr(nixl_load.sys, "executable", "/nowhere/python")
    assert "No such file" in nixl_status()["errors"][0]


async def test_opening_without_nixl_is_a_fabric_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_load, "MODULES", ("nixl_cu99",))
    with pytest.raises(FabricError, match="NIXL can not be imported"):
        async with open_nixl_fabric("x"):
            pass


@needs_nixl
async def test_a_backend_that_does_not_start_is_named() -> None:
    with pytest.raises(FabricError, match=r"start the agent: nixl\w+Error"):
        async with open_nixl_fabric("x", devices="nosuch0", tls="tcp"):
            pass


async def test_an_agent_that_fails_before_anyone_asks_is_named_all_the_same() -> None:
    def fail() -> object:
        raise OSError("no such device")

    thread = AgentThread("x", fail, (OSError,), receives=False)
    begin = thread._thread.start

    def begin_and_let_it_end() -> None:
        begin()
        thread._thread.join(5)

    thread._thread.start = begin_and_let_it_end  # type: ignore[method-assign]
    try:
        with pytest.raises(FabricError, match=r"x: start the agent: .*no such device"):
            await thread.start()
    finally:
        await thread.stop()


@pytest.mark.parametrize("end", [20e-6, 130e-6, 0.5e-3, 1.35e-3, 2.5e-3])
def test_the_end_of_a_transfer_is_seen_soon_and_looked_for_seldom(end: float) -> None:
    look = 10e-6
    at, looks = look, 1
    while at < end:
        at += choose_nap(at) + look
        looks += 1
    assert at - end <= min(end / SHARE, NAP_S) + look
    # A poll takes some microseconds of the interpreter.
    assert looks * 5e-6 <= end / 2 + look


def test_who_hangs_is_looked_at_ever_less_often() -> None:
    naps = [choose_nap(quiet) for quiet in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)]
    assert naps == sorted(naps) and naps[0] == 0 and naps[2] == NAP_S
    assert naps[-2] >= 2e-3, "after that it rests, see REST_MS"


@needs_nixl
async def test_an_idle_fabric_that_only_pushes_takes_no_cpu() -> None:
    async with open_nixl_fabric("x", receives=False) as fabric:
        memory = np.zeros(4096, np.uint8)
        await fabric.register([BlockRun(memory.ctypes.data, 64, 64)])
        target = await fabric.connect(fabric.describe())
        await fabric.wait(fabric.push(target, [1], [2]))
        await trio.sleep(0.02)  # its nap after work
        before = time.process_time()
        await trio.sleep(0.3)
        assert time.process_time() - before < 0.015


@needs_nixl
async def test_a_fabric_that_receives_is_idle_until_a_peer_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP the target has to be polled. With the bell that is at once, without it when its rest is over."""
    async with open_nixl_fabric("a", tls="tcp") as a, open_nixl_fabric("b", tls="tcp") as b:
        memory = np.zeros(8192, np.uint8)
        for fabric, first in ((a, 0), (b, 4096)):
            await fabric.register([BlockRun(memory.ctypes.data + first, 64, 64)])
        target = await a.connect(b.describe())
        memory[:4096] = 7
        with trio.fail_after(20):
            await a.wait(a.push(target, [1], [2]))
            before = time.process_time()
            await trio.sleep(0.3)
            assert time.process_time() - before < 0.03
            monkeypatch.setattr(Door, "ring", lambda door, name: None)
            await a.wait(a.push(target, [1], [3]))
        assert (memory[4096:].reshape(64, 64)[[2, 3]] == 7).all()
        assert not memory[4096:].reshape(64, 64)[[0, 1, *range(4, 64)]].any()


@needs_nixl
async def test_a_prepared_push_is_the_one_that_begins_and_few_are_kept() -> None:
    async with open_nixl_fabric("x", receives=False) as fabric:
        memory = np.zeros(8192, np.uint8)
        await fabric.register([BlockRun(memory.ctypes.data, 64, 128)])
        target = await fabric.connect(fabric.describe())
        for block in range(PREPARED_LIMIT + 3):
            fabric.prepare_push(target, [block], [64 + block])
        kept = list(fabric._prepared.values())
        assert [transfer._ours.tolist() for transfer in kept] == [[block] for block in range(3, PREPARED_LIMIT + 3)]
        assert fabric.push(target, [3], [67]) is kept[0]
        memory[0:64] = 5
        await fabric.wait(fabric.push(target, [0], [64]))
        assert (memory[64 * 64 : 65 * 64] == 5).all() and not memory[65 * 64 :].any()
        assert set(fabric._thread._prepared) == set(kept[1:]) and all(each._handle for each in kept[1:])
        await fabric.forget(target)
        assert not fabric._prepared and not fabric._thread._prepared and not any(each._handle for each in kept)
        target = await fabric.connect(fabric.describe())
        fabric.prepare_push(target, [1], [2])
        (last,) = fabric._prepared.values()
    assert last._handle is None, "the thread has released it before it ended"


class _Work:
    """A transfer that is over as soon as it has started."""

    door = "nobody"

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.done = trio.Event()

    def prepare(self, agent: object) -> None:
        self.seen.append("prepare")

    def start(self, agent: object) -> bool:
        self.seen.append("start")
        return True

    def poll(self, agent: object) -> bool:
        raise AssertionError("it is over")

    def release(self) -> None:
        self.seen.append("release")

    def drop(self, why: str) -> None:
        self.release()

    def settle(self) -> None:
        self.seen.append("settle")
        self.done.set()


async def test_what_the_library_holds_of_a_transfer_is_given_up_once_whether_it_began_or_not() -> None:
    thread = AgentThread("test-release", object, (), receives=False)
    await thread.start()
    try:
        work, waited, dropped = _Work(), _Work(), _Work()
        thread.begin(work)
        await work.done.wait()
        await trio.sleep(0.02)
        assert sorted(work.seen) == ["release", "settle", "start"]
        thread.begin(waited)
        await thread.call(lambda agent: None, "anything")
        assert "release" in waited.seen, "calls may take away what it needs"
        thread.prepare(dropped)
        thread.discard(dropped)
        await thread.call(lambda agent: None, "anything")
        assert dropped.seen == ["prepare", "release"]
        thread.prepare(kept := _Work())
    finally:
        await thread.stop()
    assert kept.seen in (["prepare", "release"], []), "released, or never prepared"


async def test_a_ring_is_heard_once_and_never_fails() -> None:
    ours, theirs = Door("test-door-ours"), Door("test-door-theirs")
    try:
        assert not theirs.answer()
        for _ in range(5000):  # far more than a socket holds
            ours.ring("test-door-theirs")
        ours.ring("test-door-nobody")
        while theirs.answer():
            pass
        assert not theirs.answer()
        with pytest.raises(OSError):
            Door("test-door-ours")
    finally:
        ours.close()
        theirs.close()
    Door("test-door-ours").close()


@needs_nixl
async def test_the_thread_is_gone_after_the_block_and_starts_with_the_hook() -> None:
    started = []
    async with open_nixl_fabric("hooked", on_thread_start=lambda: started.append(threading.current_thread().name)):
        assert len(started) == 1 and started[0].startswith("nixl-hooked-")
        assert started[0] in [thread.name for thread in threading.enumerate()]
    assert started[0] not in [thread.name for thread in threading.enumerate()]


@needs_nixl
async def test_memory_that_is_not_registered_is_refused() -> None:
    async with open_nixl_fabric("a") as a, open_nixl_fabric("b") as b:
        memory = np.zeros(8192, np.uint8)
        for fabric in (a, b):
            await fabric.register([BlockRun(memory.ctypes.data, 64, 64)])
        lie = msgspec.msgpack.decode(b.describe())
        lie[-1] = [[memory.ctypes.data, 64, 128]]
        with pytest.raises(FabricError, match="nixlNotFoundError"):
            await a.connect(msgspec.msgpack.encode(lie))
        await a.connect(b.describe())


@needs_nixl
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_in_the_owner_thread_fails_everybody_and_hangs_nobody() -> None:
    async with open_nixl_fabric("x") as fabric:
        memory = np.zeros(4096, np.uint8)
        await fabric.register([BlockRun(memory.ctypes.data, 64, 64)])
        target = await fabric.connect(fabric.describe())
        with trio.fail_after(5):
            failed = []

            async def bug() -> None:
                with pytest.raises(FabricError, match="the owner thread failed"):
                    await fabric._thread.call(lambda agent: {}["bug"], "bug")
                failed.append("bug")

            async def wait() -> None:
                await trio.lowlevel.checkpoint()
                try:
                    await fabric.wait(fabric.push(target, [1], [2]))
                except FabricError:
                    failed.append("push")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(bug)
                nursery.start_soon(wait)
            assert "bug" in failed
            with pytest.raises(FabricError, match="the owner thread failed"):
                fabric.push(target, [1], [2])
