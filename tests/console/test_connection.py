"""The link: pull, loss and return, another head, another version, gaps, permissions."""

from __future__ import annotations

import asyncio
import os
import stat

import msgspec
import pytest
import uvloop

from console.connection import Connection, Gate
from console.dial import Target, choose_socket, dial, parse_target, ssh_command
from console.view import ClusterView
from tests.console.stubhead import Scene, StubHead, make_event, make_status, open_console
from transport.errors import PeerGone
from transport.link import FrameLink
from transport.messages import (
    OPERATOR_FROM_HEAD,
    AskExperts,
    AskLinks,
    AskStatus,
    AskTraffic,
    Rebalance,
    Refused,
    WatchEvents,
)

# ---------------------------------------------------------------- where the head is


def test_targets():
    assert parse_target("unix:/run/x", read_only=False) == Target("unix", "/run/x", "/run/x", False)
    assert parse_target("unix:/run/x/read.sock", read_only=True).directory == "/run/x"
    found = parse_target("ssh://me@host:2222?dir=/run/a b", read_only=True)
    assert (found.place, found.directory, found.address) == ("me@host:2222", "/run/a b", "ssh://me@host:2222")
    assert ssh_command(found) == [
        *("ssh", "-T", "-o", "BatchMode=yes", "-e", "none", "-p", "2222", "--", "me@host"),
        *("engine", "relay", "--dir", "'/run/a b'", "--read-only"),
    ]
    assert ssh_command(parse_target("ssh://h", read_only=False))[-3:] == ["h", "engine", "relay"]


@pytest.mark.parametrize(
    "text", ["", "unix:", "host", "tcp://h", "ssh://", "ssh://-oProxyCommand=x", "ssh://h/path", "ssh://h?port=1"]
)
def test_targets_that_are_none(text):
    with pytest.raises(ValueError, match="--connect"):
        parse_target(text, read_only=False)


def test_the_socket_is_chosen_by_permission(tmp_path):
    target = Target("unix", str(tmp_path))
    admin = tmp_path / "admin.sock"
    assert choose_socket(target) == (str(tmp_path / "read.sock"), False)
    admin.touch()
    assert choose_socket(target) == (str(admin), True)
    assert choose_socket(Target("unix", str(tmp_path), read_only=True)) == (str(tmp_path / "read.sock"), False)
    assert choose_socket(Target("unix", str(tmp_path / "read.sock"))) == (str(tmp_path / "read.sock"), False)
    if os.getuid() != 0:
        admin.chmod(0)
        assert choose_socket(target) == (str(tmp_path / "read.sock"), False)


# ---------------------------------------------------------------- pull


class Bench:
    """A connection without an app: what its gate is asked is written down, and the test opens it."""

    def __init__(self, directory: str) -> None:
        self.view = ClusterView()
        self.steps: list[str] = []
        self.drained = asyncio.Event()
        self.drained.set()
        self.pause_s = 0.0
        self.link = Connection(
            Target("unix", directory),
            self.view,
            Gate(
                questions=lambda: (AskLinks(),),
                draw=self._draw,
                changed=lambda: self.steps.append("changed"),
                noted=lambda: self.steps.append("noted"),
                drained=self._drained,
                period=lambda: self.pause_s,
                pause=lambda seconds: seconds,
                now=lambda: asyncio.get_running_loop().time(),
                wall_ms=lambda: 0,
            ),
        )

    async def _draw(self) -> None:
        self.steps.append("draw")

    async def _drained(self) -> None:
        self.steps.append("drained?")
        await self.drained.wait()

    async def __aenter__(self) -> Bench:
        self.task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.002)


def with_head(body, **options):
    """Runs `body(head, tmp directory)`."""
    import tempfile

    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            head = StubHead(directory, Scene())
            await head.start(**options)
            try:
                await body(head)
            finally:
                await head.stop()

    asyncio.run(run())


def test_a_round_waits_for_the_terminal():
    async def body(head):
        async with Bench(head.directory) as bench:
            await until(lambda: bench.link.rounds >= 1)
            bench.drained.clear()
            await until(lambda: bench.steps[-1] == "drained?")
            await asyncio.sleep(0.01)
            asked, rounds = len(head.asked), bench.link.rounds
            await asyncio.sleep(0.03)  # many periods of none
            assert (len(head.asked), bench.link.rounds) == (asked, rounds)
            bench.drained.set()
            await until(lambda: bench.link.rounds > rounds + 1)

    with_head(body)


def test_a_round_waits_for_all_answers_and_for_its_period():
    async def body(head):
        async with Bench(head.directory) as bench:
            await until(lambda: bench.link.rounds >= 1)
            head.is_silent = True
            await until(lambda: bench.view.asked_at > 0)
            await asyncio.sleep(0.02)
            asked = len(head.asked)
            await asyncio.sleep(0.02)
            assert len(head.asked) == asked and bench.view.asked_at
        bench = Bench(head.directory)
        bench.pause_s = 60.0
        head.is_silent = False
        async with bench:
            await until(lambda: bench.link.rounds == 1)
            await asyncio.sleep(0.02)
            assert bench.link.rounds == 1
            bench.link.hurry()
            await until(lambda: bench.link.rounds == 2)

    with_head(body)


def test_what_is_asked_in_a_round():
    async def body(head):
        bench = Bench(head.directory)
        bench.pause_s = 60.0
        async with bench:
            await until(lambda: bench.link.rounds == 1)
        # First who is there, then events, then the round.
        assert head.asked == [
            *(AskStatus(), WatchEvents(after=0)),
            *(AskStatus(), AskExperts(), AskTraffic(), AskLinks()),
        ]
        assert bench.steps.count("draw") == 1 and bench.view.answered_at > 0

    with_head(body)


def test_a_part_that_is_gone_is_no_broken_link():
    async def body(head):
        head.scene.experts = type(head.scene.experts)(parts=())
        async with open_console(head.scene) as desk:
            assert desk.app.view.link.phase == "live"

    with_head(body)


def test_an_act_has_a_link_of_its_own():
    async def body(head):
        async with Bench(head.directory) as bench:
            await until(lambda: bench.link.rounds >= 1)
            head.scene.refuse = "not today"
            act = Rebalance("apply", "decode", 0, "main", 18, "", "me", "here", "because")
            answer = await bench.link.act(act)
            assert isinstance(answer, Refused) and head.acts == [act]
            rounds = bench.link.rounds
            await until(lambda: bench.link.rounds > rounds)
            assert bench.view.link.phase == "live"

    with_head(body)


def test_the_reading_socket_refuses_acts():
    async def body(head):
        dialled = await dial(Target("unix", head.directory, read_only=True))
        assert not await dialled.is_admin()
        await dialled.aclose()

    with_head(body, has_admin=False)


def test_nobody_listens(tmp_path):
    async def body():
        with pytest.raises(PeerGone, match="No such file"):
            await dial(Target("unix", str(tmp_path)))

    asyncio.run(body())


def test_ssh_speaks_the_same_frames(tmp_path, monkeypatch):
    """A program called ssh that relays to the head's socket, as the real one and the relay would together."""
    relay = tmp_path / "ssh"
    relay.write_text(
        "#!/usr/bin/env python3\n"
        "import os, select, socket, sys\n"
        "sys.stderr.write('engine relay: admin.sock\\n'); sys.stderr.flush()\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(os.environ['HEAD'] + '/admin.sock')\n"
        "while True:\n"
        "    for fd in select.select([0, s], [], [])[0]:\n"
        "        data = os.read(0, 65536) if fd == 0 else s.recv(65536)\n"
        "        if not data: sys.exit(0)\n"
        "        s.sendall(data) if fd == 0 else os.write(1, data)\n"
    )
    relay.chmod(relay.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def body(head):
        monkeypatch.setenv("HEAD", head.directory)
        view = ClusterView()
        bench = Bench(head.directory)
        bench.link = Connection(Target("ssh", "somewhere"), view, bench.link._gate)
        async with bench:
            await until(lambda: view.answered_at > 0)
            assert view.link.is_admin and view.link.address == "ssh://somewhere"
            assert view.pairs is not None

    with_head(body)


def test_what_ssh_says_is_told(tmp_path, monkeypatch):
    relay = tmp_path / "ssh"
    relay.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    relay.chmod(relay.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def body(head):
        bench = Bench(head.directory)
        bench.link = Connection(Target("ssh", "somewhere"), bench.view, bench.link._gate)
        async with bench:
            await until(lambda: bench.view.link.phase == "never")
            assert "Permission denied" in bench.view.link.why

    with_head(body)


# ---------------------------------------------------------------- loss and return


def test_a_head_that_is_killed_and_comes_back():
    async def body():
        async with open_console() as desk:
            app, view = desk.app, desk.app.view
            desk.head.push(make_event(4, text="before"))
            await desk.until(lambda: view.last_seq == 4)
            await desk.head.stop()
            await desk.until(lambda: view.link.phase == "lost")
            assert "link lost" in desk.text("header") and "again in 1 s" in desk.text("header")
            assert "req/s" in desk.text()  # what was known stays, dimmed
            body = app.screen.query_one("#body").lines
            assert {style for line in body for _, style in line if not style.startswith("heat")} == {"gone"}
            # Another life of the head, another process, its events from 1 again.
            desk.head.scene.status = msgspec.structs.replace(desk.head.scene.status, head_pid=78, uptime_ms=900)
            desk.head.scene.events = [make_event(1, text="after")]
            rounds = app.link.rounds
            await desk.head.start()
            app.link.hurry()
            await desk.until(lambda: app.link.rounds > rounds)
            assert view.link.phase == "live" and view.heads == 2
            texts = [event.text for event in view.events]
            assert texts[-2:] == ["another head answers: pid 78", "after"] and "before" in texts
            watched = [message for message in desk.head.asked if isinstance(message, WatchEvents)]
            assert [message.after for message in watched] == [0, 0]

    asyncio.run(body())


def test_a_link_that_breaks_asks_for_the_events_since():
    async def body():
        async with open_console() as desk:
            view = desk.app.view
            await desk.until(lambda: view.last_seq == 3)
            await desk.head.stop()
            await desk.until(lambda: view.link.phase == "lost")
            await desk.head.start()
            rounds = desk.app.link.rounds
            desk.app.link.hurry()
            await desk.until(lambda: desk.app.link.rounds > rounds)
            watched = [message for message in desk.head.asked if isinstance(message, WatchEvents)]
            assert watched[-1].after == 3 and view.heads == 1
            assert [event.seq for event in view.events] == [1, 2, 3]

    asyncio.run(body())


def test_pauses_grow():
    from console.connection import BACKOFF_S

    async def body():
        async with open_console(has_head=False) as desk:
            view = desk.app.view
            await desk.until(lambda: view.link.phase == "never")
            pauses = []
            for _ in range(len(BACKOFF_S) + 1):
                pauses.append(view.link.retry_at - desk.clock.at)
                before = view.link
                desk.app.link.hurry()
                await desk.until(lambda before=before: view.link is not before)
            assert pauses == [*BACKOFF_S, BACKOFF_S[-1]]
            assert view.link.since == desk.clock.at  # the phase has begun only once

    asyncio.run(body())


def test_another_version():
    async def body():
        scene = Scene(status=make_status(version=9))
        async with open_console(scene, warm=0, wait=False) as desk:
            await desk.until(lambda: desk.app.view.link.phase == "mismatch")
            text = desk.text()
            assert "protocol 1" in text and "protocol 9" in text
            # It is not asked anything that it might not know.
            assert set(map(type, desk.head.asked)) == {AskStatus}

    asyncio.run(body())


def test_something_else_answers(tmp_path):
    async def body():
        async def talk(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(talk, tmp_path / "read.sock")
        async with Bench(str(tmp_path)) as bench:
            await until(lambda: bench.view.link.phase == "mismatch")
            assert bench.view.link.their_version == 0 and "does not speak protocol 1" in bench.view.link.why
        server.close()
        await server.wait_closed()

    asyncio.run(body())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_program_that_ended_at_once_is_peer_gone(new_loop):
    """As ssh when it is refused: its pipes are closed by the time that the link is put around them."""

    async def body():
        process = await asyncio.create_subprocess_exec(
            "true", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await process.wait()
        async with asyncio.timeout(5):
            while not process.stdin.is_closing():  # noqa: ASYNC110 - has no event
                await asyncio.sleep(0.005)
        link = FrameLink(
            process.stdout, process.stdin, accepts=OPERATOR_FROM_HEAD, out_limit_bytes=1 << 20, stall_s=1, name="ssh"
        )
        with pytest.raises(PeerGone, match="closing"):
            link.post(AskStatus())
        with pytest.raises(PeerGone, match="end of stream"):
            await link.receive()
        await link.aclose()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())
