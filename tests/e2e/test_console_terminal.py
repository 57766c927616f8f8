"""The console at a terminal before a real engine: it finds skew and cures it, outlives its head, and only watches where
it may do no more."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.terminal import CONSOLE, ROOT, Terminal, open_terminal
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
