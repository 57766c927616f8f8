"""A head for tests of the console: an asyncio server on unix sockets that speaks the protocol with scripted reports.

`Scene` is what it says, plain attributes that a test changes while it runs. `open_console` opens the console on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import tempfile
import unicodedata
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
from textual.events import Key
from textual.keys import REPLACED_KEYS, _character_to_key, _get_unicode_name_from_key

from console.app import ConsoleApp
from console.clock import Clock
from console.dial import Target
from console.marks import Theme
from console.screens import SCREENS
from transport.link import FrameLink
from transport.messages import (
    HEAD_FROM_OPERATOR,
    LATENCY_BOUNDS_US,
    PROTOCOL_VERSION,
    ActDone,
    AskExperts,
    AskHeat,
    AskLinks,
    AskRequests,
    AskStatus,
    AskTraffic,
    CancelRequests,
    EventsHappened,
    ExpertsReport,
    HeadEvent,
    HeatReport,
    LinksReport,
    Message,
    PartReport,
    PastRebalance,
    PlanFigures,
    RankSnapshot,
    RankStatus,
    Rebalance,
    RebalanceAnswer,
    Refused,
    RequestRow,
    RequestsReport,
    SetDrain,
    SkewFigures,
    StatusReport,
    TrafficReport,
    WatchEvents,
)

WALL_MS = 1_764_425_551_000
"""2025-11-29 14:12:31 UTC: every clock of a test begins here, and its zone is UTC (see conftest)."""
START = 1000.0


class ManualClock(Clock):
    """Time goes on when a test says so."""

    def __init__(self) -> None:
        self.at = START

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return WALL_MS + round((self.at - START) * 1000)

    def period(self, hz: float) -> float:
        return 3600.0  # no round begins by itself: tests say when

    def pause(self, seconds: float) -> float:
        return 3600.0  # nor is a link dialled again: `app.link.hurry()`


# ---------------------------------------------------------------- reports, each with every field that a test wants


def make_snapshot(rank: int, **fields: Any) -> RankSnapshot:
    values: dict[str, Any] = {
        "rank": rank,
        "generation": 1,
        "step": 10_000,
        "step_age_ms": 4,
        "running": 90,
        "waiting": 0,
        "pages_free": 300,
        "pages_owned": 690,
        "pages_granted": 10,
        "pages_quarantined": 0,
        "pages_total": 1000,
        "slabs_free": 38,
        "prompt_tokens": 4_000_000,
        "generated_tokens": 900_000,
        "pushed_bytes": 8 << 30,
        "pushes": 4000,
        "pushes_inflight": 2,
        "step_us_p50": 8900,
        "step_us_p99": 10_100,
        "device_us_p50": 8600,
        "loop_lag_us_p50": 40,
        "loop_lag_us_p99": 400,
        "rss_bytes": 3 << 30,
        "device_us_p99": 9900,
        "step_us_sum": 89_000_000,
        "device_us_sum": 86_000_000,
    }
    return RankSnapshot(**(values | fields))


def make_rank(rank: int, role: str, **fields: Any) -> RankStatus:
    values: dict[str, Any] = {
        "rank": rank,
        "role": role,
        "generation": 1,
        "pid": 4000 + rank,
        "state": "ready",
        "phase": "",
        "age_ms": 120,
        "restarts": 0,
        "snapshot": make_snapshot(rank),
    }
    return RankStatus(**(values | fields))


def make_status(prefill: int = 8, decode: int = 32, **fields: Any) -> StatusReport:
    """Prefill ranks first, then decode ranks, as the head numbers them."""
    ranks = tuple(make_rank(n, "prefill" if n < prefill else "decode") for n in range(prefill + decode))
    values: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "cluster": "prod-a",
        "model": "/models/V4.1-Flash",
        "head_pid": 77,
        "uptime_ms": 3_600_000,
        "ready": True,
        "reasons": (),
        "waiting": 12,
        "running": 2911,
        "finished": 120_000,
        "failed": 3,
        "ranks": ranks,
        "waiting_limit": 4096,
    }
    return StatusReport(**(values | fields))


def make_counts(centre_us: float, total: int = 2000, spread: int = 6) -> tuple[int, ...]:
    """Latency counts around a value, the same each time."""
    middle = min(range(len(LATENCY_BOUNDS_US)), key=lambda n: abs(math.log(LATENCY_BOUNDS_US[n] / centre_us)))
    counts = [0] * (len(LATENCY_BOUNDS_US) + 1)
    for n in range(-spread, spread + 1):
        at = min(max(0, middle + n), len(counts) - 1)
        counts[at] += round(total * math.exp(-n * n / 6) / 4.3)
    return tuple(counts)


def make_traffic(**fields: Any) -> TrafficReport:
    values: dict[str, Any] = {
        "at_ms": 3_600_000,
        "accepted": 123_000,
        "refused": 40,
        "finished": 120_000,
        "failed": 3,
        "cancelled": 41,
        "prompt_tokens": 12_000_000_000,
        "cached_tokens": 11_400_000_000,
        "generated_tokens": 60_000_000,
        "waiting": 12,
        "waiting_tokens": 1_400_000,
        "running": 2911,
        "ttft": make_counts(410_000),
        "itl": make_counts(5100, 400_000),
        "handoff": make_counts(11_000),
    }
    return TrafficReport(**(values | fields))


def make_skew(**fields: Any) -> SkewFigures:
    values: dict[str, Any] = {
        "max_over_mean": 1.21,
        "imbalance": 0.83,
        "lost_us_per_step": 610.0,
        "layer": 4,
        "rank": 25,
    }
    return SkewFigures(**(values | fields))


def make_plan(**fields: Any) -> PlanFigures:
    values: dict[str, Any] = {
        "plan": 0,
        "age_ms": 0,
        "pays": False,
        "reason": "",
        "before": make_skew(),
        "after": make_skew(),
        "moved_slots": 0,
        "moved_bytes": 0,
        "far_slots": 0,
        "saved_us_per_step": 0.0,
        "gain_us": 0.0,
        "cost_us": 0.0,
        "stages": 0,
    }
    return PlanFigures(**(values | fields))


def make_past(plan: int, **fields: Any) -> PastRebalance:
    values: dict[str, Any] = {
        "plan": plan,
        "ended_ago_ms": 240_000,
        "result": "applied",
        "reason": "",
        "by": "auto",
        "before": 1.71,
        "predicted": 1.06,
        "after": 1.08,
        "realised": 0.95,
        "moved_slots": 214,
        "moved_bytes": 3 << 30,
        "took_ms": 710,
    }
    return PastRebalance(**(values | fields))


def make_part(pool: str = "decode", group: int = 0, part: str = "main", **fields: Any) -> PartReport:
    values: dict[str, Any] = {
        "pool": pool,
        "group": group,
        "part": part,
        "ranks": tuple(range(8, 40)),
        "layers": 8,
        "experts": 64,
        "slots": 8 * 64 + 256,
        "empty_slots": 256,
        "slot_bytes": 14 << 20,
        "mode": "manual",
        "state": "idle",
        "membership": 1,
        "epoch": 17,
        "steps": 12_000,
        "skew": make_skew(),
        "plan": make_plan(),
        "copied_slots": 0,
        "total_slots": 0,
        "progress_age_ms": 0,
        "lost_us_total": 9e9,
        "history": (make_past(17),),
        "applied": 4,
        "plan_age_limit_ms": 60_000,
    }
    return PartReport(**(values | fields))


def make_experts(prefill_groups: int = 4) -> ExpertsReport:
    """One decode group of 32, and prefill groups of two."""
    even = make_skew(max_over_mean=1.02, imbalance=0.05, lost_us_per_step=12.0, layer=1, rank=0)
    return ExpertsReport(
        parts=(
            make_part(),
            *(
                make_part("prefill", n, ranks=(2 * n, 2 * n + 1), slots=8 * 64 + 16, empty_slots=16, skew=even)
                for n in range(prefill_groups)
            ),
        )
    )


def make_heat(
    ask: AskHeat,
    part: PartReport,
    *,
    hot_place: int = 17,
    hot_layer: int = 4,
    hot_expert: int = 23,
    hot: float = 1.83,
    us_per_row: float = 1.5,
    rows_per_step: float = 480.0,
) -> tuple[HeatReport, bytes]:
    """Loads that are even but for a ripple, and one rank that is too full in one layer."""
    n, layers, experts = len(part.ranks), part.layers, part.experts
    slots = part.slots // n
    places, depth = np.arange(n)[:, None], np.arange(layers)[None, :]
    rank_load = (1 + 0.06 * np.sin(1.7 * places + 2.3 * depth)).astype("<f4")
    hottest = ((places * 2 + depth * 3) % experts).astype("<i4")
    if n > hot_place:
        rank_load[hot_place, hot_layer] = hot
        hottest[hot_place, hot_layer] = hot_expert
    table = np.full((n, slots), -1, "<i4")
    flat = np.arange(experts)
    for place in range(n):
        mine = flat[place * experts // n : (place + 1) * experts // n]
        table[place, : len(mine)] = mine
    load = (1 + 0.3 * np.sin(flat * 1.1 + ask.layer)).astype("<f4")
    if ask.layer == hot_layer and n > hot_place:
        load[hot_expert] = 4.1
        # A second replica of the hot expert.
        table[5 % n, slots - 1] = hot_expert
    moved = np.zeros((n, slots), "u1")
    moved[0, 0] = 1
    after = table.copy()
    if part.plan.plan:
        after[3 % n, slots - 1] = hot_expert
    report = HeatReport(
        pool=ask.pool,
        group=ask.group,
        part=ask.part,
        layer=ask.layer,
        layers=layers,
        experts=experts,
        ranks=n,
        slots_per_rank=slots,
        has_plan=part.plan.plan > 0,
        steps=part.steps,
        us_per_row=us_per_row,
        rows_per_step=rows_per_step,
    )
    return report, b"".join(array.tobytes() for array in (rank_load, hottest, table, after, load, moved))


def make_links(prefill: int = 8, decode: int = 32, *, seconds: float = 0.0) -> tuple[LinksReport, bytes]:
    """Every prefill rank to every decode rank; one pair is slow and has failed twice. `seconds` of traffic so far."""
    src, dst = (grid.ravel() for grid in np.meshgrid(np.arange(prefill), prefill + np.arange(decode), indexing="ij"))
    count = len(src)
    speed = 3.0e9 * (1 + 0.05 * np.sin(src * 3 + dst))
    slow = (src == min(3, prefill - 1)) & (dst == prefill + min(1, decode - 1))
    speed[slow] = 0.4e9
    sent = (10e9 + speed * seconds).astype("<i8")
    columns = (
        src.astype("<i4"),
        np.ones(count, "<i4"),
        dst.astype("<i4"),
        sent,
        (sent // 2_000_000).astype("<i8"),
        (np.arange(count) % 4).astype("<i4"),
        np.where(slow, 2, 0).astype("<i4"),
        np.where(slow, 38_000, 8_100).astype("<i4"),
    )
    return LinksReport(count=count), b"".join(column.tobytes() for column in columns)


def make_request(request: int, **fields: Any) -> RequestRow:
    values: dict[str, Any] = {
        "request": request,
        "client": "batch",
        "label": f"r-{request:04x}",
        "state": "decode",
        "age_ms": 41_000 - request * 100,
        "state_ms": 20_000,
        "attempt": 1,
        "prompt_tokens": 402_000,
        "cached_tokens": 399_000,
        "generated": 1204,
        "max_tokens": 4096,
        "prefill_rank": 1,
        "decode_rank": 25,
        "queue_us": 12_000,
        "prefill_us": 310_000,
        "push_us": 11_000,
    }
    return RequestRow(**(values | fields))


def make_requests(count: int = 40) -> RequestsReport:
    states = ("decode", "decode", "prefill", "queued")
    return RequestsReport(
        total=2923,
        rows=tuple(
            make_request(
                n,
                state=states[n % 4],
                prefill_rank=-1 if n % 4 == 3 else n % 8,
                decode_rank=-1 if n % 4 > 1 else 8 + n % 32,
            )
            for n in range(count)
        ),
    )


def make_event(seq: int, name: str = "rank.ready", text: str = "", level: str = "info", ago_s: float = 60) -> HeadEvent:
    text = text or f"rank={seq} took=1.2s"
    return HeadEvent(seq=seq, at_ms=WALL_MS - round(ago_s * 1000), level=level, name=name, text=text)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the head


@dataclasses.dataclass
class Scene:
    """What the head says; a test replaces what it wants to be otherwise. `advance` lets traffic go on."""

    status: StatusReport = dataclasses.field(default_factory=make_status)
    experts: ExpertsReport = dataclasses.field(default_factory=make_experts)
    traffic: TrafficReport = dataclasses.field(default_factory=make_traffic)
    requests: RequestsReport = dataclasses.field(default_factory=make_requests)
    links: tuple[LinksReport, bytes] = dataclasses.field(default_factory=make_links)
    events: list[HeadEvent] = dataclasses.field(
        default_factory=lambda: [
            make_event(1, "head.ready", "ranks=40", ago_s=3500),
            make_event(2, "link.retry", "p03 to d09, twice, ok", "warning", ago_s=1340),
            make_event(3, "rebalance.end", "plan 17 applied main skew 1.71→1.08 2.9 GiB 0.71 s", ago_s=240),
        ]
    )
    heat: Callable[[AskHeat, PartReport], tuple[HeatReport, bytes]] = make_heat
    done: str = "done"
    refuse: str = ""
    """Every act is refused with this."""
    act: Callable[[Message], Message] | None = None
    """What an act does to the scene, and its answer; None: it does nothing, and `done` is said."""
    holds_acts: bool = False
    """Acts are answered when `StubHead.release_acts` is called."""
    seconds: float = 0.0

    def part(self, pool: str, group: int, part: str) -> PartReport | None:
        for report in self.experts.parts:
            if (report.pool, report.group, report.part) == (pool, group, part):
                return report
        return None

    def set_part(self, pool: str = "decode", group: int = 0, part: str = "main", **fields: Any) -> None:
        """Replaces fields of one part."""
        self.experts = ExpertsReport(
            parts=tuple(
                msgspec.structs.replace(report, **fields)
                if (report.pool, report.group, report.part) == (pool, group, part)
                else report
                for report in self.experts.parts
            )
        )

    def set_rank(self, rank: int, **fields: Any) -> None:
        """Replaces fields of one rank's status."""
        self.status = msgspec.structs.replace(
            self.status,
            ranks=tuple(
                msgspec.structs.replace(found, **fields) if found.rank == rank else found for found in self.status.ranks
            ),
        )

    def advance(self, seconds: float) -> None:
        """Everything that only grows grows: 182 requests a second, steps of 8.9 ms, d25 the slow one."""
        self.seconds += seconds
        grown = {
            "at_ms": round(1000 * seconds),
            "accepted": round(182 * seconds),
            "finished": round(180 * seconds),
            "cancelled": round(0.7 * seconds),
            "prompt_tokens": round(16_000_000 * seconds),
            "cached_tokens": round(15_200_000 * seconds),
            "generated_tokens": round(540_000 * seconds),
        }
        traffic = {name: getattr(self.traffic, name) + more for name, more in grown.items()}
        for name in ("ttft", "itl", "handoff"):
            counts = getattr(self.traffic, name)
            traffic[name] = tuple(count + round(count * seconds / 600) for count in counts)
        self.traffic = msgspec.structs.replace(self.traffic, **traffic)
        prefill = sum(1 for rank in self.status.ranks if rank.role == "prefill")
        self.links = make_links(prefill, len(self.status.ranks) - prefill, seconds=self.seconds)
        ranks = []
        for rank in self.status.ranks:
            old = rank.snapshot
            if old is not None and rank.state == "ready":
                steps = round(seconds / 0.0089)
                old = msgspec.structs.replace(
                    old,
                    step=old.step + steps,
                    step_us_sum=old.step_us_sum + steps * (8900 + (1200 if rank.rank == 25 else 3 * rank.rank)),
                    device_us_sum=old.device_us_sum + round(seconds * (810_000 if rank.role == "prefill" else 960_000)),
                    generated_tokens=old.generated_tokens + round(seconds * (5800 + 7 * rank.rank)),
                    prompt_tokens=old.prompt_tokens + round(seconds * (402_000 - 900 * rank.rank)),
                    pushed_bytes=old.pushed_bytes + round(seconds * (26e9 if rank.role == "prefill" else 0)),
                )
            ranks.append(msgspec.structs.replace(rank, snapshot=old))
        self.status = msgspec.structs.replace(
            self.status, ranks=tuple(ranks), uptime_ms=self.status.uptime_ms + round(1000 * seconds)
        )


class StubHead:
    """Answers from a scene. `asked` has every question and act, `acts` the acts alone; `is_silent` answers nothing."""

    def __init__(self, directory: str, scene: Scene) -> None:
        self.directory = directory
        self.scene = scene
        self.asked: list[Message] = []
        self.acts: list[Message] = []
        self.is_silent = False
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: list[FrameLink] = []
        self._watchers: list[FrameLink] = []
        self._sent = 0
        self._held: list[tuple[FrameLink, Message, bool]] = []

    async def start(self, *, has_admin: bool = True) -> None:
        for name in ("read.sock", "admin.sock") if has_admin else ("read.sock",):
            path = os.path.join(self.directory, name)
            server = await asyncio.start_unix_server(
                lambda reader, writer, name=name: self._accept(reader, writer, name == "admin.sock"), path
            )
            self._servers.append(server)

    async def stop(self) -> None:
        """As if killed: the sockets' files go too, as the next head would remove them."""
        for server in self._servers:
            server.close()
        for link in self._links:
            await link.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        for name in ("read.sock", "admin.sock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))
        self._servers, self._links, self._watchers = [], [], []

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_admin: bool) -> None:
        link = FrameLink(
            reader, writer, accepts=HEAD_FROM_OPERATOR, out_limit_bytes=16 << 20, stall_s=2.0, name="console"
        )
        self._links.append(link)
        task = asyncio.get_running_loop().create_task(self._serve(link, is_admin))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: FrameLink, is_admin: bool) -> None:
        from transport.errors import PeerGone

        try:
            while True:
                for frame in await link.receive():
                    self.asked.append(frame.message)
                    if not self.is_silent:
                        self._answer(link, frame.message, is_admin)
        except PeerGone:
            await link.aclose()
            if link in self._watchers:
                self._watchers.remove(link)

    def _answer(self, link: FrameLink, message: Message, is_admin: bool) -> None:
        scene = self.scene
        if isinstance(message, AskStatus):
            link.post(scene.status)
        elif isinstance(message, AskExperts):
            link.post(scene.experts)
        elif isinstance(message, AskTraffic):
            link.post(scene.traffic)
        elif isinstance(message, AskRequests):
            link.post(scene.requests)
        elif isinstance(message, AskLinks):
            link.post(*scene.links)
        elif isinstance(message, AskHeat):
            part = scene.part(message.pool, message.group, message.part)
            if part is None:
                link.post(Refused(message=f"no part {message.part} of {message.pool}/{message.group}"))
            else:
                link.post(*scene.heat(message, part))
        elif isinstance(message, WatchEvents):
            self._watchers.append(link)
            events = tuple(event for event in scene.events if event.seq > message.after)
            link.post(EventsHappened(lost=0, events=events))
        else:
            self.acts.append(message)
            if scene.holds_acts:
                self._held.append((link, message, is_admin))
            else:
                link.post(self._act(message, is_admin))

    def release_acts(self) -> None:
        """Answers what was held back."""
        held, self._held = self._held, []
        for link, message, is_admin in held:
            link.post(self._act(message, is_admin))

    def _act(self, message: Message, is_admin: bool) -> Message:
        scene = self.scene
        if not is_admin:
            return Refused(message="this socket only reads")
        if scene.refuse:
            return Refused(message=scene.refuse)
        if scene.act is not None:
            return scene.act(message)
        if isinstance(message, Rebalance):
            part = scene.part(message.pool, message.group, message.part)
            return RebalanceAnswer(done=scene.done, report=part) if part else Refused(message="no such part")
        assert isinstance(message, SetDrain | CancelRequests)
        return ActDone(done=scene.done)

    def push(self, *events: HeadEvent, lost: int = 0) -> None:
        """Events as the head sends them, unasked."""
        self.scene.events += events
        for link in self._watchers:
            link.post(EventsHappened(lost=lost, events=events))


# ---------------------------------------------------------------- the console on it


def send_key(app: ConsoleApp, key: str) -> None:
    """A key as the terminal's driver would send it: a character, or Textual's name of a key."""
    name = _character_to_key(key) if len(key) == 1 and not key.isalnum() else key
    try:
        character: str | None = unicodedata.lookup(_get_unicode_name_from_key(REPLACED_KEYS.get(name, name)))
    except KeyError:
        character = key if len(key) == 1 else None
    event = Key(name, character)
    event.set_sender(app)
    assert app._driver is not None
    app._driver.send_message(event)


class Desk:
    """An open console with its head, for a test."""

    def __init__(self, app: ConsoleApp, pilot: Any, head: StubHead, clock: ManualClock) -> None:
        self.app, self.pilot, self.head, self.clock = app, pilot, head, clock

    async def press(self, *keys: str) -> None:
        """Keys, one after another, each drawn."""
        for key in keys:
            send_key(self.app, key)
            await self._calm()
        await self.pilot.pause()

    async def _calm(self) -> None:
        """Until nobody has a message to handle: the pilot's own way sleeps 40 ms after each key."""
        quiet = 0
        while quiet < 5:
            await asyncio.sleep(0)
            app = self.app
            pumps = [app, *(node for screen in app.screen_stack for node in screen.walk_children(with_self=True))]
            quiet = 0 if any(pump._message_queue.qsize() for pump in pumps) else quiet + 1

    async def type(self, text: str) -> None:
        """Text into a footer that waits for it."""
        await self.press(*["space" if c == " " else c for c in text])

    async def until(self, condition: Callable[[], bool], what: str = "", limit_s: float = 5.0) -> None:
        """Lets the loop run until it holds."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.005)
        await self.pilot.pause()

    async def rounds(self, count: int = 1, *, seconds: float = 0.0) -> None:
        """Lets the console hear `count` more full sets of answers, the scene and the clock going on before each."""
        for _ in range(count):
            if seconds:
                self.head.scene.advance(seconds)
                self.clock.at += seconds
            # The answer that is under way may be from before.
            seen = self.app.link.rounds
            self.app.hurry()
            await self.until(lambda seen=seen: self.app.link.rounds >= seen + 1)  # type: ignore[misc]
        await self.pilot.pause()

    def lines(self, part: str = "body") -> list[str]:
        """What one part of the screen says: `header`, `body`, `footer`, `help`."""
        from console.linegrid import LineView
        from console.lines import plain

        return [plain(line) for line in self.app.screen.query_one(f"#{part}", LineView).lines]

    def text(self, part: str = "body") -> str:
        return "\n".join(self.lines(part))


@contextlib.asynccontextmanager
async def open_console(
    scene: Scene | None = None,
    *,
    size: tuple[int, int] = (80, 24),
    read_only: bool = False,
    has_head: bool = True,
    theme: Theme = "dark",
    screen: str = "over",
    warm: int = 2,
    wait: bool = True,
    is_silent: bool = False,
) -> AsyncIterator[Desk]:
    """The console on a stub head, after `warm` seconds of traffic, on `screen`. Everything ends with the block.
    `wait`: for the first answers. `is_silent`: the head answers nothing."""
    with tempfile.TemporaryDirectory() as directory:
        head = StubHead(directory, scene or Scene())
        head.is_silent = is_silent
        clock = ManualClock()
        if has_head:
            await head.start()
        # Addresses are in pictures, so they must not depend on where the test runs.
        target = _TestTarget("unix", directory, "/run/engine", read_only)
        app = ConsoleApp(target, hz=2.0, theme=theme, clock=clock, directory=directory)
        try:
            async with app.run_test(size=size) as pilot:
                desk = Desk(app, pilot, head, clock)
                if has_head and wait:
                    await desk.until(lambda: app.link.rounds > 0, "first answers")
                    await desk.rounds(warm, seconds=1.0)
                if screen != "over":
                    await desk.press(str(next(kind.NUMBER for kind in SCREENS if screen == kind.NAME)))
                    if has_head:
                        await desk.rounds(1)
                yield desk
        finally:
            await head.stop()


class _TestTarget(Target):
    """Says an address that is the same in every run."""

    @property
    def address(self) -> str:
        return "unix:/run/engine"
