"""The command `engine console`: finds the engine, then becomes the console.

By exec and not by a child: the terminal, its signals and the exit code are the console's own, and no second interpreter
stays. The console is a package of its own that knows nothing of the engine; this file is all that the engine knows of
it.
"""

from __future__ import annotations

import os
import sys

import click

from engine import cli

LOWEST_HZ, HIGHEST_HZ = 0.5, 10.0
THEMES = ("dark", "light", "mono", "ansi")


@click.command()
@cli.reach_options
@click.option("--connect", metavar="URL", help="unix:PATH, or ssh://HOST[?dir=PATH] for an engine of another host.")
@click.option("--read-only", is_flag=True, help="Only watch: never use the socket that takes changes.")
@click.option("--hz", type=click.FloatRange(LOWEST_HZ, HIGHEST_HZ), default=2.0, show_default=True,
              help="Refreshes a second.")
@click.option("--theme", type=click.Choice(THEMES), help="Colours.  [default: as the terminal asks for]")
def console(
    config_file: str | None, directory: str | None, connect: str | None, read_only: bool, hz: float,
    theme: str | None,
) -> int:  # fmt: skip
    """Watch and operate a running engine at the terminal.

    Changes are possible where the engine's admin.sock may be opened; each one is asked about. The keys that work are at
    the bottom, all of them under ?.
    """
    if connect is not None and (config_file is not None or directory is not None):
        raise click.UsageError("--connect says where the engine is; --dir and -c do so too")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("stdin and stdout must be a terminal; engine status works without one")
    url = connect or f"unix:{cli.runtime_path(config_file, directory)}"
    command = [*console_command(), "--connect", url, "--hz", f"{hz:g}"]
    if read_only:
        command.append("--read-only")
    if theme:
        command += ["--theme", theme]
    sys.stdout.flush()
    os.execv(command[0], command)


def console_command() -> list[str]:
    """The interpreter and its module. A folder `console` where a person happens to be must not be taken for it: -P
    keeps the current directory out, unless that is where the engine itself was found."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(cli.__file__)))
    here = [] if os.path.realpath(os.getcwd()) == os.path.realpath(home) else ["-P"]
    return [sys.executable, *here, "-m", "console"]
