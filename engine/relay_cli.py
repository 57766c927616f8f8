"""The command `engine relay`: what a console on another machine starts here through ssh."""

from __future__ import annotations

import click

from engine import cli


@click.command()
@cli.reach_options
@click.option("--read-only", is_flag=True, help="The socket that only reads, whatever this user may open.")
def relay(config_file: str | None, directory: str | None, read_only: bool) -> int:
    """Connect stdin and stdout with the operators' socket, byte for byte, until either of them ends.

    It takes admin.sock if this user may open it, else read.sock, and says on stderr which one. Made to be started by
    ssh HOST engine relay.
    """
    from engine.errors import PeerGone
    from engine.relay import dial_head, run_relay

    path = cli.runtime_path(config_file, directory)
    try:
        sock, name = dial_head(path, read_only=read_only)
    except PeerGone as error:
        if isinstance(error.__cause__, PermissionError):
            click.echo(f"refused: {error}: what a user may do is decided by the modes of the sockets", err=True)
            return cli.EXIT_REFUSED
        return cli.tell_unreachable(path, error)
    click.echo(f"engine relay: {name}", err=True)
    with sock:
        if run_relay(sock):
            return cli.EXIT_OK
        click.echo(f"the engine in {path} ended the connection", err=True)
        return cli.EXIT_UNREACHABLE
