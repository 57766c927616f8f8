"""Pushes of a whole simulated cluster by pair, as the production head tells them; and a prefill rank that is killed."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import trio

from engine.sim.play import play
from engine.sim.scenario import SMALL_LIMITS, Scenario
from engine.sim.workload import Load
from engine.sim.world import World, WorldShape

SCENARIO = Scenario(
    "links", 7, WorldShape(prefill=2, decode=2, limits=SMALL_LIMITS), Load(requests=100, clients=4, arrive_s=8.0)
)
KILL_S, LOOK_S = 4.0, 0.05

Look = tuple[float, dict[tuple[int, int, int], tuple[int, ...]], dict[int, Any]]
"""When; (prefill rank, its generation, decode rank) to the other columns; rank to its newest snapshot."""


def read(report: Any, blob: bytes) -> dict[tuple[int, int, int], tuple[int, ...]]:
    columns, at = [], 0
    for kind in "iiiqqiii":
        columns.append(struct.unpack_from(f"<{report.count}{kind}", blob, at))
        at += report.count * struct.calcsize(kind)
    rows = list(zip(*columns, strict=True))
    assert at == len(blob) and rows == sorted(rows)
    return {row[:3]: row[3:] for row in rows}


def watch(world: World, looks: list[Look], *, kills: int | None) -> None:
    """Has somebody look at the head's answers all the time, and kill a rank once."""
    serve = world._serve_operators

    async def look(listener: object, answers: Any, acts: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener, answers, acts)
            killed = acts is None
            while True:
                await trio.sleep(LOOK_S)
                snapshots = {status.rank: status.snapshot for status in answers.status().ranks}
                if acts is not None:
                    looks.append((trio.current_time(), read(*answers.links()), snapshots))
                if kills is not None and not killed and trio.current_time() >= KILL_S:
                    killed = True
                    world.processes[kills].kill()

    world._serve_operators = look  # type: ignore[method-assign,assignment]


def count_pushes(rows: dict[tuple[int, int, int], tuple[int, ...]]) -> int:
    """Of rank 0."""
    return sum(row[1] for key, row in rows.items() if key[0] == 0)


def run(kills: int | None) -> list[Look]:
    looks: list[Look] = []
    outcome = play(SCENARIO, hook=lambda world: watch(world, looks, kills=kills))
    assert outcome.is_good, outcome.violation or outcome.crash
    assert outcome.answers.outcomes == {"finished": 100}
    return looks


def test_the_pairs_of_a_calm_cluster_add_up_to_its_snapshots() -> None:
    looks = run(None)
    full = [look for look in looks if len(look[1]) == 4]
    _, rows, snapshots = full[-1]
    assert set(rows) == {(prefill, 1, decode) for prefill in (0, 1) for decode in (2, 3)}
    for prefill in (0, 1):
        mine = [row for key, row in rows.items() if key[0] == prefill]
        assert sum(row[0] for row in mine) == snapshots[prefill].pushed_bytes > 0
        assert sum(row[1] for row in mine) == snapshots[prefill].pushes > 0
        assert all(row[2] == row[3] == 0 and (row[4] > 0) == (row[1] > 0) for row in mine)
    for (_, before, _), (_, after, _) in itertools.pairwise(full):
        assert all(after[key][0] >= row[0] and after[key][1] >= row[1] for key, row in before.items() if key in after)


def test_the_rows_of_a_killed_prefill_rank_vanish_and_its_next_life_begins_anew() -> None:
    looks = run(0)
    at_kill = next(rows for now, rows, _ in reversed(looks) if now <= KILL_S)
    assert {key[:2] for key in at_kill} == {(0, 1), (1, 1)} and count_pushes(at_kill) > 0
    gone = [rows for now, rows, _ in looks if now > KILL_S and not any(key[0] == 0 for key in rows)]
    assert gone and {key[:2] for key in gone[0]} == {(1, 1)}
    later = [rows for now, rows, _ in looks if any(key[:2] == (0, 2) for key in rows)]
    assert later and not any(key[:2] == (0, 1) for rows in later for key in rows)
    assert count_pushes(later[0]) < count_pushes(at_kill) and count_pushes(later[-1]) > 0
