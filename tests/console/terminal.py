"""A program at a pseudo terminal of its own: a thread takes what it writes onto a screen, as fast as it is told to.

The program leads a session whose terminal this is, so ctrl-c, ctrl-z, a shell's job control and changes of size reach
it as they do at a person's terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.console.emulator import Emulator

ROOT = Path(__file__).parents[2]
CONSOLE = (sys.executable, "-m", "engine", "console")
CHUNK_BYTES = 4096
TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """Made by `open_terminal`.

    Attributes:
        process: the program.
        written: every byte that it wrote.
        rate: bytes a second that are taken; 0 takes none, infinity all.
        on_read: called with the screen after each piece, by the thread.
    """

    def __init__(
        self, command: Sequence[str], *, size: tuple[int, int], environ: Mapping[str, str], rate: float, stderr: int
    ) -> None:
        self.rate = rate
        self.written = bytearray()
        self.on_read: Callable[[Emulator], None] = lambda screen: None
        self._screen = Emulator(*size)
        self._lock = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._wanted = True
        self._master, self._slave = pty.openpty()
        self._set_size(*size)
        self.at_first = termios.tcgetattr(self._slave)
        surroundings = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "OMP_NUM_THREADS": "1"}
        for name in ("NO_COLOR", "COLUMNS", "LINES", "COLORFGBG"):
            surroundings.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *command],
            stdin=self._slave, stdout=self._slave, stderr=stderr or self._slave, cwd=ROOT,
            env={**surroundings, **environ},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._take, name="terminal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ what is seen

    def lines(self) -> list[str]:
        with self._lock:
            return self._screen.lines()

    def text(self) -> str:
        with self._lock:
            return self._screen.text()

    @property
    def modes(self) -> set[int]:
        """Private modes that are on."""
        with self._lock:
            return set(self._screen.modes)

    @property
    def is_plain(self) -> bool:
        """No alternate screen, no mouse, a cursor: nothing is left of a program."""
        with self._lock:
            return self._screen.is_plain

    @property
    def is_sane(self) -> bool:
        """The terminal's own settings (echo, lines, signals) are as at the start."""
        return termios.tcgetattr(self._slave) == self.at_first

    def wait(self, wanted: str | Callable[[str], object], within_s: float = 20.0, what: str = "") -> str:
        """Until the screen matches a regular expression or satisfies a function of its text; returns that text."""
        happened = wanted if callable(wanted) else (lambda text: re.search(wanted, text))
        limit = time.monotonic() + within_s
        with self._lock:
            while True:
                text = self._screen.text()
                if happened(text):
                    return text
                if self._error is not None:
                    raise self._error
                left = limit - time.monotonic()
                is_over = self.process.poll() is not None and not self._thread.is_alive()
                assert left > 0 and not is_over, f"not seen within {within_s:g} s: {what or wanted}\n{text}"
                self._lock.wait(min(left, 0.25))

    # ------------------------------------------------------------ what is done

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self._master, key.encode())

    def resize(self, width: int, height: int) -> None:
        with self._lock:
            self._screen.resize(width, height)
            self._set_size(width, height)

    def _set_size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def end(self, within_s: float = 10.0) -> int:
        """Waits until the program has left and all that it wrote is on the screen; its exit code."""
        code = self.process.wait(within_s)
        before = -1
        while len(self.written) != before:
            before = len(self.written)
            with self._lock:
                self._lock.wait(0.1)
        if self._error is not None:
            raise self._error
        return code

    def close(self) -> None:
        """Ends what is left of the program, and all that it has started at this terminal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._wanted = False
        self._thread.join()
        os.close(self._master)
        os.close(self._slave)

    # ------------------------------------------------------------ the thread

    def _take(self) -> None:
        credit, before = 0.0, time.monotonic()
        try:
            while self._wanted:
                now = time.monotonic()
                credit = min(credit + self.rate * (now - before), 2.0 * CHUNK_BYTES)
                before = now
                if credit < CHUNK_BYTES or not select.select([self._master], [], [], 0.05)[0]:
                    time.sleep(0 if self.rate > 1e9 else 0.002)
                    continue
                data = os.read(self._master, CHUNK_BYTES)
                credit -= len(data)
                with self._lock:
                    self.written += data
                    self._screen.feed(data)
                    self.on_read(self._screen)
                    self._lock.notify_all()
        except BaseException as error:  # told to whoever waits
            with self._lock:
                self._error = error
                self._lock.notify_all()


@contextlib.contextmanager
def open_terminal(
    *command: str, size: tuple[int, int] = (80, 24), rate: float = 1e12, stderr: int = 0, **environ: str
) -> Iterator[Terminal]:
    """A terminal with a program at it; what is left of it ends with the block.

    Args:
        size: width and height.
        rate: bytes a second that the terminal takes.
        stderr: descriptor for it; the terminal itself if 0.
        environ: variables beyond, or instead of, those of this process.
    """
    terminal = Terminal(command, size=size, environ=environ, rate=rate, stderr=stderr)
    try:
        yield terminal
    finally:
        terminal.close()
