"""World: a whole cluster in one trio loop on virtual time. The production head (router, supervisor, clients' sockets)
and production ranks, over simulated wires, devices and processes.

What is simulated stands behind ports that the production code has anyway: `HeadPorts`, `RankProcess`, `RankPorts`,
`Device`, `Fabric`, streams. A process's death here is what it is there: its streams end after what was written to them,
its memory is written no more, it writes no more, and `wait` returns.
"""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import trio

from engine.actors.accept import accept_streams
from engine.actors.answers import Acts, Answers
from engine.actors.head import HeadPorts, run_head
from engine.actors.rank import run_rank
from engine.config import ClusterConfig, DraftConfig, ExpertsConfig, HandBackConfig, Limits, PoolConfig
from engine.core.events import EventRing
from engine.core.planning import PlannedMoves, PlanRequest, plan_moves
from engine.errors import ConfigError, EngineError, LocalProtocolError, RemoteProtocolError
from engine.ports import Audited, Device, HostProcess, RankIdentity, RankPorts
from engine.sim.checks import Auditor, Life
from engine.sim.clock import Clock
from engine.sim.costs import FlatCosts
from engine.sim.device import Costs, SimDevice, StepGroup, make_pool
from engine.sim.gating import ExpertShape, draw_placement
from engine.sim.groups import Groups
from engine.sim.handoffs import Handoff, KeepingFabric
from engine.sim.pool import Pool
from engine.sim.trace import StreamSum, Trace
from engine.sim.violation import Violation
from engine.sim.wires import CableEnd, CableListener, Post, WireSpeed, make_cable
from transport.fabric import Fabric
from transport.memory_fabric import MemoryFabric, MemoryWorld
from transport.messages import (
    DECODE_FROM_PREFILL,
    PREFILL_FROM_DECODE,
    ExpertsReport,
    PeerHello,
    PeerWelcome,
    Rebalance,
    RebalanceAnswer,
    Refused,
    Shutdown,
    StatusReport,
)
from transport.wire import FrameReader

PLAN_S = 0.2
"""A planner's process, from its start to its answer."""
HAND_BACK_WAIT_S = 0.5
"""Less than a stop or a held link takes, so that offers are withdrawn and grants for them come late."""
WATCH_S = 0.25
"""Between two looks at bounds and heartbeats."""
CHECKSUM_BYTES_PER_S = 4e9
"""What CRC-32 does on one core."""
SILENT_PERIODS = 3
"""Snapshots that may be late before a rank counts as silent; the head link's own writer has to run in between."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorldShape:
    """What the cluster is made of.

    Attributes:
        prefill_group, decode_group: so many ranks step together, as those of an expert exchange do. With `experts` they
            are groups as the head knows them; without, only their devices' times are tied.
        experts: of the groups.
        prefill_costs, decode_costs: virtual seconds of a step.
        link_latency_s, link_bytes_per_s: of control streams.
        link_tick_s: what arrives on them is heard of at multiples of it, as where a network card gathers its
            interrupts or a busy process looks at all its sockets in turn; 0 is at once.
        fabric_latency_s, fabric_bytes_per_s: of pushes; bytes are those of real pages, see `page_bytes`.
        page_bytes: what a page would be on a real device; on the wire a simulated page counts as so many.
        handoff: how KV gets to the decode rank, see `handoffs`.
        checksums: pushes tell theirs, and decode ranks read them back.
        start_s: from spawn to a loaded device, at most, told in `start_files` pieces.
        exit_s: from a kill to the end of the process, at most.
        hand_back: finished turns go back to their prefill ranks, short ones too, within half of a rank's memory.
        drafts: drafts behind a decode row; draft_share: of places at which one holds; draft_rows: with more rows in a
            step a rank does not draft.
        is_thorough: all memory is looked at in every step; for small worlds.
    """

    prefill: int = 1
    decode: int = 1
    page_tokens: int = 8
    num_pages: int = 64
    num_slabs: int = 8
    vocab_size: int = 1000
    max_model_tokens: int = 4096
    eos_share: float = 0.0
    limits: Limits = dataclasses.field(default_factory=lambda: Limits(prefill_chunk_tokens=32, decode_rows=4))
    prefill_group: int = 1
    decode_group: int = 1
    prefill_costs: Costs = dataclasses.field(default_factory=FlatCosts)
    decode_costs: Costs = dataclasses.field(default_factory=FlatCosts)
    link_latency_s: float = 50e-6
    link_bytes_per_s: float = 1e9
    link_tick_s: float = 0.0
    fabric_latency_s: float = 20e-6
    fabric_bytes_per_s: float = 50e9
    page_bytes: int = 65_536
    handoff: Handoff = "chunks"
    checksums: bool = False
    start_s: float = 0.2
    start_files: int = 1
    exit_s: float = 0.01
    is_thorough: bool = True
    hand_back: bool = False
    drafts: int = 0
    draft_share: float = 0.7
    draft_rows: int = 32
    experts: ExpertShape | None = None

    def cluster_config(self) -> ClusterConfig:
        """As the head is given it."""
        has_experts = self.experts is not None
        experts = ExpertsConfig() if self.experts is None else self.experts.config()
        return ClusterConfig(
            cluster="simulated",
            model="sim",
            prefill=PoolConfig(tuple(range(self.prefill)), self.prefill_group if has_experts else 1),
            decode=PoolConfig(
                tuple(range(self.prefill, self.prefill + self.decode)), self.decode_group if has_experts else 1
            ),
            device="cpu",
            fabric="auto",
            page_tokens=self.page_tokens,
            max_model_tokens=self.max_model_tokens,
            num_pages=self.num_pages,
            num_slabs=self.num_slabs,
            kv_dtype="bfloat16",
            threads=1,
            replay_rows=0,
            admin_dir="",
            log_format="text",
            log_level="error",
            vocab_size=self.vocab_size,
            limits=self.limits,
            checksum_pushes=self.checksums,
            experts_main=experts,
            experts_draft=experts,
            draft=DraftConfig(self.drafts, self.draft_rows),
            hand_back=HandBackConfig(self.hand_back, tokens=2, share=0.5, wait_s=HAND_BACK_WAIT_S),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Outside:
    """What a world shares with real processes: `engine up --device sim`. A world of a test has none.

    Attributes:
        ports: real sockets, operators, signals and planner; `spawn` is not used.
        config: the cluster's, made from the same shape.
        ready_within_s: time for all ranks to become ready.
    """

    ports: HeadPorts
    config: ClusterConfig
    ready_within_s: float


class SimProcess:
    """A rank's process: `actors.processes.RankProcess`. Alive until it ends or is killed."""

    def __init__(self, world: World, life: Life) -> None:
        self.life = life
        # To people outside no pid may be one that is not there, or somebody else's.
        self.pid = 1000 * (life.rank + 1) + life.generation if world.outside is None else world.outside.ports.pid
        self.scope = trio.CancelScope()
        self.speeds = {"in": world.new_speed(), "out": world.new_speed()}
        """Of its link to the head."""
        self.control, self.far = world.cable("head", life.name, (self.speeds["in"], self.speeds["out"]))
        self.ends: list[CableEnd] = [self.far]
        self.listener: CableListener | None = None
        self.fabric: MemoryFabric | None = None
        self.device: SimDevice | None = None
        self.side: Any = None
        self.stopped_until = 0.0
        self.num_turns = 0
        self._status: int | None = None
        self._dead = trio.Event()
        self._why: tuple[str, ...] = ()
        self._world = world

    async def run_output(self) -> None:
        await self._dead.wait()

    async def wait(self) -> int:
        await self._dead.wait()
        assert self._status is not None
        return self._status

    def last_lines(self) -> tuple[str, ...]:
        return self._why

    @property
    def is_alive(self) -> bool:
        return self._status is None

    @property
    def address(self) -> str:
        return f"at {self.life.name}" if self.life.role == "decode" else ""

    def kill(self) -> None:
        """SIGKILL: between two instructions it is gone; that is certain a moment later."""
        if self._status is None:
            self._world.check_kill(self.life)
            self._end(-9, ())
            self.scope.cancel()

    def _end(self, status: int, why: tuple[str, ...]) -> None:
        self._status, self._why = status, why
        for end in self.ends:
            end.cut()
        if self.listener is not None:
            self.listener.close()
        if self.fabric is not None:
            self.fabric.end()
        if self.device is not None:
            self.device.die("its process is gone")
        world = self._world
        world.trace.add(world.clock.now, "process.end", self.life.name, status)
        world.clock.at(world.clock.now + world.rng.random() * world.shape.exit_s, self._confirm)

    def _confirm(self) -> None:
        self._world.auditor.died(self.life)
        if self.device is not None:
            self._world._steps += self.device.num_steps
            self._world._busy_s[self.life.rank] += self.device.busy_s
        self._world.forget_pairs(self.life)
        self._world.processes.pop(self.life.rank, None)
        self._dead.set()

    async def live(self) -> None:
        """Runs the production rank until its end."""
        world, life = self._world, self.life
        config = world.config.rank_config(life.rank)
        world.auditor.born(life, world.shape.num_pages)
        if life.role == "decode":
            self.listener = world.listeners[self.address] = CableListener()
        status, why = 0, ""
        with self.scope:
            async with world.memory.open_fabric(life.name) as fabric:
                self.fabric = fabric

                async def open_device(report: Callable[[str, int, int, str], None]) -> Device:
                    takes_s, files = world.rng.random() * world.shape.start_s, world.shape.start_files
                    for number in range(files):
                        await world.clock.sleep_until(world.clock.now + takes_s / files)
                        report("weights", number + 1, files, "files")
                    self.device = world.make_device(life)
                    return cast(Device, self.device)

                async def open_fabric() -> Fabric:
                    await trio.lowlevel.checkpoint()
                    return world.make_fabric(life, fabric)

                ports = RankPorts(
                    head=self.far,
                    open_device=open_device,
                    open_fabric=open_fabric,
                    peer_listener=self.listener,
                    peer_address=self.address,
                    dial=self._dial,
                    process=HostProcess(self.pid, is_own=False, read_rss_bytes=lambda: 0),
                    audit=self._audit,
                )
                try:
                    await run_rank(ports, RankIdentity(life.rank, life.generation, config))
                except* ConfigError as group:
                    status, why = 2, str(group.exceptions[0])
                except* EngineError as group:
                    status, why = 1, str(group.exceptions[0])
                    world.check_end(life, group)
        world.listeners.pop(self.address, None)
        if self._status is None:
            self._end(status, (why,))

    def _audit(self, side: Audited) -> None:
        self.side = side
        if self.device is not None and self._status is None:
            self.num_turns += 1
            self._world.auditor.turn(self.life, side, self.device, self.num_turns)

    async def _dial(self, address: str) -> trio.abc.Stream:
        world = self._world
        await world.clock.sleep_until(world.clock.now + world.shape.link_latency_s)
        listener = world.listeners.get(address)
        if listener is None or self._status is not None:
            raise ConnectionRefusedError(f"nobody listens {address}")
        other = next(p for p in world.processes.values() if p.address == address)
        mine, theirs = world.cable(self.life.name, other.life.name, (world.new_speed(), world.new_speed()))
        world.watch_pair(self.life, other.life, mine)
        listener.offer(theirs)
        for process, end in ((self, mine), (other, theirs)):
            process.ends = [old for old in process.ends if not old.is_cut]
            process.ends.append(end)
        return mine


class World:
    """See the module. `run` it in a nursery; then `connect` clients, and hurt it.

    Attributes:
        processes: rank to its present process, from its spawn until its death is certain.
    """

    def __init__(
        self,
        clock: Clock,
        shape: WorldShape,
        rng: random.Random,
        trace: Trace,
        extra_seed: int = 0,
        outside: Outside | None = None,
    ) -> None:
        self.clock, self.shape, self.rng, self.trace = clock, shape, rng, trace
        self.outside = outside
        self.config = shape.cluster_config() if outside is None else outside.config
        limits = shape.limits
        self.auditor = Auditor(
            is_thorough=shape.is_thorough,
            decode_rows=limits.decode_rows,
            chunk_tokens=limits.prefill_chunk_tokens,
            max_waiting=limits.rank_waiting,
        )
        probe = SimDevice(num_pages=1, num_slabs=1, page_tokens=shape.page_tokens)
        scale = probe.info.page_bytes / shape.page_bytes
        self.memory = MemoryWorld(
            random.Random(rng.random()),
            latency_s=shape.fabric_latency_s,
            bytes_per_s=shape.fabric_bytes_per_s * scale,
            extra_rng=random.Random(f"extra pushes {extra_seed}"),
            # The clock's own costs a third. It has another order within an instant, and so other runs of a seed: those
            # of small worlds are written down.
            sleep_until=trio.sleep_until if shape.is_thorough else clock.sleep_until,
        )
        self.memory.on_landing = self._landing
        self.groups: Groups | None = None
        if shape.experts is not None:
            self.groups = Groups(
                clock, shape.experts, self.config, shape.fabric_bytes_per_s * scale, self.is_disturbed, extra_seed
            )
            self.memory.weigh = self.groups.weigh
        self.disturbed_until: dict[int, float] = {}
        """Rank to the end of the last fault that touched it."""
        self.processes: dict[int, SimProcess] = {}
        self.listeners: dict[str, CableListener] = {}
        self.report: Callable[[], StatusReport] | None = None
        self.shutdown: Callable[[Shutdown, str], int] | None = None
        self.experts: Callable[[], ExpertsReport] | None = None
        self.act: Callable[[Rebalance], Awaitable[RebalanceAnswer | Refused]] | None = None
        self.num_lives = 0
        self.num_kills = 0
        self.is_over = trio.Event()
        self.is_calm = False
        """Nothing goes wrong in this run, so nobody has a reason to end a rank of a group."""
        self.drained = False
        """Somebody asked the head to stop."""
        self._steps = 0
        self._busy_s = dict.fromkeys(self.config.roles, 0.0)
        self._names: dict[str, Life] = {}
        self._pairs: dict[str, tuple[Life, Life, FrameReader]] = {}
        self._num_cables = 0
        self._send_rng = random.Random(f"sends {extra_seed}")
        self._plan_rng = random.Random(f"plans {extra_seed}")
        self._sums: dict[str, Callable[[bytes], int]] = {}
        self._requests = CableListener()
        self._send_signal, self._signals = trio.open_memory_channel[int](16)
        self._nursery: trio.Nursery | None = None
        self._groups: dict[tuple[str, int], StepGroup] = {}
        self._pool: Pool | None = None
        # Without ticks no two deliveries are due at once, but by chance.
        self._post = Post(clock) if shape.link_tick_s else None

    # ------------------------------------------------------------ the head

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> int:
        """The cluster, until the head ends: how many signals ended it. A broken promise ends it with a Violation."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            outside = self.outside
            if outside is None:
                ports, ready_within_s = self._make_ports(), math.inf
            else:
                ports, ready_within_s = self._open_ports(outside.ports), outside.ready_within_s
                nursery.start_soon(self._let_in, outside.ports.requests)
            nursery.start_soon(self._watch)
            task_status.started()
            signals = await run_head(ports, self.config, ready_within_s=ready_within_s)
            self.is_over.set()
            nursery.cancel_scope.cancel()
        alive = [process.life.name for process in self.processes.values() if process.is_alive]
        if alive:
            raise Violation("leftover", f"the head is gone, but {', '.join(alive)} live on")
        return signals

    def _make_ports(self) -> HeadPorts:
        return HeadPorts(
            requests=cast(Any, self._requests),
            read=cast(Any, CableListener()),
            admin=cast(Any, CableListener()),
            serve_operators=self._serve_operators,
            spawn=self.spawn,
            plan=self._plan,
            signals=cast("AsyncIterator[int]", self._signals),
            parent_gone=None,
            pid=1,
            events=EventRing(),
        )

    def _open_ports(self, given: HeadPorts) -> HeadPorts:
        """The given ones, with simulated processes, and simulated clients beside real ones."""

        async def serve(listener: trio.abc.Listener[trio.SocketStream], answers: Answers, acts: Acts | None) -> None:
            self._overhear(answers, acts)
            await given.serve_operators(listener, answers, acts)

        requests = cast(Any, self._requests)
        return dataclasses.replace(given, requests=requests, spawn=self.spawn, serve_operators=serve)

    async def _let_in(self, real: trio.abc.Listener[trio.SocketStream]) -> None:
        """Real clients come through the same listener as simulated ones."""
        async with real, trio.open_nursery() as nursery:

            async def offer(stream: trio.SocketStream) -> None:
                try:
                    self._requests.offer(stream)
                except OSError:  # the head is about to end
                    await trio.aclose_forcefully(stream)

            await accept_streams(real, nursery, offer)

    def spawn(self, rank: int, generation: int) -> SimProcess:
        """The head's port to processes."""
        assert self._nursery is not None
        life = Life(self.config.roles[rank], rank, generation)
        if rank in self.processes:
            raise Violation("leftover", f"{life.name} is started while {self.processes[rank].life.name} is not dead")
        self._names[life.name] = life
        process = self.processes[rank] = SimProcess(self, life)
        self.num_lives += 1
        self.trace.add(self.clock.now, "process.start", life.name)
        self._nursery.start_soon(process.live)
        return process

    async def _plan(self, request: PlanRequest) -> PlannedMoves:
        """As the planner's process does it, in virtual time."""
        await self.clock.sleep_until(self.clock.now + PLAN_S)
        experts = self.shape.experts
        if experts is not None and request.target is None and self._plan_rng.random() < experts.wild_share:
            target = draw_placement(request.current, self._plan_rng)
            request = dataclasses.replace(request, target=target, why="drawn")
        try:
            return plan_moves(request)
        except ValueError as error:
            raise EngineError(f"the planner says: {error}") from None

    async def _serve_operators(self, listener: object, answers: Answers, acts: Acts | None) -> None:
        self._overhear(answers, acts)
        await trio.sleep_forever()

    def _overhear(self, answers: Answers, acts: Acts | None) -> None:
        self.report, self.experts = answers.status, answers.experts
        if acts is not None:
            self.act, self.shutdown = acts.rebalance, acts.shutdown

    def count_steps(self) -> int:
        """Device steps of all lives."""
        return self._steps + sum(p.device.num_steps for p in self.processes.values() if p.device is not None)

    def measure_busy(self) -> dict[int, float]:
        """Rank to virtual seconds of device time, over all its lives."""
        busy_s = dict(self._busy_s)
        for rank, process in self.processes.items():
            if process.device is not None:
                busy_s[rank] += process.device.busy_s
        return busy_s

    def signal(self, number: int = 15) -> None:
        """Asks the head to stop, as a terminal would."""
        self._send_signal.send_nowait(number)

    async def _watch(self) -> None:
        limits = self.shape.limits
        while True:
            await trio.sleep(WATCH_S)
            now = self.clock.now
            if self.report is None:
                continue
            report = self.report()
            if report.waiting > limits.queue_requests:
                raise Violation("bounds", f"{report.waiting} requests wait in the head (limit {limits.queue_requests})")
            self.trace.add(now, "status", f"{report.waiting} {report.running} {report.finished} {report.failed}")
            patience = SILENT_PERIODS * limits.snapshot_s
            for status in report.ranks:
                process = self.processes.get(status.rank)
                if process is None or status.state != "ready" or process.life.generation != status.generation:
                    continue
                held_until = max(process.stopped_until, process.speeds["in"].held_until)
                silent_since = max(process.far.out.sent_at, held_until, process.speeds["out"].held_until)
                if process.is_alive and now - silent_since > patience:
                    raise Violation(
                        "heartbeat", f"{process.life.name} says nothing for {now - silent_since:.3f} s at {now:.3f} s"
                    )

    # ------------------------------------------------------------ what a fault explains

    def is_disturbed(self, rank: int, since_s: float) -> bool:
        """A fault has touched this rank within the last `since_s`."""
        return self.disturbed_until.get(rank, -since_s) + since_s >= self.clock.now

    def disturb(self, rank: int, until: float) -> None:
        """A fault touches this rank until then."""
        self.disturbed_until[rank] = max(self.disturbed_until.get(rank, 0.0), until)

    def check_kill(self, life: Life) -> None:
        """A rank is about to be killed."""
        if self.is_calm and not self.drained:
            raise Violation("protocol", f"{life.name} is ended, and nothing goes wrong in this run")

    def check_end(self, life: Life, error: BaseExceptionGroup[EngineError]) -> None:
        """A rank ended by itself, with an error. In a group nothing that others say may lead to that."""
        wrong = error.subgroup((LocalProtocolError, RemoteProtocolError))
        if self.groups is not None and wrong is not None:
            raise Violation("protocol", f"{life.name} ends: {_first_leaf(wrong)}")

    # ------------------------------------------------------------ wires, memory, devices

    def new_speed(self) -> WireSpeed:
        return WireSpeed(self.shape.link_latency_s, self.shape.link_bytes_per_s, self.shape.link_tick_s)

    def cable(self, one: str, other: str, speeds: tuple[WireSpeed, WireSpeed]) -> tuple[CableEnd, CableEnd]:
        self._num_cables += 1
        # In small worlds half of all sends go the long way, by the writer's queue.
        is_coy = (lambda: self._send_rng.random() < 0.5) if self.shape.is_thorough else None
        return make_cable(self.clock, f"{one}#{self._num_cables}", other, speeds, self._tap, is_coy, self._post)

    def connect(self, name: str) -> tuple[CableEnd, tuple[WireSpeed, WireSpeed]]:
        """A client's connection to the head. Raises OSError if it does not accept."""
        speeds = self.new_speed(), self.new_speed()
        mine, theirs = self.cable(name, "head", speeds)
        self._requests.offer(theirs)
        return mine, speeds

    def watch_pair(self, prefill: Life, decode: Life, end: CableEnd) -> None:
        """The auditor reads along."""
        self._pairs[end.out.name] = (prefill, decode, FrameReader(DECODE_FROM_PREFILL))
        self._pairs[end.into.name] = (decode, prefill, FrameReader(PREFILL_FROM_DECODE))

    def forget_pairs(self, life: Life) -> None:
        for name in [name for name, pair in self._pairs.items() if life in pair[:2]]:
            del self._pairs[name]

    def _tap(self, name: str, data: bytes) -> None:
        look = self._sums.get(name)
        if look is not None:  # as a rule; no pair is among them while it is one
            self.trace.add(self.clock.now, "frame", name, look(data))
            return
        pair = self._pairs.get(name)
        if pair is None:
            if self.outside is not None:
                return  # nobody compares runs there
            hides = self.groups is not None and "head#" in name
            look = self._sums[name] = StreamSum().feed if hides else zlib.crc32
            self.trace.add(self.clock.now, "frame", name, look(data))
            return
        sender, receiver, reader = pair
        reader.feed(data)
        for frame in reader.take():
            # Greetings carry addresses of this process's memory, which no seed repeats.
            message, blob = frame
            total = 0 if isinstance(message, PeerHello | PeerWelcome) else zlib.crc32(blob)
            self.trace.add(self.clock.now, "frame", f"{name} {type(message).__name__}", total)
            self.auditor.pair_frame(sender, receiver, message, blob)

    def _landing(self, writer: str, target: str, blocks: Any) -> None:
        self.trace.add(self.clock.now, "write", f"{writer}>{target}", len(blocks))
        transfer = self.memory.landing
        if self.groups is not None and transfer is not None and self.groups.landing(writer, target, transfer):
            return
        self.auditor.landing(self._names[writer.split("#")[0]], self._names[target.split("#")[0]], list(blocks))

    def make_fabric(self, life: Life, fabric: MemoryFabric) -> Fabric:
        shape = self.shape
        if shape.handoff == "chunks" or life.role == "decode":
            return cast(Fabric, fabric)
        ask_s = shape.link_latency_s + shape.fabric_latency_s if shape.handoff == "pull" else 0.0
        return cast(Fabric, KeepingFabric(fabric, self.clock, shape.num_pages, ask_s))

    def _find_group(self, life: Life) -> StepGroup | None:
        shape = self.shape
        first, size = (shape.prefill, shape.decode_group) if life.role == "decode" else (0, shape.prefill_group)
        if size == 1 or self.groups is not None:
            return None
        key = (life.role, (life.rank - first) // size)
        if key not in self._groups:
            self._groups[key] = StepGroup(self.clock.at)
        return self._groups[key]

    def _find_pool(self) -> Pool | None:
        """Memory for the next device where rows are columns; where they are not, each device has its own."""
        shape = self.shape
        if shape.is_thorough:
            return None
        if self._pool is None or self._pool.is_used_up:
            self._pool = make_pool(
                shape.prefill + shape.decode, shape.num_pages, shape.num_slabs, has_trail=shape.hand_back
            )
        return self._pool

    def make_device(self, life: Life) -> SimDevice:
        shape = self.shape
        device = SimDevice(
            num_pages=shape.num_pages,
            num_slabs=shape.num_slabs,
            page_tokens=shape.page_tokens,
            max_model_tokens=shape.max_model_tokens,
            vocab_size=shape.vocab_size,
            eos_share=shape.eos_share,
            costs=shape.decode_costs if life.role == "decode" else shape.prefill_costs,
            sleep_until=self.clock.sleep_until,
            group=self._find_group(life),
            reads_all=shape.is_thorough,
            name=life.name,
            checksum_s=shape.page_bytes / CHECKSUM_BYTES_PER_S,
            pool=self._find_pool(),
            max_drafts=shape.drafts,
            draft_share=shape.draft_share,
            has_trail=shape.hand_back,
        )
        if self.groups is not None:
            self.groups.seat(life, device)
        return device


def _first_leaf(error: BaseException) -> BaseException:
    return _first_leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
