"""engine relay through real pipes, and through an `ssh` that only runs the command."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.desk_thread import desk_thread
from tests.cli.terminal import environment
from transport import messages as m
from transport.wire import Frame, FrameReader, encode_frame

ENGINE = [sys.executable, "-m", "engine"]
_SSH = """#!/bin/sh
# What ssh does with HOST and a command, without the network.
while [ "$1" != "--" ]; do shift; done
shift 2
[ "$1" = engine ] && shift
exec {python} -m engine "$@"
"""


@contextlib.contextmanager
def relay(*words: str, command: list[str] = ENGINE, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*command, "relay", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env={**environment(), **environ},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def ask(process: subprocess.Popen[bytes], *questions: m.Message) -> list[Frame]:
    assert process.stdin is not None
    process.stdin.write(b"".join(b"".join(encode_frame(question)) for question in questions))
    return take(process, len(questions))


def take(process: subprocess.Popen[bytes], count: int) -> list[Frame]:
    assert process.stdout is not None
    reader, frames = FrameReader(m.OPERATOR_FROM_HEAD), []
    while len(frames) < count:
        data = os.read(process.stdout.fileno(), 65536)
        assert data, process.stderr.read()  # type: ignore[union-attr]
        reader.feed(data)
        frames += reader.take()
    return frames


@contextlib.contextmanager
def one_connection(directory: Path) -> Iterator[tuple[list[socket.socket], threading.Event]]:
    """A head that takes one connection at admin.sock and does nothing with it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "admin.sock"))
    listener.listen()
    taken: list[socket.socket] = []
    there = threading.Event()

    def accept() -> None:
        with contextlib.suppress(OSError):
            taken.append(listener.accept()[0])
            there.set()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield taken, there
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        listener.close()
        for sock in taken:
            sock.close()


def test_a_console_behind_ssh_asks_and_changes(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(_SSH.format(python=sys.executable))
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "run").mkdir()
    with desk_thread(tmp_path / "run") as head:
        command = [str(ssh), "-T", "-e", "none", "--", "host", "engine"]
        with relay("--dir", head.directory, command=command) as process:
            assert process.stderr.readline() == b"engine relay: admin.sock\n"
            heat = m.AskHeat("decode", 0, "main", 2)
            kinds = [type(frame.message) for frame in ask(process, m.AskStatus(), heat, m.AskLinks())]
            assert kinds == [m.StatusReport, m.HeatReport, m.LinksReport]
            [frame] = ask(process, m.SetDrain((1,), True, "laptop", "fans"))
            assert isinstance(frame.message, m.ActDone)
            [frame] = ask(process, m.WatchEvents(0))
            head.add_event("rank.ready", "rank=3")
            [frame] = take(process, 1)
            assert frame.message.events[-1].name == "rank.ready"
            process.stdin.close()
            assert process.wait(10) == 0


def test_it_only_reads_if_that_is_wanted(tmp_path):
    with desk_thread(tmp_path) as head, relay("--read-only", ENGINE_DIR=head.directory) as process:
        assert process.stderr.readline() == b"engine relay: read.sock\n"
        [frame] = ask(process, m.SetDrain((1,), True, "laptop", "fans"))
        assert isinstance(frame.message, m.Refused) and "admin.sock" in frame.message.message


_AS_ANOTHER_USER = """
import json, os, sys
from engine import relay, relay_cli
from engine.errors import PeerGone
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
os.chdir("/")
sock, name = relay.dial_head(sys.argv[1], read_only=False)
sock.close()
os.write(1, name.encode())
"""


def test_a_user_who_may_not_change_things_gets_the_socket_that_reads(tmp_path):
    with desk_thread(tmp_path) as head:
        os.chmod(os.path.join(head.directory, "admin.sock"), 0o000)
        os.chmod(os.path.join(head.directory, "read.sock"), 0o666)
        parents = [head.directory]
        while os.path.dirname(parents[-1]) not in ("/", "/tmp"):
            parents.append(os.path.dirname(parents[-1]))
        modes = {path: os.stat(path).st_mode for path in parents}
        try:
            for path in parents:
                os.chmod(path, 0o755)
            done = subprocess.run(
                [sys.executable, "-c", _AS_ANOTHER_USER, head.directory], capture_output=True, text=True, timeout=30,
                check=False, env=environment(),
            )  # fmt: skip
        finally:
            for path, mode in modes.items():
                os.chmod(path, mode)
    assert (done.returncode, done.stdout) == (0, "read.sock"), done.stderr


def test_every_byte_goes_through_both_ways(tmp_path):
    data = bytes(range(256)) * 8192  # 2 MiB, both ways at once
    with one_connection(tmp_path) as (taken, there), relay("--dir", str(tmp_path)) as process:
        assert there.wait(10)

        def echo() -> None:
            while piece := taken[0].recv(65536):
                taken[0].sendall(piece)
            taken[0].shutdown(socket.SHUT_RDWR)

        def write() -> None:
            view = memoryview(data)
            while view:
                view = view[process.stdin.write(view) :]

        threads = [threading.Thread(target=echo), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        got = bytearray()
        while len(got) < len(data):
            piece = os.read(process.stdout.fileno(), 65536)
            assert piece
            got += piece
        assert got == data
        process.stdin.close()
        assert process.wait(10) == 0
        for thread in threads:
            thread.join(10)


def test_it_keeps_nothing_for_a_reader_that_stands_still(tmp_path):
    with one_connection(tmp_path) as (taken, there), relay("--dir", str(tmp_path)) as process:
        assert there.wait(10)
        head = taken[0]
        head.setblocking(False)
        sent, quiet_since = 0, time.monotonic()
        while time.monotonic() - quiet_since < 0.5:
            try:
                sent += head.send(bytes(65536))
                quiet_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert 65536 < sent < 1 << 20, "a socket's buffer, one read, a pipe"
        process.stdout.close()
        assert process.wait(10) == 0


def test_it_ends_with_the_head_and_says_so(tmp_path):
    with one_connection(tmp_path) as (taken, there), relay("--dir", str(tmp_path)) as process:
        assert there.wait(10)
        taken[0].close()
        assert process.wait(10) == 4
        assert process.stderr.read().splitlines()[-1] == f"the engine in {tmp_path} ended the connection".encode()


def test_it_ends_when_nobody_reads_any_more(tmp_path):
    with one_connection(tmp_path) as (taken, there), relay("--dir", str(tmp_path)) as process:
        assert there.wait(10)
        process.stdout.close()
        assert process.wait(10) == 0
        assert taken[0].recv(1) == b""


def test_the_last_answers_come_after_the_end_of_stdin(tmp_path):
    with one_connection(tmp_path) as (taken, there), relay("--dir", str(tmp_path)) as process:
        process.stdin.write(b"question")
        process.stdin.close()
        assert there.wait(10)
        asked = b""
        while piece := taken[0].recv(100):
            asked += piece
        assert asked == b"question"
        taken[0].sendall(b"answer")
        taken[0].close()
        assert process.stdout.read() == b"answer" and process.wait(10) == 0


def test_nothing_but_the_link_is_loaded():
    code = "import sys, json, engine.relay_cli, engine.relay; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=30, check=True, env=environment(),
    )  # fmt: skip
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"torch", "numpy", "rich", "textual", "tokenizers"}


@pytest.mark.parametrize("name", ["admin.sock", "read.sock"])
def test_a_socket_file_that_nobody_listens_on_is_no_engine(tmp_path, name):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / name))
    dead.close()
    done = subprocess.run(
        [*ENGINE, "relay", "--dir", str(tmp_path)], capture_output=True, timeout=30, check=False, env=environment(),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 4 and b"no engine answers in" in done.stderr and done.stdout == b""
