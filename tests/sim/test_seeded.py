"""The seeded scheduler: one seed is one run, everywhere; time is exact; what can not go on says so."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types

import pytest
import trio
import trio._core._run as trio_run

from engine.sim import seeded
from engine.sim.seeded import Deadlock, EventClock, SchedulerChanged, ceil_tick, check_private_names


def nasty(seed: int) -> tuple[str, ...]:
    """Equal deadlines, many waiters, nested nurseries, failures at one instant: everything whose order trio leaves
    open. Returns what happened, in order."""
    told: list[str] = []

    async def main(clock: EventClock) -> None:
        event, lot = trio.Event(), trio.lowlevel.ParkingLot()
        send, receive = trio.open_memory_channel[int](3)

        async def sleeper(name: int) -> None:
            await trio.sleep(0.1)
            told.append(f"slept {name}")
            await event.wait()
            told.append(f"event {name}")
            await lot.park()
            told.append(f"parked {name}")

        async def reader(name: int) -> None:
            async for value in receive.clone():
                told.append(f"{name} got {value}")

        async def failing(name: int) -> None:
            await clock.sleep_until(0.5)
            told.append(f"fails {name}")
            raise ValueError(name)

        async with trio.open_nursery() as nursery:
            for name in range(6):
                nursery.start_soon(sleeper, name)
                nursery.start_soon(reader, name)
            clock.at(0.2, event.set)
            clock.at(0.3, lot.unpark_all)
            async with send:
                for value in range(12):
                    await send.send(value)
            await receive.aclose()
        try:
            async with trio.open_nursery() as nursery:
                for name in range(5):
                    nursery.start_soon(failing, name)
        except* ValueError as group:
            told.append(repr([error.args for error in group.exceptions]))

    seeded.run(main, seed=seed)
    return tuple(told)


def test_one_seed_is_one_run_and_other_seeds_are_others():
    assert nasty(1) == nasty(1)
    assert len({nasty(seed) for seed in range(20)}) == 20


def test_fresh_processes_with_other_hash_seeds_agree():
    code = "from tests.sim.test_seeded import nasty; import zlib; print(zlib.crc32(repr(nasty(7)).encode()))"
    said = set()
    for hash_seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        said.add(done.stdout)
    assert len(said) == 1


def test_sums_that_mean_one_instant_are_one_instant():
    order: list[str] = []

    async def main(clock: EventClock) -> None:
        clock.at(0.3, order.append, "first")
        clock.at(0.1 + 0.2, order.append, "second")
        await trio.sleep_until(0.1 + 0.2)
        assert order == ["first", "second"] and clock.now == ceil_tick(0.3)

    seeded.run(main, seed=0)


def test_deadlines_and_events_pass_in_order_and_take_no_real_time():
    async def main(clock: EventClock) -> list[float]:
        times: list[float] = []
        clock.at(30.0, lambda: times.append(clock.now))
        with trio.move_on_after(20):
            await trio.sleep(math.inf)
        times.append(clock.now)
        await clock.sleep_until(86_400.0)
        times.append(clock.now)
        return times

    assert seeded.run(main, seed=0) == [20.0, 30.0, 86_400.0]


def test_a_cancelled_sleep_is_never_woken():
    async def main(clock: EventClock) -> None:
        with trio.move_on_after(1) as scope:
            await clock.sleep_until(2.0)
        assert scope.cancelled_caught
        await trio.sleep(5)

    seeded.run(main, seed=0)


def test_a_run_in_which_nothing_can_happen_names_the_waiting_tasks():
    async def stuck_here() -> None:
        await trio.Event().wait()

    async def main(clock: EventClock) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stuck_here)
            await trio.sleep(3)
            await trio.Event().wait()

    with pytest.raises(Deadlock, match=r"at 3\.0.*\n(.*\n)*.*stuck_here"):
        seeded.run(main, seed=0)


def test_an_error_in_an_event_is_raised_by_the_run():
    async def main(clock: EventClock) -> None:
        clock.at(1.0, lambda: 1 // 0)
        await trio.sleep(5)

    with pytest.raises(ZeroDivisionError):
        seeded.run(main, seed=0)


@pytest.mark.parametrize("owner", ["module", "Runner", "Deadlines"])
def test_every_private_name_is_missed(owner: str):
    for name in seeded.PRIVATE_NAMES[owner]:
        if owner == "module":
            spoiled = types.SimpleNamespace(**{key: value for key, value in vars(trio_run).items() if key != name})
            wanted = name
        else:
            kind = getattr(trio_run, owner)
            fields = tuple(field for field in kind.__attrs_attrs__ if field.name != name)
            attributes = {key: None for key in vars(kind) if key not in (name, "__attrs_attrs__")}
            stand_in = types.SimpleNamespace(**attributes, __attrs_attrs__=fields)
            spoiled = types.SimpleNamespace(**{**vars(trio_run), owner: stand_in})
            wanted = f"{owner}.{name}"
        with pytest.raises(SchedulerChanged, match=f"trio 9.9.*{wanted}"):
            check_private_names(spoiled, "9.9")
    check_private_names(trio_run, trio.__version__)


def test_the_switches_are_as_before_after_a_run():
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r

    async def main(clock: EventClock) -> None:
        assert trio_run._ALLOW_DETERMINISTIC_SCHEDULING
        raise KeyError

    with pytest.raises(KeyError):
        seeded.run(main, seed=0)
    assert (trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r) == before
