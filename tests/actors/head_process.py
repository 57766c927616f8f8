"""A real head in a process of its own, with fake ranks as real processes, over real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import trio

from engine.config import ClusterConfig, Limits, PoolConfig
from engine.faces.admin import open_operator
from engine.runtime import RuntimeDirectory
from tests.actors.head_rig import pack, rows_of
from transport.errors import EngineError
from transport.messages import (
    CLIENT_FROM_HEAD,
    PROTOCOL_VERSION,
    ClientHello,
    HeadHello,
    Message,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    Sampling,
    StatusReport,
    Submit,
    TokensEmitted,
)
from transport.stream import FrameStream, run_link
from transport.unix import open_unix_stream

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))
VOCAB = 288

_HEAD = """
import json, sys
from engine.compose import run_head_process
from engine.config import config_from_json
options = json.loads(sys.argv[1])
config = config_from_json(json.dumps(options.pop("config")).encode())
sys.exit(run_head_process(config, command=[sys.executable, options.pop("fake")], **options))
"""


def make_config(path: Path, *, prefill: int = 1, decode: int = 1, **limits: object) -> ClusterConfig:
    values: dict = {"snapshot_s": 0.05, "heartbeat_s": 5.0, "restart_pause_s": 0.02, "stop_s": 2.0, **limits}
    return ClusterConfig(
        cluster="test", model="nano", prefill=PoolConfig(tuple(range(prefill))),
        decode=PoolConfig(tuple(range(prefill, prefill + decode))), device="cpu", fabric="tcp", page_tokens=16,
        max_model_tokens=1000, num_pages=64, num_slabs=8, kv_dtype="float32", threads=1, replay_rows=0,
        admin_dir=str(path), log_format="json", log_level="debug", vocab_size=VOCAB, limits=Limits(**values),
    )  # fmt: skip


class HeadProcess:
    def __init__(self, config: ClusterConfig, log: Path, env: dict[str, str], **options: object) -> None:
        self.config, self.log = config, log
        self.directory = RuntimeDirectory(config.admin_dir)
        arguments = json.dumps({"config": dataclasses.asdict(config), "fake": FAKE_RANK, **options})
        with open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _HEAD, arguments], stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                env={**os.environ, "PYTHONPATH": os.getcwd(), **env}, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid

    def events(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def named(self, event: str) -> list[dict]:
        return [one for one in self.events() if one["event"] == event]

    async def status(self) -> StatusReport:
        async with open_operator(self.directory.read_socket) as head:
            return await head.ask_status()

    async def wait_ready(self, *, generations: dict[int, int] | None = None) -> StatusReport:
        """Until all ranks are ready, in at least these lives."""
        report: StatusReport | None = None
        with trio.move_on_after(20):
            while self.process.poll() is None:
                with contextlib.suppress(EngineError):
                    report = await self.status()
                    alive = all(rank.state == "ready" for rank in report.ranks)
                    grown = all(rank.generation >= (generations or {}).get(rank.rank, 1) for rank in report.ranks)
                    if report.ready and alive and grown:
                        return report
                await trio.sleep(0.01)
        raise AssertionError(f"not ready: {report}\n{self.log.read_text()}")

    async def wait_end(self, timeout_s: float = 10.0) -> int:
        return await wait_for(self.process.poll, timeout_s, lambda: self.log.read_text())


async def wait_for(question, timeout_s: float, context=lambda: ""):
    """Asks again and again until the answer is not None."""
    with trio.move_on_after(timeout_s):
        while True:
            answer = question()
            if answer is not None:
                return answer
            await trio.sleep(0.005)
    raise AssertionError(f"nothing within {timeout_s} s\n{context()}")


def is_gone(pid: int) -> bool | None:
    """True if no process (or only a zombie) has the pid; None to ask again."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return True if state == "Z" else None


@contextlib.contextmanager
def head_process(
    path: Path, *, env: dict[str, str] | None = None, options: dict | None = None, **changes: object
) -> Iterator[HeadProcess]:
    """Starts a head; whatever happens, no process of it is left."""
    directory = path / "run"
    directory.mkdir(mode=0o700, exist_ok=True)
    head = HeadProcess(make_config(directory, **changes), path / "log", env or {}, **(options or {}))
    try:
        yield head
    finally:
        if head.process.poll() is None:
            os.kill(head.pid, signal.SIGCONT)
            head.process.kill()
        head.process.wait(10)
        deadline = time.monotonic() + 5
        pids = [event["pid"] for event in head.named("rank.start")]
        while time.monotonic() < deadline and not all(is_gone(pid) for pid in pids):
            time.sleep(0.01)
        left = [pid for pid in pids if not is_gone(pid)]
        assert not left, f"processes left behind: {left}"


class TalkingClient:
    """A client that keeps everything it hears, by request."""

    __test__ = False

    def __init__(self, link: FrameStream) -> None:
        self.link = link
        self.hello: HeadHello | None = None
        self.tokens: dict[int, list[int]] = {}
        self.starts: dict[int, RequestStarted] = {}
        self.ends: dict[int, Message] = {}
        self.others: list[Message] = []
        self.gone: str | None = None

    def take(self, frames) -> None:
        for frame in frames:
            match frame.message:
                case TokensEmitted():
                    for request, _, index, tokens in rows_of(frame):
                        row = self.tokens.setdefault(request, [])
                        assert index == len(row), "a gap or a repeat"
                        assert request not in self.ends, "tokens after the end"
                        row.extend(tokens)
                case RequestStarted() as start:
                    self.starts[start.request] = start
                case RequestFinished(request=request) | RequestFailed(request=request):
                    assert request not in self.ends, "two ends"
                    self.ends[request] = frame.message
                case HeadHello() as hello:
                    self.hello = hello
                case other:
                    self.others.append(other)

    def submit(self, request: int, ids: list[int], **sampling: object) -> None:
        values: dict = {"max_tokens": 5, **sampling}
        self.link.post(Submit(request, 1, 0, Sampling(**values), 0, f"r{request}"), pack(ids))

    async def end_of(self, request: int, timeout_s: float = 10.0) -> Message:
        return await wait_for(lambda: self.ends.get(request), timeout_s)


@contextlib.asynccontextmanager
async def talking_client(head: HeadProcess, *, version: int = PROTOCOL_VERSION) -> AsyncIterator[TalkingClient]:
    stream = await open_unix_stream(head.directory.requests_socket)
    link = FrameStream(stream, accepts=CLIENT_FROM_HEAD, out_limit_bytes=1 << 24, stall_s=5, name="head")
    link.post(ClientHello(version, "talking"))
    client = TalkingClient(link)

    async def run() -> None:
        try:
            await run_link(link, client.take)
        except EngineError as error:
            client.gone = str(error)

    async with link, trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield client
        nursery.cancel_scope.cancel()
