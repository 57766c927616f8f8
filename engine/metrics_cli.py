"""The command `engine metrics`: what the engine measures, in Prometheus' text format, on stdout or into a file."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine import cli
from engine.errors import PeerGone

if TYPE_CHECKING:
    from transport.messages import ExpertsReport, StatusReport, TrafficReport


@click.command()
@cli.reach_options
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Replace this file with it, whole or not at all.")
def metrics(config_file: str | None, directory: str | None, output: str | None) -> int:
    """Print the engine's metrics once, in Prometheus' text format.

    For node_exporter's textfile collector, write with --output into its directory, by a timer. If no engine answers,
    the text is `engine:up 0` and the exit code 4.
    """
    import trio

    from engine.faces.metrics import absence_text, metrics_text

    path = cli.runtime_path(config_file, directory)
    code = cli.EXIT_OK
    try:
        text = metrics_text(*trio.run(_ask, path), time.time())
    except PeerGone as error:
        text, code = absence_text(), cli.tell_unreachable(path, error)
    if output is None:
        click.echo(text, nl=False)
    else:
        _replace(Path(output), text)
    return code


async def _ask(path: str) -> tuple[StatusReport, ExpertsReport, TrafficReport]:
    from engine.faces.admin import open_operator
    from engine.runtime import RuntimeDirectory

    async with open_operator(RuntimeDirectory(path).read_socket) as head:
        return await head.ask_status(), await head.ask_experts(), await head.ask_traffic()


def _replace(target: Path, text: str) -> None:
    """A collector that reads meanwhile sees the old text or the new one.

    Raises:
        UsageError: the file can not be written there.
    """
    try:
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)  # the collector is another user
                file.flush()
                os.replace(file.name, target)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise click.UsageError(f"{target} can not be written ({error.strerror})") from error
