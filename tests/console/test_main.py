"""python -m console and engine console: options, the terminal they need, a whole run at a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from console.__main__ import choose_theme, main, parse_options
from tests.console.stubhead import Scene, StubHead, make_heat
from transport.messages import AskTraffic

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environ", "theme"),
    [
        ({}, "dark"),
        ({"NO_COLOR": "1"}, "mono"),
        ({"NO_COLOR": ""}, "dark"),
        ({"TERM": "linux"}, "ansi"),
        ({"COLORFGBG": "0;15"}, "light"),
        ({"COLORFGBG": "15;0"}, "dark"),
    ],
)
def test_the_theme_that_the_terminal_asks_for(environ, theme):
    assert choose_theme(environ) == theme


def test_options():
    options = parse_options(["--connect", "unix:/x", "--read-only", "--hz", "4", "--theme", "light"])
    assert (options.connect, options.read_only, options.hz, options.theme) == ("unix:/x", True, 4.0, "light")


@pytest.mark.parametrize("arguments", [[], ["--connect", "unix:/x", "--hz", "99"], ["--connect", "x", "--theme", "?"]])
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_no_terminal(capsys):
    assert main(["--connect", "unix:/x"]) == 2
    assert "must be a terminal" in capsys.readouterr().err
    assert main(["--connect", "tcp:x"]) == 2
    assert "neither unix:PATH" in capsys.readouterr().err


def test_engine_console_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-m", "engine", "console"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 2 and "must be a terminal" in done.stderr and not done.stdout


def test_engine_console_knows_its_way(monkeypatch, tmp_path):
    """What it becomes: the same interpreter, and never a `console` of the current directory."""
    from engine.console_cli import console_command

    monkeypatch.chdir(tmp_path)
    assert console_command() == [sys.executable, "-P", "-m", "console"]
    monkeypatch.chdir(ROOT)
    assert console_command() == [sys.executable, "-m", "console"]


class Terminal:
    """A pseudo terminal with a program at it."""

    def __init__(self, command: list[str], width: int = 80, height: int = 24) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(slave)
        environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environ, cwd=ROOT, start_new_session=True
        )
        self.slave = slave
        self.written = b""

    def read(self, seconds: float, rate: float = 0.0) -> None:
        """Takes what is written for so long; `rate` bytes in a second at most, if it is not 0."""
        end = time.monotonic() + seconds
        began, taken = time.monotonic(), 0
        while time.monotonic() < end:
            if rate and taken > rate * (time.monotonic() - began):
                time.sleep(0.005)
                continue
            if select.select([self.master], [], [], 0.02)[0]:
                data = os.read(self.master, 2048 if rate else 65536)
                taken += len(data)
                self.written += data

    def until(self, text: str, limit_s: float = 20.0) -> None:
        end = time.monotonic() + limit_s
        while text.encode() not in self.written:
            assert time.monotonic() < end, f"{text!r} was not written: {self.written[-2000:]!r}"
            assert self.process.poll() is None, self.process.stderr.read()
            self.read(0.05)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Waits until it has left."""
        limit = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < limit:
            self.read(0.05)
        self.process.kill()
        code = self.process.wait()
        self.read(0.05)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


def at_terminal(body, *, arguments=(), width=80, height=24):
    """Runs `body(terminal, head)` in a thread while the head serves."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            head = StubHead(directory, Scene())
            await head.start()
            command = [sys.executable, "-m", "engine", "console", "--dir", directory, *arguments]
            terminal = Terminal(command, width, height)
            try:
                await asyncio.to_thread(body, terminal, head)
            finally:
                terminal.close()
                await head.stop()

    asyncio.run(run())


@pytest.mark.parametrize("leave", ["q", "\x03", signal.SIGTERM])
def test_it_comes_and_leaves_without_a_trace(leave):
    def body(terminal, head):
        terminal.until("prod-a")
        terminal.until("ADMIN")
        if isinstance(leave, str):
            terminal.press(leave)
        else:
            terminal.process.send_signal(leave)
        assert terminal.end() == 0
        # The terminal is as it was: the first screen, a cursor, no mouse, line mode with echo.
        for code in (b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1003l"):
            assert code in terminal.written[-400:]
        assert termios.tcgetattr(terminal.slave)[3] == terminal.before[3]

    at_terminal(body)


def test_only_reading_at_a_terminal():
    def body(terminal, head):
        terminal.until("READ-ONLY")
        terminal.press("6")
        terminal.until("Balance")
        terminal.press("q")
        assert terminal.end() == 0

    at_terminal(body, arguments=["--read-only", "--theme", "mono"])


def test_it_is_suspended_and_comes_back():
    def body(terminal, head):
        terminal.until("prod-a")
        terminal.press("\x1a")
        state = Path(f"/proc/{terminal.process.pid}/stat")
        limit = time.monotonic() + 5
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < limit, "it was not stopped"
            terminal.read(0.02)
        terminal.read(0.1)
        # The terminal belongs to whoever suspended it.
        assert b"\x1b[?1049l" in terminal.written[-400:]
        assert termios.tcgetattr(terminal.slave)[3] == terminal.before[3]
        terminal.written = b""
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("prod-a")
        terminal.press("q")
        assert terminal.end() == 0

    at_terminal(body)


def test_a_slow_terminal_gets_fewer_refreshes_and_no_old_ones():
    """A terminal of 30 kB/s can not take ten pictures of changing loads in a second. There are fewer rounds then, and
    what it shows is never older than two of them: nothing waits before it."""
    chance = np.random.default_rng(1)
    born: list[float] = []

    def changing_heat(ask, part):
        report, blob = make_heat(ask, part)
        loads = (chance.random(report.ranks * report.layers) * 3).astype("<f4").tobytes()
        return report, loads + blob[len(loads) :]

    def next_status(head):
        # The cluster's name is in the header: it tells when what is shown was said.
        head.scene.status = msgspec.structs.replace(head.scene.status, cluster=f"c{len(born):05d}")
        born.append(time.monotonic())

    def body(terminal, head):
        terminal.until("prod-a")
        head.scene.heat = changing_heat
        terminal.press("3")
        terminal.read(0.3, 30_000)
        ages = []
        seen = -1
        began, taken = time.monotonic(), 0
        tail = b""
        asked = len(head.asked)
        while time.monotonic() < began + 4.0:
            if not born or time.monotonic() - born[-1] > 0.02:
                next_status(head)
            if taken > 30_000 * (time.monotonic() - began) or not select.select([terminal.master], [], [], 0.01)[0]:
                time.sleep(0.001)
                continue
            data = os.read(terminal.master, 512)
            taken += len(data)
            tail = (tail + data)[-1024:]
            for found in re.findall(rb"c(\d{5})", tail):
                if int(found) > seen:
                    seen = int(found)
                    ages.append(time.monotonic() - born[seen])
        rounds = sum(isinstance(message, AskTraffic) for message in head.asked[asked:])
        assert taken > 60_000, "the terminal was not the bottleneck"
        assert 2 <= len(ages) <= rounds + 2 and rounds <= 20
        # Half a second beside it for a machine that does other things too.
        assert max(ages) < 2 * 4.0 / rounds + 0.5, (ages, rounds)
        terminal.press("q")

    at_terminal(body, arguments=["--hz", "10"], width=200, height=60)
