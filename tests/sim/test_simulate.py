"""The command `engine simulate`: what it prints, what it returns, and that its last line repeats a failure."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.actors import router
from engine.cli import main
from engine.core import prefill
from engine.core.routing import Pair
from engine.errors import ConfigError
from engine.sim.scenario import change_ranks, draw_scenario, load_scenario, scenario_names
from transport.messages import PagesPushed


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def test_a_run_is_told_in_full(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main(["simulate", "--seed", "5", "--check", "--report", str(path)]) == 0
    said = capsys.readouterr().out
    words = (" a second from ", "device steps", "answers", "throughput", "skew  ", "first token p50", "inter-token")
    for word in words:
        assert word in said
    told = json.loads(path.read_text())
    assert told["seed"] == 5 and told["exit_code"] == 0 and told["failure"] is None
    assert sum(told["outcomes"].values()) == told["load"]["requests"]
    assert all(value == 0 or 1 <= value <= 3 for value in told["skew"].values()) and any(told["skew"].values())
    assert told["hash"] in said and told["replay"] == "engine simulate --seed 5"


def test_a_scenario_takes_ranks_and_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small", "--seed", "3", "--ranks", "1P3D", "--for", "3s"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1P3D;") and "20 requests of 2 clients within 3 s" in said


def test_several_seeds_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "40", "--runs", "3"]) == 0
    assert capsys.readouterr().out == "3 seeds from 40: no promise broken\n"


def plant_crash(patch: pytest.MonkeyPatch) -> None:
    def place(self, entry, pair, spared):
        raise ZeroDivisionError("as planted")

    patch.setattr(router.Router, "_place", place)


def plant_wrong_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill, "PagesPushed", lambda *fields: PagesPushed(*fields[:3], max(fields[3] - 1, 1), fields[4]))


def plant_lost_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill.PrefillSide, "_commit", lambda self, prompt, now_us: None)


def plant_chance(patch: pytest.MonkeyPatch) -> None:
    """A source that no seed rules."""
    dice = random.SystemRandom()

    def choose(sources, sinks, **rest) -> Pair:
        return Pair(dice.choice(sources).rank, dice.choice(sinks).rank)

    patch.setattr(router, "choose_pair", choose)


@pytest.mark.parametrize(
    ("plant", "code", "word"),
    [
        (plant_crash, 10, "as planted"),
        (plant_wrong_count, 11, "[commit-count]"),
        (plant_lost_commit, 12, "[liveness]"),
        (plant_chance, 13, "[one-run] two runs agree on"),
    ],
)
def test_kinds_of_failure_have_their_exit_codes_and_a_line_that_repeats_them(
    plant, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    arguments = ["simulate", "small", "--seed", "4", "--ranks", "2P2D", "--for", "2s", "--check"]
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert word in said
    assert said.rstrip().endswith(f"again:  engine simulate small --seed 4 --ranks 2P2D --for 2s {arguments[-1]}")


def test_every_scenario_that_comes_with_the_engine_can_be_read() -> None:
    assert {"small", "storm"} <= set(scenario_names())
    for name in scenario_names():
        assert load_scenario(name, 1).name == name


def test_a_scenario_may_be_like_another_but_for_its_own_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("like = 'storm'\nsettle_s = 5\n[cluster]\ndecode = 3\n")
    mine, storm = load_scenario(str(file), 1), load_scenario("storm", 1)
    assert (mine.shape.decode, mine.settle_s) == (3, 5.0)
    assert (mine.shape.prefill, mine.shape.num_pages) == (storm.shape.prefill, storm.shape.num_pages)
    assert (mine.swarm, mine.load) == (storm.swarm, storm.load)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[cluster]\nprefills = 2", r"\[cluster\] has no key 'prefills'"),
        ("like = 'nowhere'", "like is one of groups, .*, not 'nowhere'"),
        ("[load]\nrequests = 'many'", r"\[load\] requests is int, not 'many'"),
        ("[swarm]\nkinds = ['earthquake']", "'earthquake' is none of crash"),
        ("[decode_costs]\nkind = 'free'", r"\[decode_costs\] kind is flat or roofline"),
        ("[load]\nprompt = 5", r"\[load\] prompt is a list"),
        ("[cluster", "Expected"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_scenario(str(path), 0)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there are .*small"):
        load_scenario("nothing", 0)
    for wrong in ("8P", "0P1D", "8P999D", "x"):
        with pytest.raises(ConfigError, match="8P32D"):
            change_ranks(draw_scenario(0), wrong)
