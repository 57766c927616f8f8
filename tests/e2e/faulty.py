"""FaultyCluster: head and ranks as real processes, a saboteur in each rank, a requester, and what all of them said.

The ranks are production code; `sabotage/sitecustomize.py` in their processes watches their transitions and does what
`arm` says. One cluster takes many faults, one after another.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import trio

from engine.actors.client import HeadClient, Row, run_head_client
from engine.cluster import PrivateCluster, start_cluster
from engine.faces.admin import open_operator
from engine.settings import resolve_config
from tests.e2e.batch_process import MARK, Growing, find_left, processes_of
from tests.e2e.requester import POLL_S, Book, make_row
from transport.errors import PeerGone
from transport.messages import ResetCache, StatusReport
from transport.unix import open_unix_stream

SETTLE_S = 40.0
"""For a fault to be over: a stopped rank takes heartbeat_s and more to be found, then a new life starts."""
NUM_SLABS = 24
SIZES = ("num_pages=64", f"num_slabs={NUM_SLABS}", "max_model_tokens=1024", "limits.prefill_chunk_tokens=128")


class FaultyCluster:
    """Made by `open_cluster`.

    Attributes:
        mark: value of the environment variable `MARK` in all its processes.
        place: where saboteurs read and write. directory: the head's runtime directory.
        head_pid: its head's process.
    """

    def __init__(self, inner: PrivateCluster, place: Path, log: Path, mark: str, num_slabs: int) -> None:
        self.book = Book()
        self._num_slabs = num_slabs
        self.mark = mark
        self.place, self.directory, self.head_pid = place, Path(inner.requests_path).parent, inner.process.pid
        self._inner, self._place = inner, place
        self._log, self._marks = Growing(log), Growing(place / "marks.jsonl")
        self._events: list[dict[str, Any]] = []
        self._marked: list[dict[str, Any]] = []
        self._ids = itertools.count()
        self._truth: dict[bytes, list[int]] = {}

    # ------------------------------------------------------------ what happened

    def events(self, *names: str, since_ns: int = 0) -> list[dict[str, Any]]:
        """Log events of these names, with their time as `at_ns` of the monotonic clock (milliseconds exact)."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        for line in self._log.new_lines():
            if line.startswith(b"{"):
                event = json.loads(line)
                at = datetime.datetime.fromisoformat(event["ts"]).timestamp()
                self._events.append({**event, "at_ns": int(at * 1e9) - offset_ns})
        return [event for event in self._events if event["event"] in names and event["at_ns"] >= since_ns - 1_000_000]

    def marks(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """What the saboteur wrote down."""
        self._marked += [json.loads(line) for line in self._marks.new_lines()]
        return [mark for mark in self._marked if {"what": what, **fields}.items() <= mark.items()]

    def said(self) -> str:
        return self._log.path.read_text()

    async def status(self) -> StatusReport:
        async with open_operator(str(Path(self._inner.requests_path).with_name("read.sock"))) as head:
            return await head.ask_status()

    async def wait_until(self, happened: Callable[[], Any], what: str, within_s: float = SETTLE_S) -> None:
        """Polls for what other processes do."""
        with trio.move_on_after(within_s) as scope:
            while not happened():
                assert self._inner.process.poll() is None, f"the head ended before {what}: {self.said()[-6000:]}"
                await trio.sleep(POLL_S)
        assert not scope.cancelled_caught, f"never happened: {what}: {self.said()[-6000:]}"

    async def wait_free(self, generations: dict[int, int], within_s: float = SETTLE_S) -> StatusReport:
        """Until every rank is ready in at least these lives, and all its memory is free."""
        report = None
        with trio.move_on_after(within_s):
            while True:
                report = await self.status()
                if all(
                    rank.state == "ready"
                    and rank.generation >= generations.get(rank.rank, 1)
                    and rank.snapshot is not None
                    and rank.snapshot.pages_available == rank.snapshot.pages_total
                    and rank.snapshot.slabs_free + rank.snapshot.slabs_cached == self._num_slabs
                    for rank in report.ranks
                ):
                    return report
                await trio.sleep(4 * POLL_S)
        raise AssertionError(f"not idle, or memory is not free: {report}\n{self.said()[-6000:]}")

    # ------------------------------------------------------------ what is done

    async def forget(self) -> None:
        """Empties the prefix caches, so that what was computed before is computed again, chunk by chunk."""
        async with open_operator(str(Path(self._inner.requests_path).with_name("admin.sock"))) as head:
            await head.ask_act(ResetCache(host=socket.gethostname(), reason="prompts are to be in work for long"))

    async def arm(self, *orders: dict[str, Any]) -> list[int]:
        """Tells the saboteurs what to do next, instead of what they were told before; returns the orders' numbers.

        Args:
            orders: of each what `Saboteur` reads of it; its number and the pids of all ranks are added.
        """
        pids = {str(one.rank): one.pid for one in (await self.status()).ranks}
        numbered = [{**order, "id": next(self._ids), "pids": pids} for order in orders]
        whole = self._place / "armed.new"
        whole.write_text(json.dumps(numbered))
        os.replace(whole, self._place / "armed.json")
        return [order["id"] for order in numbered]

    async def finish(self, rows: list[Row], within_s: float = SETTLE_S) -> None:
        """Until every row is answered; then nothing may have been answered twice."""
        await self.wait_until(lambda: self.book.done.issuperset(rows), "all answers", within_s)
        assert all(count == 1 for count in self.book.ends.values()), "a submission was answered twice"

    def check_texts(self, rows: list[Row]) -> None:
        """The rows' tokens are those of the undisturbed run."""
        wrong = [
            row.prompt[:16] for row in rows if row not in self.book.given_up and list(row.generated) != self.truth(row)
        ]
        assert not wrong, f"{len(wrong)} of {len(rows)} requests have other tokens than without a fault"

    def truth(self, row: Row) -> list[int]:
        return self._truth[row.prompt][: row.sampling.max_tokens]

    async def learn(self, prompts: list[list[int]], max_tokens: int) -> None:
        """The undisturbed run."""
        rows = [await self.book.submit(make_row(prompt, max_tokens)) for prompt in prompts]
        await self.finish(rows)
        assert not self.book.failures
        for row in rows:
            assert len(row.generated) == max_tokens
            self._truth[row.prompt] = list(row.generated)

    def find_down(self, pid: int) -> dict[str, Any] | None:
        """The log event of that process's confirmed death."""
        return next((event for event in self.events("rank.down") if event["pid"] == pid), None)

    # ------------------------------------------------------------ its connection

    async def run_client(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        stream = await open_unix_stream(self._inner.requests_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.book.run_retries)

            async def talk(*, task_status: trio.TaskStatus[HeadClient] = trio.TASK_STATUS_IGNORED) -> None:
                with contextlib.suppress(PeerGone):
                    await run_head_client(stream, self.book, name="faults", task_status=task_status)
                nursery.cancel_scope.cancel()

            self.book.attach(await nursery.start(talk))
            task_status.started()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Of processes that are started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.asynccontextmanager
async def open_cluster(
    log: Path, *, prefill: int = 2, decode: int = 2, ucx_tls: str = "", plant: str = "", sets: tuple[str, ...] = ()
) -> AsyncIterator[FaultyCluster]:
    """A cluster with saboteurs in its ranks; afterwards no process of it is left.

    Args:
        log: file for what head and ranks say.
        ucx_tls: transports that UCX may take; empty: its own choice.
        plant: a bug for the decode ranks (see `patch_tables`).
        sets: `--set` values beyond `SIZES`, or instead of them.
    """
    mark = uuid.uuid4().hex
    pools = (f"pools.prefill.ranks={prefill}", f"pools.decode.ranks={decode}")
    # A later fault of this cluster shall not wait longer for a rank's next life than the first one.
    patience = ("limits.restarts=1000", "limits.restart_window_s=1s", "log.format=json", "fabric=nixl")
    values = dict(word.split("=", 1) for word in (*SIZES, *pools, *patience, *sets))
    config = resolve_config(None, flags={}, sets=[f"{key}={value}" for key, value in values.items()], environ={}).config
    path = os.pathsep.join(filter(None, [str(Path(__file__).with_name("sabotage")), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="faults-") as place, log.open("ab") as stderr:
        variables = {"PYTHONPATH": path, "HANDOFF_FAULTS": place, MARK: mark, "OMP_NUM_THREADS": "1"}
        variables |= {"UCX_TLS": ucx_tls} if ucx_tls else {}
        variables |= {"HANDOFF_PLANT": plant} if plant else {}
        starting = start_cluster(config, stderr=stderr)
        with environment(**variables):
            inner = await starting.__aenter__()
        try:
            await inner.wait_ready(60)
            cluster = FaultyCluster(inner, Path(place), log, mark, int(values["num_slabs"]))
            async with trio.open_nursery() as nursery:
                await nursery.start(cluster.run_client)
                await cluster.wait_free({})
                yield cluster
                nursery.cancel_scope.cancel()
        finally:
            for pid in processes_of(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            with trio.CancelScope(shield=True):
                await starting.__aexit__(None, None, None)
                left = await find_left(mark)
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
