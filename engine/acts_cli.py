"""The commands `engine drain`, `undrain`, `cancel` and `cache reset`: an act of an operator, with a question before it.

A question is asked only where somebody can answer it, and no connection to the head is held while a person thinks.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import click
import trio

from engine import cli
from engine.errand import REASON_CHARACTERS
from engine.errors import PeerGone
from engine.faces.admin import ActRefused, open_operator
from engine.faces.question import ask_yes, can_ask
from engine.faces.ranks import NoSuchRank, describe_ranks, pick_ranks
from engine.runtime import RuntimeDirectory
from transport.messages import CancelRequests, ResetCache, SetDrain, StatusReport

CANCELS = 4096
"""Requests in one act."""
LISTED = 10
"""Requests that a question names."""


def _act_options(command: cli.F) -> cli.F:
    options = [
        click.option("--reason", default="", metavar="TEXT", help="Why, for the log and for other operators."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object."),
    ]
    for option in reversed(options):
        command = option(command)
    return cli.reach_options(command)


@click.command()
@_act_options
@click.argument("ranks", nargs=-1, required=True, metavar="RANK|RANGE|POOL...")
def drain(ranks: tuple[str, ...], **options: Any) -> int:
    """Give ranks no new requests. What they have is finished; they stay up, and step with their groups.

    RANK is 17 or d17, RANGE is 2-5, POOL is prefill or decode; commas are as good as spaces. A pool's last rank that
    takes requests can not be drained.
    """
    return _set_drain(ranks, is_drain=True, **options)


@click.command()
@_act_options
@click.argument("ranks", nargs=-1, required=True, metavar="RANK|RANGE|POOL...")
def undrain(ranks: tuple[str, ...], **options: Any) -> int:
    """Give ranks new requests again. Ranks are named as for engine drain."""
    return _set_drain(ranks, is_drain=False, **options)


@click.command()
@_act_options
@click.argument("numbers", nargs=-1, required=True, type=click.IntRange(0, 2**53 - 1), metavar="ID...")
def cancel(
    numbers: tuple[int, ...], config_file: str | None, directory: str | None, reason: str, yes: bool, as_json: bool
) -> int:  # fmt: skip
    """End requests. ID is the number that engine requests shows.

    Their clients are told that they were cancelled.
    """
    path = cli.runtime_path(config_file, directory)
    _check(reason, yes)
    if len(numbers) > CANCELS:
        raise click.UsageError(f"{CANCELS} requests at once (the limit)")
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    words = f"Cancel request {', '.join(map(str, numbers[:LISTED]))}{more}?"
    if not _agreed(words, yes):
        return cli.EXIT_REFUSED
    act = CancelRequests(requests=numbers, host=_host(), reason=reason)
    return _carry_out(path, act, as_json, requests=list(numbers))


@click.group()
def cache() -> None:
    """The prefix caches of prefill ranks."""


@cache.command()
@_act_options
def reset(config_file: str | None, directory: str | None, reason: str, yes: bool, as_json: bool) -> int:
    """Have prefill ranks give up what they keep of past prompts. What running prompts use stays, and no text changes.

    For measurements that are to begin cold.
    """
    path = cli.runtime_path(config_file, directory)
    _check(reason, yes)
    if not _agreed("Give up what the prefix caches keep?", yes):
        return cli.EXIT_REFUSED
    return _carry_out(path, ResetCache(host=_host(), reason=reason), as_json)


def _set_drain(
    words: tuple[str, ...], *, is_drain: bool, config_file: str | None, directory: str | None, reason: str, yes: bool,
    as_json: bool,
) -> int:  # fmt: skip
    path = cli.runtime_path(config_file, directory)
    _check(reason, yes)
    try:
        status = trio.run(_read_status, path)
        picked = pick_ranks(words, status.ranks)
    except NoSuchRank as error:
        raise click.UsageError(str(error)) from None
    except PeerGone as error:
        return _tell_gone(path, error)
    if not _agreed(_question(status, picked, is_drain), yes):
        return cli.EXIT_REFUSED
    act = SetDrain(ranks=picked, drain=is_drain, host=_host(), reason=reason)
    return _carry_out(path, act, as_json, ranks=list(picked))


def _question(status: StatusReport, picked: tuple[int, ...], is_drain: bool) -> str:
    """With what will go on there, so that whoever answers knows what he waits for."""
    snapshots = [rank.snapshot for rank in status.ranks if rank.rank in set(picked)]
    there = sum(snapshot.running + snapshot.waiting for snapshot in snapshots if snapshot is not None)
    name = f"{'rank' if len(picked) == 1 else 'ranks'} {describe_ranks(picked)} of {status.cluster}"
    if not is_drain:
        return f"Undrain {name}?"
    return f"Drain {name}, {len(picked)} of {len(status.ranks)}? {there} requests are there and will be finished."


async def _read_status(path: str) -> StatusReport:
    async with open_operator(RuntimeDirectory(path).read_socket) as head:
        return await head.ask_status()


def _check(reason: str, yes: bool) -> None:
    if len(reason) > REASON_CHARACTERS:
        raise click.UsageError(f"--reason may have {REASON_CHARACTERS} characters")
    if not (yes or can_ask()):
        raise click.UsageError("nobody can be asked here: give --yes")


def _agreed(question: str, yes: bool) -> bool:
    if yes or ask_yes(question):
        return True
    click.echo("nothing was changed", err=True)
    return False


def _carry_out(path: str, act: SetDrain | CancelRequests | ResetCache, as_json: bool, **names: Any) -> int:
    async def ask() -> str:
        async with open_operator(RuntimeDirectory(path).admin_socket) as head:
            return await head.ask_act(act)

    try:
        done = trio.run(ask)
    except ActRefused as error:
        return _refuse(str(error))
    except PeerGone as error:
        return _tell_gone(path, error)
    click.echo(json.dumps({"schema": 1, "done": done, **names}) if as_json else done)
    return cli.EXIT_OK


def _tell_gone(path: str, error: PeerGone) -> int:
    if isinstance(error.__cause__, PermissionError):
        return _refuse(f"{error}: what a user may do is decided by the modes of the sockets")
    return cli.tell_unreachable(path, error)


def _refuse(why: str) -> int:
    click.echo(f"refused: {why}", err=True)
    return cli.EXIT_REFUSED


def _host() -> str:
    return socket.gethostname()[:256]
