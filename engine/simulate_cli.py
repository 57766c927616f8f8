"""The command `engine simulate`: a cluster on virtual time, from a seed or a scenario, with every checker watching."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.sim.play import Outcome
    from engine.sim.scenario import Scenario

PROGRESS_SEEDS = 100
"""Seeds between two lines of a long series."""
SHOWN_EVENTS = 4
"""Events before the first that two runs do not share."""


@click.command()
@click.argument("scenario", required=False)
@click.option("--seed", type=click.IntRange(0, 2**53), help="Of all chance.  [default: a fresh one]")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="So many seeds.")
@click.option("--ranks", metavar="8P32D", help="Prefill and decode ranks, instead of the scenario's.")
@click.option("--for", "seconds", metavar="60s", help="Length of the busy part; the load grows with it.")
@click.option("--check", is_flag=True, help="Run twice and compare, event by event.")
@click.option("--report", type=click.Path(dir_okay=False, writable=True), help="Write all numbers as JSON lines.")
def simulate(
    scenario: str | None, seed: int | None, runs: int, ranks: str | None, seconds: str | None, check: bool,
    report: str | None,
) -> int:  # fmt: skip
    """Run a cluster in simulation: the real head and ranks on a virtual clock, with faults.

    SCENARIO is the name of a scenario that comes with the engine, or a TOML file. Without one, cluster, load and faults
    are drawn from the seed. A run is a function of scenario and seed; one that fails prints the command that repeats
    it. Exit codes: 10 crash, 11 wrong result, 12 no result in time, 13 two runs of one seed differ.
    """
    from engine.sim.report import describe, describe_options, exit_code, summarise

    logging.disable(logging.CRITICAL)  # of the simulated processes: a run is told by its report
    first = seed if seed is not None else int.from_bytes(os.urandom(4), "little")
    lines: list[str] = []
    code = 0
    for number in range(first, first + runs):
        chosen = _choose(scenario, number, ranks, seconds)
        if runs == 1:
            click.echo("\n".join(describe_options(chosen)))
        outcome = _run(chosen, check=check)
        lines.append(json.dumps(summarise(outcome)))
        code = exit_code(outcome)
        if runs == 1 or code:
            click.echo("\n".join(describe(outcome)))
        if code:
            failure = str(summarise(outcome)["failure"]).rstrip()
            click.echo(f"failed: {failure}", err=True)
            click.echo(f"again:  {_replay(chosen, ranks, seconds, check=check)}", err=True)
            break
        done = number - first + 1
        if done % PROGRESS_SEEDS == 0:
            click.echo(f"{done} of {runs} seeds", err=True)
    if report is not None:
        Path(report).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if runs > 1 and not code:
        click.echo(f"{runs} seeds from {first}: no promise broken")
    return code


def _choose(name: str | None, seed: int, ranks: str | None, seconds: str | None) -> Scenario:
    from engine.keys import parse_duration
    from engine.sim.scenario import change_length, change_ranks, draw_scenario, load_scenario

    chosen = draw_scenario(seed) if name is None else load_scenario(name, seed)
    if ranks is not None:
        chosen = change_ranks(chosen, ranks)
    if seconds is not None:
        length_s = parse_duration(seconds)
        if not 0 < length_s <= 86_400:
            raise ConfigError(f"--for is up to a day, not {seconds}")
        chosen = change_length(chosen, length_s)
    return chosen


def _replay(scenario: Scenario, ranks: str | None, seconds: str | None, *, check: bool) -> str:
    parts = [scenario.replay_line()]
    parts += [f"--ranks {ranks}"] if ranks is not None else []
    parts += [f"--for {seconds}"] if seconds is not None else []
    return " ".join([*parts, "--check"] if check else parts)


def _run(scenario: Scenario, *, check: bool) -> Outcome:
    from engine.sim.play import play
    from engine.sim.trace import Trace
    from engine.sim.violation import Violation

    outcome = play(scenario, trace=Trace(keep=check))
    if not check or not outcome.is_good:
        return outcome
    again = play(scenario, trace=Trace(keep=True))
    at = outcome.trace.first_difference(again.trace)
    if at is None:
        return outcome
    shown = play(scenario, trace=Trace(show=range(max(0, at - SHOWN_EVENTS), at + 1)))
    why = f"two runs agree on {at} events and then differ; a third had there\n" + "\n".join(shown.trace.shown)
    return dataclasses.replace(outcome, violation=Violation("one-run", why))
