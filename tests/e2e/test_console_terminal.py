"""The console at a terminal before a real engine: it finds skew and cures it, outlives its head, and only watches where
it may do no more."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.terminal import CONSOLE, Terminal, open_terminal
from tests.e2e.daemon import Daemon, open_daemon
from transport.nixl_fabric import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")
VERDICT = re.compile(r"decode skew (\d\.\d\d) costs ([\d.]+) (us|ms) a step; worst: d(\d+), layer (\d+), expert (\d+)")
SHOTS = os.environ.get("CONSOLE_SHOTS", "")
"""A directory for what the screens of the walk said, for reports."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with open_daemon() as daemon:
        yield daemon


def keep(name: str, text: str) -> None:
    if SHOTS:
        (Path(SHOTS) / f"{name}.txt").write_text(text + "\n")


def see(terminal: Terminal, wanted: str, within_s: float = 30.0) -> re.Match[str]:
    """The first match of a pattern that comes upon the screen."""
    found = re.search(wanted, terminal.wait(wanted, within_s))
    assert found
    return found


def test_skew_is_found_in_three_keys_and_cured(daemon: Daemon) -> None:
    with daemon.traffic(), open_terminal(*CONSOLE, "--dir", str(daemon.directory), "--hz", "4") as terminal:
        # No key: which rank, which layer, which expert, and what it costs.
        terminal.wait(lambda text: (found := VERDICT.search(text)) and float(found[1]) > 1.1, 60)
        limit = time.monotonic() + 30
        while True:
            told = daemon.part()["skew"]
            said = VERDICT.search(terminal.text())
            if said and (told["rank"], told["layer"]) == (int(said[4]), int(said[5])):
                break
            assert time.monotonic() < limit, f"the verdict {said} is not what the head says: {told}"
        assert told["max_over_mean"] == pytest.approx(float(said[1]), abs=0.05)
        keep("verdict", terminal.text())
        # One key, two keys: the same place with its own price, and the slot.
        rank, layer = f"d{said[4]}", said[5]
        terminal.press("3")
        see(terminal, rf" {rank} layer {layer}, hottest expert \d+: [\d.]+x mean, .* costs [\d.]+ (us|ms) a step")
        terminal.press("\r")
        see(terminal, rf" {rank} slot \d+: expert \d+ \(\d+ replica.* mean, [\d.]+ % of the layer's rows")

        terminal.press("6")
        see(terminal, r"no plan ─")
        terminal.press("R")
        planned = see(terminal, r"now (\d\.\d\d) → predicted (\d\.\d\d)")
        number = see(terminal, r"┌ plan (\d+), ")[1]
        see(terminal, r"risk   low")
        keep("plan", terminal.text())
        before, after = float(planned[1]), float(planned[2])
        assert after < 1 + 0.5 * (before - 1)
        terminal.press("A")
        see(terminal, rf"Apply plan {number} to decode/0 main \(\d+ slots\)\?   \[y\] yes  \[n\] no")
        terminal.press("\r", " ")
        see(terminal, rf"Apply plan {number} to decode/0 main")
        assert daemon.part()["applied"] == 0 and daemon.part()["state"] == "idle", "Enter confirmed a change"
        terminal.press("y")
        see(terminal, r"state moving")
        see(terminal, r"\d+ of \d+ slots")
        see(terminal, rf" {number} .*applied", 60)
        # What the placement came to, on the screen and from the head.
        half = 1 + 0.5 * (before - 1)
        terminal.wait(lambda text: _skew_of(text) <= half, 60, "a lower skew")
        keep("after", terminal.text())
        part = daemon.part()
        assert part["applied"] == 1 and part["skew"]["max_over_mean"] <= half + 0.02

        terminal.press("U")
        see(terminal, r"back to the placement before its last move\?\s+\[y\] yes")
        terminal.press("y")
        see(terminal, r"rolled.back", 60)
        terminal.wait(lambda text: _skew_of(text) > half, 60, "the skew of before")
        assert daemon.part()["rolled_back"] == 1
        terminal.press("q")
        assert terminal.end() == 0 and terminal.is_plain and terminal.is_sane


def _skew_of(text: str) -> float:
    found = re.search(r"decode/0 main (\d\.\d\d)", text)
    return float(found[1]) if found else 9.0


def test_it_only_watches_where_it_may_do_no_more(daemon: Daemon, tmp_path: Path) -> None:
    """By its own option; and because the kernel says so, with the same command as everybody."""
    with watched_only(daemon, tmp_path) as directory:
        for arguments in (("--dir", str(daemon.directory), "--read-only"), ("--dir", directory)):
            with open_terminal(*CONSOLE, *arguments) as terminal:
                terminal.wait(r"READ-ONLY.* age \d")
                terminal.press("6")
                terminal.wait("mode manual")
                foot = terminal.wait("6 Balance .*keys").splitlines()[-1]
                assert not re.search(r" (R plan|A apply|U back|P pause|X abort|a mode) ", foot), foot
                terminal.press(*"RAUPXa")
                terminal.press("2")
                terminal.wait(" d01 ")
                terminal.press("x")
                terminal.press("5", "x", "6")
                # What a key would have led to is there at once, so what is not there after another screen never comes.
                for text in (terminal.wait("mode manual"), _later(terminal)):
                    assert "[y]" not in text and "asked for" not in text and "READ-ONLY" in text
                terminal.press("?")
                keys = terminal.wait("One up")
                assert "changes the cluster" not in keys and "Carry the plan out" not in keys
                terminal.press("\x1b")
                _later(terminal)
                terminal.press("q")
                assert terminal.end() == 0 and terminal.is_plain
    part = daemon.part()
    assert (part["mode"], part["state"]) == ("manual", "idle")


def _later(terminal: Terminal) -> str:
    time.sleep(1.2)
    return terminal.text()


@contextlib.contextmanager
def watched_only(daemon: Daemon, tmp_path: Path) -> Iterator[str]:
    """A runtime directory of the daemon in which this user may not open admin.sock."""
    if os.geteuid():
        admin = daemon.directory / "admin.sock"
        mode = stat.S_IMODE(admin.stat().st_mode)
        admin.chmod(0)
        try:
            yield str(daemon.directory)
        finally:
            admin.chmod(mode)
    else:  # who may open everything
        (tmp_path / "read.sock").symlink_to(daemon.directory / "read.sock")
        yield str(tmp_path)


SSH = """#!/bin/sh
# What ssh does, on this host: its options, --, a host, and the words of a command.
while [ "$1" != -- ]; do shift; done
host=$2
shift 2
[ -e "$FAKE/down" ] && { echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255; }
echo $$ > "$FAKE/pid"
exec sh -c "exec $*"
"""
RELAY = """#!/bin/sh
# The engine's command at the other end, for a user who may open read.sock only while there is a file `reader`.
[ -e "$FAKE/reader" ] && set -- "$@" --read-only
exec "$PYTHON" -m engine "$@"
"""


def test_another_host_through_ssh(daemon: Daemon, tmp_path: Path) -> None:
    """Who may do what is told by the relay at the other end; a link that breaks is dialled again."""
    for name, text in (("ssh", SSH), ("engine", RELAY)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    surroundings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE": str(tmp_path), "PYTHON": sys.executable}
    url = f"ssh://far?dir={daemon.directory}"
    (tmp_path / "reader").touch()
    with open_terminal(*CONSOLE, "--connect", url, **surroundings) as terminal:
        terminal.wait(r"READ-ONLY.* age \d")
        terminal.press("q")
        assert terminal.end() == 0
    (tmp_path / "reader").unlink()
    with open_terminal(*CONSOLE, "--connect", url, **surroundings) as terminal:
        terminal.wait(r" ADMIN .* age \d")
        terminal.press("6")
        terminal.wait("mode manual")
        terminal.press("a")
        terminal.wait(r"Mode auto for decode/0 main \(now manual\).*\s*.*\[y\] yes")
        terminal.press("n")
        terminal.wait(lambda text: "[y] yes" not in text)

        (tmp_path / "down").touch()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        terminal.wait(r"link lost \d+ s ago: .*; again in \d+ s")
        terminal.wait(r"link lost \d+ s ago: .*\(ssh: connect")
        assert " mode manual" in terminal.text(), "the last picture stays"
        (tmp_path / "down").unlink()
        terminal.wait(lambda text: "link lost" not in text and re.search(r" ADMIN .* age 0\.\ds", text), 30)
        assert " mode manual" in terminal.text()
        pid = int((tmp_path / "pid").read_text())
        terminal.press("q")
        assert terminal.end() == 0 and terminal.is_plain
    limit = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists(), "ssh is left behind"


def test_it_outlives_its_head(daemon: Daemon) -> None:
    """The last: the daemon is another one afterwards."""
    with open_terminal(*CONSOLE, "--dir", str(daemon.directory)) as terminal:
        terminal.wait(r" ADMIN .* age \d")
        terminal.press("3")
        terminal.wait("layer 0 of 8")
        terminal.press("]", "]", "]")
        terminal.wait("layer 3 of 8")
        daemon.kill()
        found = see(terminal, r"link lost (\d+) s ago: ")
        see(terminal, rf"link lost {int(found[1]) + 2} s ago: ")
        text = terminal.text()
        assert "3 Experts" in text and "layer 3 of 8" in text and re.search(r" age \d+(\.\d)?s", text)
        daemon.start()
        text = terminal.wait(
            lambda text: (
                "link lost" not in text and "layer 3 of 8" in text and re.search(r" ADMIN .* age 0\.\ds", text)
            ),
            60,
        )
        assert "3 Experts" in text
        terminal.press("7")
        terminal.wait("Events  ")
        terminal.press("/", *"another", "\r")
        see(terminal, r"another head answers: pid \d+")
        terminal.press("q")
        assert terminal.end() == 0 and terminal.is_plain
