"""A real head in a process of its own with 72 ranks that are tasks of one other process: they only report. So what the
head costs can be told from what ranks cost.

`python -m tests.console.stubcluster DIRECTORY [--loads]` serves operators there until SIGTERM; `--loads`: the decode
ranks also report loads of experts once a second.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import cast

import numpy as np
import trio

from engine.actors.head import HeadPorts, run_head
from engine.actors.processes import RankProcess
from engine.config import ClusterConfig, Limits, PoolConfig
from engine.core.events import EventRing
from engine.core.planning import PlannedMoves, PlanRequest
from engine.errors import EngineError
from engine.faces.desk import run_operators
from engine.log import configure_log, keep_events
from engine.runtime import RuntimeDirectory
from tests.console.bigscene import DECODE, EXPERTS, LAYERS, PREFILL, SPARE
from tests.console.stubhead import make_snapshot
from transport.messages import (
    PROTOCOL_VERSION,
    RANK_FROM_HEAD,
    ExpertLoads,
    GroupJoined,
    GroupPrepared,
    JoinGroup,
    NameGroup,
    PairCounts,
    PartInfo,
    RankHello,
    RankReady,
    Role,
)
from transport.stream import FrameStream, run_link
from transport.unix import open_unix_listener
from transport.wire import Frame

GENERATION = 1
STEPS_S = 110


class StubRank:
    """One rank: introduces itself, joins its group, and reports."""

    def __init__(self, rank: int, head: FrameStream, config: ClusterConfig, *, has_loads: bool) -> None:
        self.rank, self.head, self.has_loads = rank, head, has_loads
        self.digest, self.snapshot_s = config.digest, config.limits.snapshot_s
        self.role: Role = "prefill" if rank < PREFILL else "decode"
        self.chance = np.random.default_rng(rank)
        self.popularity = self.chance.lognormal(0, 0.5, (LAYERS, EXPERTS))
        self.has_joined = trio.Event()

    async def run(self) -> None:
        head, rank, is_decode = self.head, self.rank, self.role == "decode"
        head.post(RankHello(PROTOCOL_VERSION, rank, GENERATION, self.role, os.getpid(), self.digest))
        parts = (PartInfo("main", LAYERS, EXPERTS, LAYERS * (EXPERTS // DECODE + SPARE), 14 << 20),)
        head.post(
            RankReady(
                rank, GENERATION, f"stub {rank}" if is_decode else "", 1000, 64, 49_152, 40, 213_504, "stub", "stub",
                f"mesh {rank}" if is_decode else "", parts if is_decode else (),
            ),
            b"fabric" if is_decode else b"",
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report)
            if is_decode and self.has_loads:
                nursery.start_soon(self._count)
            await run_link(head, self._hear)

    def _hear(self, frames: list[Frame]) -> None:
        for frame in frames:
            match frame.message:
                case NameGroup(membership=number):
                    self.head.post(GroupPrepared(self.rank, GENERATION, number))
                case JoinGroup(membership=number):
                    self.head.post(GroupJoined(self.rank, GENERATION, number))
                    self.has_joined.set()

    async def _report(self) -> None:
        n = 0
        await trio.sleep(self.snapshot_s * self.rank / (PREFILL + DECODE))  # as real ones, not all at once
        while True:
            n += 1
            steps = int(n * STEPS_S * self.snapshot_s)
            self.head.post(
                make_snapshot(
                    self.rank, generation=GENERATION, step=steps, running=80 + int(self.chance.integers(20)),
                    step_us_sum=steps * 8900, device_us_sum=steps * 8600, generated_tokens=steps * 90,
                )
            )  # fmt: skip
            if self.role == "prefill":
                self.head.post(PairCounts(self.rank, GENERATION, DECODE), self._pairs(n))
            await trio.sleep(self.snapshot_s)

    def _pairs(self, n: int) -> bytes:
        columns = (
            np.arange(PREFILL, PREFILL + DECODE, dtype="<i4"), np.full(DECODE, n * 750_000_000, "<i8"),
            np.full(DECODE, n * 75, "<i8"), self.chance.integers(0, 9, DECODE).astype("<i4"),
            np.zeros(DECODE, "<i4"), self.chance.integers(7000, 9000, DECODE).astype("<i4"),
        )  # fmt: skip
        return b"".join(column.tobytes() for column in columns)

    async def _count(self) -> None:
        await self.has_joined.wait()
        await trio.sleep(self.rank / (PREFILL + DECODE))
        while True:
            counts = self.chance.poisson(self.popularity * STEPS_S * 3).astype("<i4")
            pairs = int(counts.sum())
            self.head.post(ExpertLoads("main", STEPS_S, pairs, pairs * 2, LAYERS, EXPERTS), counts.tobytes())
            await trio.sleep(1.0)


async def run_stubs(ends: list[socket.socket], config: ClusterConfig, *, has_loads: bool) -> None:
    async def serve(rank: int, end: socket.socket) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(end))
        head = FrameStream(stream, accepts=RANK_FROM_HEAD, out_limit_bytes=1 << 24, stall_s=10, name="head")
        async with head:
            try:
                await StubRank(rank, head, config, has_loads=has_loads).run()
            except* EngineError:
                pass  # the head has ended

    async with trio.open_nursery() as nursery:
        for rank, end in enumerate(ends):
            nursery.start_soon(serve, rank, end)


class StubProcess:
    """What the supervisor sees of a stub; all of them have one pid."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.control = trio.SocketStream(trio.socket.from_stdlib_socket(end))
        self._gone = trio.Event()

    async def run_output(self) -> None:
        await self._gone.wait()

    async def wait(self) -> int:
        await self._gone.wait()
        return -signal.SIGKILL

    def kill(self) -> None:
        self._gone.set()

    def last_lines(self) -> tuple[str, ...]:
        return ()


async def serve_head(config: ClusterConfig, pid: int, ends: list[socket.socket]) -> None:
    directory = RuntimeDirectory(config.admin_dir)
    directory.prepare()
    events = EventRing()
    keep_events(events)

    def spawn(rank: int, generation: int) -> RankProcess:
        if generation != GENERATION:
            raise OSError("a stub has one life")
        return cast(RankProcess, StubProcess(pid, ends[rank]))

    async def plan(request: PlanRequest) -> PlannedMoves:
        raise EngineError("nothing is planned here")

    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        ports = HeadPorts(
            requests=await open_unix_listener(directory.requests_socket),
            read=await open_unix_listener(directory.read_socket, 0o660),
            admin=await open_unix_listener(directory.admin_socket),
            serve_operators=run_operators, spawn=spawn, plan=plan, signals=signals, parent_gone=None, pid=os.getpid(),
            events=events,
        )  # fmt: skip
        print("serves", flush=True)
        await run_head(ports, config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--loads", action="store_true")
    given = parser.parse_args()
    ranks = PREFILL + DECODE
    config = ClusterConfig(
        cluster="c00000", model="stub", prefill=PoolConfig(tuple(range(PREFILL))),
        decode=PoolConfig(tuple(range(PREFILL, ranks)), DECODE), device="cpu", fabric="tcp", page_tokens=64,
        max_model_tokens=131_072, num_pages=1000, num_slabs=40, kv_dtype="float32", threads=1, replay_rows=0,
        admin_dir=given.directory, log_format="json", log_level="error", vocab_size=8192, limits=Limits(stop_s=0.5),
    )  # fmt: skip
    pairs = [socket.socketpair() for _ in range(ranks)]
    pid = os.fork()
    if not pid:
        for ours, _ in pairs:
            ours.close()
        trio.run(lambda: run_stubs([end for _, end in pairs], config, has_loads=given.loads))
        os._exit(0)
    for _, theirs in pairs:
        theirs.close()
    configure_log(config.log_format, config.log_level, "head")
    try:
        trio.run(serve_head, config, pid, [end for end, _ in pairs])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
