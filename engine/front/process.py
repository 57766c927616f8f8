"""run_front: one front's process: opens its parts, serves until it is told to end, and ends in good order.

The end: `/ready` says 503 at once, new generations are refused, streams go on for at most `http.drain`; the rest get an
error and the process goes. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from engine.config import NO_OTLP, HttpConfig, model_directory
from engine.errors import EngineError
from engine.faces.body import Bounds
from engine.faces.text import TextCodec
from engine.front.app import Front
from engine.front.ask import Failure
from engine.front.bodies import Served
from engine.front.connection import KEEP_ALIVE_S, Door
from engine.front.counts import FrontCounts
from engine.front.desk import HeadDesk
from engine.front.guard import Guard, read_guard
from engine.front.headlink import HeadLink
from engine.front.routes import list_routes
from engine.front.spans import SpanExporter
from engine.log import configure_log, log_event
from transport.wire import IDS_LIMIT

logger = logging.getLogger("engine.front")

BACKLOG = 2048
SPARE_DESCRIPTORS = 128
FLUSH_S = 2.0
"""For errors and last bytes to go out at the end."""


class FrontGiven(msgspec.Struct, frozen=True):
    """What a front is given by the process that starts it.

    Attributes:
        place: among the fronts, from 0.
        parent: pid of the starter.
        requests_socket, read_socket: of the head.
        counts: descriptor of the fronts' shared counts; `listener` of the listening socket.
        progress_s: see `Limits.progress_s`.
    """

    place: int
    parent: int
    model: str
    vocab_size: int
    max_model_tokens: int
    requests_socket: str
    read_socket: str
    counts: int
    listener: int
    progress_s: float
    log_format: str
    log_level: str
    http: HttpConfig


class _Server(uvicorn.Server):
    """uvicorn's, without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def run_front_process(given: FrontGiven) -> int:
    """Runs a front until it is told to end; returns the exit code: 1 if another head has to be asked anew.

    Raises:
        ConfigError: the tokenizer or the keys can not be read.
    """
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the terminal's; the head decides what they mean for fronts
    configure_log(given.log_format, given.log_level, f"h{given.place}")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    _allow_descriptors(given.http.connections + SPARE_DESCRIPTORS)
    served = load_served(given.model, given.vocab_size, given.max_model_tokens)
    guard = read_guard(given.http.keys_file) if given.http.asks_keys else Guard([])
    counts = FrontCounts(given.counts, given.place)
    listener = socket.socket(fileno=given.listener)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(given, served, guard, counts, listener))
    except EngineError as error:
        log_event(logger, "error", "front.failed", msg=str(error))
        return 1
    return 0


def _allow_descriptors(wanted: int) -> None:
    """Raises this process's own limit as far as the system lets it; a connection is a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def load_served(model: str, vocab_size: int, max_model_tokens: int) -> Served:
    """What is served; loads the tokenizer. Blocks.

    Raises:
        ConfigError: it is not there or not usable.
    """
    codec = TextCodec.load(model_directory(model))
    name = Path(model).name
    bounds = Bounds(min(vocab_size, codec.vocab_size), min(max_model_tokens, IDS_LIMIT // 4))
    return Served(codec, bounds, name, tuple(dict.fromkeys((name, model))), int(time.time()))


async def _run(
    given: FrontGiven, served: Served, guard: Guard, counts: FrontCounts, listener: socket.socket
) -> None:  # fmt: skip
    signals: asyncio.Queue[int] = asyncio.Queue()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signals.put_nowait, signal.SIGTERM)
    link = HeadLink(given.requests_socket, f"http {given.place}")
    desk = HeadDesk(given.read_socket)
    front = Front(given.http, served, link, desk, counts, guard, progress_s=given.progress_s)
    door = Door(given.http, counts)
    if given.http.otlp == NO_OTLP:
        await serve_front(front, door, listener, signals)
        return
    front.spans = SpanExporter(given.http.otlp)
    sending = asyncio.create_task(front.spans.run())
    try:
        await serve_front(front, door, listener, signals)
    finally:
        sending.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await front.spans.flush()


async def serve_front(front: Front, door: Door, listener: socket.socket, signals: asyncio.Queue[int]) -> None:
    """Serves on a listening socket until something is put into `signals`, then ends in good order.

    Raises:
        OtherModel: the head that answers now serves something else.
    """
    front.route(list_routes(front))
    config: Any = uvicorn.Config(
        front,
        http=door.make_protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FLUSH_S),
        h11_max_incomplete_event_size=front.http.header_bytes,
    )
    server = _Server(config)
    linking = asyncio.create_task(front.link.run())
    serving = asyncio.create_task(server.serve([listener]))
    sweeping = asyncio.create_task(door.sweep())
    stopping = asyncio.create_task(_drain(front, signals))
    tasks = (linking, serving, sweeping, stopping)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * FLUSH_S):
                await asyncio.shield(serving)
    finally:
        door.abort_all()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await front.desk.aclose()
        front.close()
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end


async def _drain(front: Front, signals: asyncio.Queue[int]) -> None:
    """Returns when the front may go."""
    await signals.get()
    front.is_draining = True
    drain_s = front.http.drain_s if front.link.hello is not None else 0.0
    log_event(logger, "info", "front.drain", running=len(front.generations), drain_s=drain_s)
    idle, again = asyncio.create_task(front.wait_idle()), asyncio.create_task(signals.get())
    await asyncio.wait((idle, again), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    front.link.fail_all(Failure("draining", "this engine ends", retryable=True))
    await asyncio.wait((idle,), timeout=FLUSH_S)
    idle.cancel()
