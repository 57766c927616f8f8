"""The planner's process: one PlanRequest on stdin, its PlannedMoves on stdout; and the call that runs it.

`python -m engine.planner SECONDS`, started by the head for each plan. A process of its own, because planning takes a
core for longer than a head may keep its clients waiting, and because whatever goes wrong in it ends with it.

Both are one MessagePack map. Arrays are their bytes, little-endian: loads float64, tables and moves int32.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import trio

from engine.core.balance import Bill, Plan, Prices
from engine.core.load import Skew
from engine.core.moves import Copy, Stage
from engine.core.placement import Placement
from engine.core.planning import PlannedMoves, PlanRequest, plan_moves
from engine.core.topology import Topology
from engine.errors import EngineError

ANSWER_LIMIT = 256 << 20
"""Bytes of an answer: 60 layers of 384 experts on 32 ranks, moved in 64 stages, take 10 MB."""


class PlannerFailed(EngineError):
    """No plan came: the planner took too long, died, or was asked for what can not be."""


def call_planner(within_s: float, command: Sequence[str] = ()) -> Callable[[PlanRequest], Awaitable[PlannedMoves]]:
    """What a head plans with.

    Args:
        within_s: for one plan; then its process is killed.
        command: of the process; this module's if empty.
    """
    words = [*command] or [sys.executable, "-m", "engine.planner", str(math.ceil(within_s) + 1)]

    async def plan(request: PlanRequest) -> PlannedMoves:
        """Raises PlannerFailed."""
        with trio.move_on_after(within_s):
            try:
                done = await trio.run_process(
                    words, stdin=encode_request(request), capture_stdout=True, capture_stderr=True, check=False,
                    env=_environment(), start_new_session=True, deliver_cancel=_kill,
                )  # fmt: skip
            except OSError as error:
                raise PlannerFailed(f"the planner could not be started: {error}") from error
            return _take(done, request)
        raise PlannerFailed(f"the planner did not answer within limits.balance_s ({within_s:g} s)")

    return plan


async def _kill(process: trio.Process) -> None:
    process.kill()


def _environment() -> dict[str, str]:
    """One thread: the cores belong to the ranks. And this package is found wherever the head found it."""
    paths = [entry for entry in sys.path if entry]
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _take(done: subprocess.CompletedProcess[bytes], request: PlanRequest) -> PlannedMoves:
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise PlannerFailed(f"the planner ended with status {done.returncode}: {lines[-1][:1000]}")
    try:
        return decode_moves(done.stdout, request.current)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise PlannerFailed(f"the planner's answer of {len(done.stdout)} bytes is none: {error}") from error


# ---------------------------------------------------------------- bytes


def encode_request(request: PlanRequest) -> bytes:
    prices = {**dataclasses.asdict(request.prices)}
    return msgspec.msgpack.encode(
        {
            "layers": request.current.layers,
            "experts": request.current.experts,
            "ranks": request.current.ranks,
            "current": _table_bytes(request.current),
            "target": None if request.target is None else _table_bytes(request.target),
            "loads": request.loads.astype("<f8").tobytes(),
            "topology": dataclasses.asdict(request.topology),
            "prices": prices,
            "why": request.why,
        }
    )


def decode_request(data: bytes) -> PlanRequest:
    """Raises msgspec.DecodeError, ValueError, KeyError or TypeError for anything else than a request."""
    plain: dict[str, Any] = msgspec.msgpack.decode(data)
    layers, experts, ranks = plain["layers"], plain["experts"], plain["ranks"]
    topology = dict(plain["topology"])
    topology["hosts"] = tuple(topology["hosts"])
    return PlanRequest(
        current=_read_table(plain["current"], layers, experts, ranks),
        loads=np.frombuffer(plain["loads"], "<f8").reshape(layers, experts).astype(np.float64),
        topology=Topology(**topology),
        prices=Prices(**plain["prices"]),
        target=None if plain["target"] is None else _read_table(plain["target"], layers, experts, ranks),
        why=plain["why"],
    )


def encode_moves(moves: PlannedMoves) -> bytes:
    plan = moves.plan
    return msgspec.msgpack.encode(
        {
            "target": _table_bytes(plan.target),
            "bill": dataclasses.asdict(plan.bill),
            "pays": plan.pays,
            "reason": plan.reason,
            "stages": [
                {
                    "after": _table_bytes(stage.after),
                    "copies": np.array([_flatten(copy) for copy in stage.copies], "<i4").tobytes(),
                    "released": np.array(stage.released, "<i4").tobytes(),
                }
                for stage in moves.stages
            ],
        }
    )


def decode_moves(data: bytes, current: Placement) -> PlannedMoves:
    """`current`: of the request. Raises as `decode_request`."""
    if len(data) > ANSWER_LIMIT:
        raise ValueError(f"the limit is {ANSWER_LIMIT} bytes")
    plain: dict[str, Any] = msgspec.msgpack.decode(data)
    shape = (current.layers, current.experts, current.ranks)
    bill = dict(plain["bill"])
    for name in ("before", "after"):
        bill[name] = Skew(**bill[name])
    if not all(math.isfinite(value) for value in bill.values() if isinstance(value, float)):
        raise ValueError("a figure of its bill is not finite")
    stages: list[Stage] = []
    for entry in plain["stages"]:
        before = stages[-1].after if stages else current
        copies = np.frombuffer(entry["copies"], "<i4").reshape(-1, 7).tolist()
        released = np.frombuffer(entry["released"], "<i4").reshape(-1, 2).tolist()
        stages.append(
            Stage(
                before=before,
                copies=tuple(Copy(c[0], c[1], (c[2], c[3]), (c[4], c[5]), bool(c[6])) for c in copies),
                after=_read_table(entry["after"], *shape),
                released=tuple((place, slot) for place, slot in released),
            )
        )
    plan = Plan(_read_table(plain["target"], *shape), Bill(**bill), plain["pays"], plain["reason"])
    return PlannedMoves(plan, tuple(stages))


def _flatten(copy: Copy) -> tuple[int, ...]:
    return (copy.layer, copy.expert, *copy.source, *copy.target, int(copy.far))


def _table_bytes(placement: Placement) -> bytes:
    return placement.table.astype("<i4").tobytes()


def _read_table(data: bytes, layers: int, experts: int, ranks: int) -> Placement:
    return Placement(layers, experts, np.frombuffer(data, "<i4").reshape(ranks, -1).astype(np.int32))


# ---------------------------------------------------------------- the process


def main(arguments: Sequence[str]) -> int:
    """Reads, plans, writes. Returns 2 for a request that can not be answered, with the reason on stderr.

    Args:
        arguments: seconds after which the process ends, should the head that would kill it be gone.
    """
    signal.alarm(int(arguments[0]) if arguments else 0)
    os.nice(10)  # cores are for ranks first
    try:
        answer = encode_moves(plan_moves(decode_request(sys.stdin.buffer.read())))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
