"""The commands `engine ranks`, `engine requests` and `engine events`: they look and change nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click
import trio

from engine import cli
from engine.errors import PeerGone
from engine.faces.admin import ActRefused, Operator, open_operator
from engine.faces.plain import make_plain
from engine.faces.rankrows import SORTS, RankRow
from engine.runtime import RuntimeDirectory
from transport.messages import AskHeat, EventsHappened, HeadEvent

if TYPE_CHECKING:
    from engine.faces.rankrows import RankHeat
    from transport.messages import PartReport

REQUESTS_MOST = 4096
EVENTS_FULL = 256
"""Events in a message that is followed by another one at once."""


def _run(path: str, look: Callable[[Operator], Awaitable[int]]) -> int:
    """Looks through `read.sock`; the exit code."""

    async def main() -> int:
        async with open_operator(RuntimeDirectory(path).read_socket) as head:
            return await look(head)

    try:
        return trio.run(main)
    except ActRefused as error:
        click.echo(f"refused: {error}", err=True)
        return cli.EXIT_REFUSED
    except PeerGone as error:
        if isinstance(error.__cause__, PermissionError):
            click.echo(f"refused: {error}: what a user may do is decided by the modes of the sockets", err=True)
            return cli.EXIT_REFUSED
        return cli.tell_unreachable(path, error)


@click.command()
@cli.reach_options
@click.option(
    "--sort",
    "key",
    type=click.Choice(list(SORTS)),
    default="rank",
    show_default=True,
    help="By what; the highest first, but for rank.",
)
@click.option(
    "--filter",
    "words",
    multiple=True,
    metavar="WORDS",
    help="Only ranks that all words fit: d17, decode, decode/0, a state. !word: those it does not fit.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def ranks(
    config_file: str | None, directory: str | None, key: str, words: tuple[str, ...], as_json: bool
) -> int:  # fmt: skip
    """Show every rank on one line: its work, its steps, and how its experts are loaded.

    skew is its load over the mean of its group, 1.00 where all is even; hottest is the layer where that is highest,
    with the busiest expert there, and load the ratio in that layer.
    """
    from engine.faces.rankrows import filter_rows, render_rows, row_json, sort_rows
    from engine.faces.status import open_console

    async def look(head: Operator) -> int:
        rows = sort_rows(filter_rows(await _read_rows(head), [word for one in words for word in one.split()]), key)
        if as_json:
            click.echo(json.dumps({"schema": 1, "ranks": [row_json(row) for row in rows]}))
        elif rows:
            open_console().print(render_rows(rows))
        else:
            click.echo("no rank fits --filter", err=True)
        return cli.EXIT_OK

    return _run(cli.runtime_path(config_file, directory), look)


async def _read_rows(head: Operator) -> list[RankRow]:
    from engine.faces.rankrows import make_rows, read_heat

    status, experts = await head.ask_status(), await head.ask_experts()
    heats: list[tuple[PartReport, list[RankHeat]]] = []
    for part in experts.parts:
        if part.part == "main":
            told = await head.ask_heat(AskHeat(pool=part.pool, group=part.group, part="main", layer=0))
            if told is not None:
                heats.append((part, read_heat(*told)))
    return make_rows(status, experts, heats)


@click.command()
@cli.reach_options
@click.option("--slow", type=cli.Duration(), default="0s", help="Only those that are at least so old.")
@click.option(
    "--limit",
    type=click.IntRange(1, REQUESTS_MOST),
    default=100,
    show_default=True,
    help="So many at most, the oldest ones.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def requests(config_file: str | None, directory: str | None, slow: float, limit: int, as_json: bool) -> int:
    """List the requests that have not ended, the oldest first.

    The number in the first column is what engine cancel takes.
    """
    from engine.faces.requestrows import render_requests
    from engine.faces.status import message_json, open_console

    async def look(head: Operator) -> int:
        report = await head.ask_requests(limit, int(slow * 1e3))
        if as_json:
            click.echo(json.dumps({"schema": 1, "total": report.total, "requests": message_json(report.rows)}))
            return cli.EXIT_OK
        if report.rows:
            open_console().print(render_requests(report))
        if report.total > len(report.rows):
            click.echo(f"the oldest {len(report.rows)} of {report.total}; more with --limit", err=True)
        elif not report.rows:
            click.echo(f"no request is {'older than ' + format(slow, 'g') + ' s' if slow else 'there'}", err=True)
        return cli.EXIT_OK

    return _run(cli.runtime_path(config_file, directory), look)


@click.command()
@cli.reach_options
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--after", type=click.IntRange(0, 2**53 - 1), default=0, metavar="SEQ", help="Only events with a higher number."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def events(config_file: str | None, directory: str | None, follow: bool, after: int, as_json: bool) -> int:
    """Print the last events of the head's log that it still has: the number of each, time, level, name, fields."""

    async def look(head: Operator) -> int:
        await head.watch_events(after)
        while True:
            for message in await head.wait_events():
                _show_events(message, as_json=as_json)
                if not follow and len(message.events) < EVENTS_FULL:
                    return cli.EXIT_OK

    try:
        return _run(cli.runtime_path(config_file, directory), look)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if follow and cli.is_interrupt(error):
            return cli.EXIT_OK  # that is how it ends
        raise


def _show_events(message: EventsHappened, *, as_json: bool) -> None:
    from engine.faces.status import message_json

    if message.lost:
        click.echo(f"{message.lost} events before these are gone", err=True)
    for event in message.events:
        click.echo(json.dumps({"schema": 1, **message_json(event)}) if as_json else _event_line(event))


def _event_line(event: HeadEvent) -> str:
    at = datetime.datetime.fromtimestamp(event.at_ms / 1e3).strftime("%H:%M:%S.%f")[:-3]
    return make_plain(f"{event.seq:>6} {at} {event.level.upper():<8}{event.name} {event.text}".rstrip())
