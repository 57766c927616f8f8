"""The console at a terminal that suspends it, changes its size, stops or is slow, and what it leaves behind."""

from __future__ import annotations

import itertools
import os
import random
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.console.bigscene import BigHead
from tests.console.emulator import ALTERNATE, CURSOR, MOUSE, Emulator
from tests.console.servedscene import serve_head, serve_scene
from tests.console.stubhead import Scene
from tests.console.terminal import CONSOLE, ROOT, Terminal, open_terminal

SLOW_BYTES = 200_000
"""A second, of a terminal that is far away."""


def wait_modes(terminal: Terminal, *, is_on: bool) -> None:
    """Until the program has the screen, or has given it back."""
    terminal.wait(lambda text: (ALTERNATE in terminal.modes) == is_on, what="another screen")


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("key", ["q", "\x03", ":quit\r"])
@pytest.mark.parametrize("has_head", [True, False])
def test_it_leaves_without_a_trace(key: str, has_head: bool, tmp_path: Path) -> None:
    with serve_scene(Scene()) as head:
        directory = head.directory if has_head else str(tmp_path)
        with open_terminal(*CONSOLE, "--dir", directory) as terminal:
            terminal.wait("prod-a.*ADMIN" if has_head else "no engine answers")
            assert {ALTERNATE} <= terminal.modes and MOUSE & terminal.modes and CURSOR not in terminal.modes
            assert not terminal.is_sane, "a console reads keys one by one"
            terminal.press(key)
            assert terminal.end() == 0
            assert terminal.is_plain, terminal.modes
            assert terminal.is_sane
            assert not terminal.text().strip(), "something of it is left on the first screen"


def test_ctrl_c_says_no_to_a_question_and_then_leaves() -> None:
    with serve_scene(Scene()) as head, open_terminal(*CONSOLE, "--dir", head.directory) as terminal:
        terminal.wait("prod-a.*ADMIN")
        terminal.press("6")
        terminal.wait("mode manual")
        terminal.press("a")
        terminal.wait(r"\[y\] yes")
        terminal.press("\x03")
        terminal.wait(lambda text: "[y] yes" not in text)
        assert terminal.process.poll() is None
        terminal.press("\x03")
        assert terminal.end() == 0 and terminal.is_plain and not head.acts


# ---------------------------------------------------------------- a shell's job


def test_a_shell_suspends_it_and_brings_it_back(tmp_path: Path) -> None:
    (tmp_path / "inputrc").write_text("set enable-bracketed-paste off\n")
    surroundings = {"INPUTRC": str(tmp_path / "inputrc"), "PS1": "shell> "}
    with (
        serve_scene(Scene()) as head,
        open_terminal("bash", "--norc", "--noprofile", "-i", **surroundings) as terminal,
    ):
        terminal.wait("shell>")
        command = " ".join(shlex.quote(word) for word in (*CONSOLE, "--dir", head.directory))
        terminal.press(f"clear; {command}\r")
        terminal.wait("prod-a.*ADMIN")
        terminal.press("6")
        terminal.wait("mode manual")
        for _ in range(2):
            terminal.press("\x1a")
            terminal.wait(r"(?s)Stopped.*\nshell>\s*$")
            wait_modes(terminal, is_on=False)
            # The shell has a terminal that it can use: echo, lines, signals; no mouse; a cursor.
            assert terminal.is_plain, terminal.modes
            terminal.press("clear; stty -a\r")
            said = terminal.wait("echoctl")
            assert {"icanon", "echo", "isig", "icrnl", "opost"} <= set(said.replace(";", " ").split()), said
            terminal.press("clear; fg\r")
            wait_modes(terminal, is_on=True)
            # The same screen, and fresh.
            terminal.wait(r"(?s)prod-a.*ADMIN.*age 0\.\d.*mode manual")
            assert MOUSE & terminal.modes and CURSOR not in terminal.modes
        terminal.press("q")
        wait_modes(terminal, is_on=False)
        # Not before the prompt: what is typed while the console leaves, the system may throw away.
        terminal.wait(r"\nshell>\s*$")
        terminal.press("echo code $?\r")
        terminal.wait("code 0")
        terminal.press("exit\r")
        assert terminal.end() == 0


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_wild_changes_of_size(seed: int) -> None:
    chance = random.Random(seed)
    with serve_scene(Scene()) as head, open_terminal(*CONSOLE, "--dir", head.directory, "--hz", "10") as terminal:
        terminal.wait("prod-a.*ADMIN")
        # A screen that does not scroll: which rows others show depends on the smallest size they had.
        terminal.press("6")
        terminal.wait("mode manual")
        settled = _settle(terminal)
        for _ in range(60):
            terminal.resize(chance.randint(20, 220), chance.randint(5, 70))
            if chance.random() < 0.3:
                terminal.press(chance.choice("1234567"))
            time.sleep(chance.random() * 0.2)
            assert terminal.process.poll() is None, terminal.text()
        terminal.resize(80, 24)
        terminal.press("6")
        terminal.wait(lambda text: text.splitlines()[2:] == settled, what="the screen as it was before")
        terminal.press("q")
        assert terminal.end() == 0 and terminal.is_plain


def _settle(terminal: Terminal) -> list[str]:
    """What stands below the first two lines, when it stays the same."""
    before: list[str] = []
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        now = terminal.text().splitlines()[2:]
        if now == before and now:
            return now
        before = now
        time.sleep(0.5)
    raise AssertionError("it never comes to rest")


# ---------------------------------------------------------------- a slow terminal


def test_a_slow_terminal_is_never_more_than_two_rounds_behind() -> None:
    """At a terminal of 200 kB/s, rounds of ten a second whose pictures are larger than that: there are fewer of them,
    at most one picture waits, and at most one set of answers is asked for. One that stops altogether stops the rounds.
    """
    seen_at: dict[int, float] = {}
    ages: list[float] = []

    def look(screen: Emulator) -> None:
        first = screen.lines()[0]
        if found := re.search(r"c(\d{5})", first):
            seen_at.setdefault(int(found[1]), time.monotonic())
        if found := re.search(r"age (\d+\.\d)s", first):
            ages.append(float(found[1]))

    with (
        serve_head(BigHead) as head,
        open_terminal(*CONSOLE, "--dir", head.directory, "--hz", "10", size=(200, 60)) as terminal,
    ):
        terminal.wait(r"c\d{5}.*ADMIN")
        terminal.press("3")
        terminal.wait("hottest expert")
        terminal.rate = SLOW_BYTES
        time.sleep(1.0)  # what was on its way has come
        terminal.on_read = look
        first, taken, began = len(head.asked_at), len(terminal.written), time.monotonic()
        time.sleep(4.0)
        last, took = len(head.asked_at), time.monotonic() - began
        taken = len(terminal.written) - taken
        rounds = last - first
        assert taken / took > 0.7 * SLOW_BYTES, f"the terminal was not what held it up: {taken / took:.0f} B/s"
        assert 4 <= rounds < 8 * took, rounds
        shown = sorted(number for number in seen_at if first <= number < last - 2)
        assert len(shown) >= rounds // 2
        for number in shown:
            assert seen_at[number] <= head.asked_at[number + 2], f"picture {number} came after two more rounds"
        longest = max(late - early for early, late in itertools.pairwise(head.asked_at[first:last]))
        assert max(ages) <= 2 * longest + 0.1, (max(ages), longest)
        assert not any(head.unsent[first:]), "answers waited for the console"

        terminal.rate = 0.0
        time.sleep(1.0)
        before = len(head.asked_at)
        time.sleep(1.5)
        assert len(head.asked_at) - before <= 1, "it asks although nobody reads"
        terminal.rate = 1e12
        newest = len(head.asked_at) + 3
        terminal.wait(lambda text: max(seen_at, default=0) >= newest, what="newer rounds")
        terminal.press("q")
        assert terminal.end() == 0 and terminal.is_plain


# ---------------------------------------------------------------- a terminal that others wrote


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_tmux_shows_the_same(tmp_path: Path) -> None:
    """The screen of these tests and a terminal that knows nothing of them agree about every cell."""

    def tmux(*words: str) -> str:
        return subprocess.run(
            ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", *words],
            capture_output=True, text=True, cwd=ROOT, check=True, timeout=20,
            env={**os.environ, "TMUX": "", "LC_ALL": "C.UTF-8"},
        ).stdout  # fmt: skip

    def below(text: str) -> list[str]:
        return [line.rstrip() for line in text.splitlines()[1:]]  # the first line has the time of day

    with serve_scene(Scene()) as head, open_terminal(*CONSOLE, "--dir", head.directory) as terminal:
        command = " ".join(shlex.quote(word) for word in (*CONSOLE, "--dir", head.directory))
        tmux("new-session", "-d", "-s", "console", "-x", "80", "-y", "24", command)
        try:
            for key in "64253":
                terminal.press(key)
                tmux("send-keys", "-t", "console", key)
                terminal.wait(f" {key} [A-Z][a-z]+ ")
                limit = time.monotonic() + 20
                while below(there := tmux("capture-pane", "-p", "-t", "console")) != below(terminal.text()):
                    assert time.monotonic() < limit, f"{there}\n{terminal.text()}"
                    time.sleep(0.1)
            tmux("send-keys", "-t", "console", "q")
        finally:
            subprocess.run(["tmux", "-S", str(tmp_path / "tmux"), "kill-server"], capture_output=True, check=False)
