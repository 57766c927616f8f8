"""The command line: parses, calls, and turns what happened into an exit code. It decides nothing else.

stdout carries data, stderr talks to people. Imports are inside the commands: `engine --help`, `config`, `status` and
`version` must answer before anybody notices, so neither torch nor NIXL nor the head's parts may be loaded for them.

Exit codes: 0 done; 1 done, but some checks failed; 2 usage or configuration; 3 stopped early, can be resumed; 4 daemon
not reachable or not ready in time, or a rank that died too often; 5 refused; 70 a bug of ours; 130 second Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from engine.errors import ConfigError, EngineError, PeerGone

if TYPE_CHECKING:
    from engine.settings import Resolved
    from transport.messages import ExpertsReport, StatusReport

EXIT_OK, EXIT_SOME_FAILED, EXIT_USAGE, EXIT_RESUMABLE, EXIT_UNREACHABLE, EXIT_REFUSED = 0, 1, 2, 3, 4, 5
EXIT_BUG, EXIT_INTERRUPTED = 70, 130

DOWN_MARGIN_S = 30.0
"""What `down` waits beyond the drain for the ranks to end, before it says that the head hangs."""

F = TypeVar("F", bound=Callable[..., Any])

_LAZY = {
    "batch": ("engine.batch_cli", "Run a JSONL file of requests and write a JSONL file of answers."),
    "metrics": ("engine.metrics_cli", "Print what a scrape of the engine would give, in Prometheus' text format."),
    "rebalance": ("engine.rebalance_cli", "Place the experts of a group anew while it serves."),
    "bench": ("engine.bench_cli", "Measure the model's step alone, or the whole path beside it."),
    "ranks": ("engine.look_cli", "Show every rank on one line, with the skew of its experts."),
    "requests": ("engine.look_cli", "List the requests that have not ended, the oldest first."),
    "events": ("engine.look_cli", "Print what the head has logged, and what it logs from now on."),
    "drain": ("engine.acts_cli", "Give ranks no new requests; what they have is finished."),
    "undrain": ("engine.acts_cli", "Give ranks new requests again."),
    "cancel": ("engine.acts_cli", "End requests by their numbers."),
    "cache": ("engine.acts_cli", "Empty the prefix caches."),
    "console": ("engine.console_cli", "Watch and operate a running engine at the terminal."),
    "relay": ("engine.relay_cli", "Connect stdin and stdout with the operators' socket."),
    "simulate": ("engine.simulate_cli", "Run a cluster on virtual time, with faults, and check its every promise."),
}
"""Commands that bring much with them: module (attribute of the same name) and the line for the list of commands."""


class _Group(click.Group):
    """A group that imports some of its commands only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LAZY:
            import importlib

            command: click.Command = getattr(importlib.import_module(_LAZY[cmd_name][0]), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command for name, command in self.commands.items() if not command.hidden}
        rows = [(name, command.get_short_help_str(100)) for name, command in own.items()]
        rows += [(name, line) for name, (_, line) in _LAZY.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


class Duration(click.ParamType[float]):
    """`30s`, `250ms`, `1h30m`."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from engine.keys import parse_duration

        try:
            return parse_duration(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def config_options(command: F) -> F:
    """Options of every command that resolves a configuration."""
    options = [
        click.option("-c", "--config", "config_file", type=click.Path(dir_okay=False), envvar="ENGINE_CONFIG",
                     help="TOML file."),
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any key; of several the last counts."),
        click.option("--model", help="Checkpoint directory, or nano for the bundled model."),
        click.option("--device", help="cpu, or sim: a rack that is simulated in one process."),
        click.option("--scenario", help="Of --device sim: a name as for engine simulate, or a TOML file."),
        click.option("--fabric", help="auto, nixl or tcp."),
        click.option("--dir", "directory", help="Runtime directory with the engine's sockets."),
        click.option("--log-format", help="text or json."),
        click.option("--log-level", help="debug, info, warning or error."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def reach_options(command: F) -> F:
    """Options of every command that talks to a running engine."""
    options = [
        click.option("-c", "--config", "config_file", type=click.Path(dir_okay=False), envvar="ENGINE_CONFIG",
                     help="TOML file that says the runtime directory."),
        click.option("--dir", "directory", help="Runtime directory of the engine."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def resolve_options(options: dict[str, Any], **more: str | None) -> Resolved:
    """The configuration that `config_options` ask for; takes them out of `options`. `more`: further keys, dots as
    `__`."""
    from engine.settings import resolve_config

    flags = {
        "model": options.pop("model"),
        "device": options.pop("device"),
        "scenario": options.pop("scenario"),
        "fabric": options.pop("fabric"),
        "admin.dir": options.pop("directory"),
        "log.format": options.pop("log_format"),
        "log.level": options.pop("log_level"),
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return resolve_config(options.pop("config_file"), flags=flags, sets=options.pop("sets"), environ=os.environ)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """Serve mixture-of-experts models with prompt work and token generation on separate ranks."""


@cli.command()
@config_options
@click.option("--http", is_flag=False, flag_value="127.0.0.1:8000", metavar="[HOST:PORT]",
              help="Serve the OpenAI surface there.  [without a value: 127.0.0.1:8000]")
@click.option("--detach", is_flag=True, help="Go to the background; log to engine.log in the runtime directory.")
@click.option("--wait", type=click.Choice(["ready"]), help="Fail if the engine is not ready within --timeout.")
@click.option("--timeout", type=Duration(), help="For --wait.  [default: limits.start_s]")
@click.option("--given", type=int, hidden=True, help="Descriptor with the resolved configuration.")
@click.option("--lifeline", type=int, hidden=True, help="Descriptor whose end ends the engine.")
@click.option("--parent", type=int, hidden=True, help="Process whose end ends the engine.")
def up(
    http: str | None, detach: bool, wait: str | None, timeout: float | None, given: int | None, lifeline: int | None,
    parent: int | None, **options: Any,
) -> int:  # fmt: skip
    """Start an engine: in the foreground, or with --detach as a daemon.

    The first Ctrl-C or SIGTERM finishes running requests, the second stops at once.
    """
    from engine import compose

    if timeout is not None and wait is None:
        raise click.UsageError("--timeout is for --wait ready")
    if given is not None:
        from engine.config import config_from_json
        from engine.spawn import take_bytes

        config = config_from_json(take_bytes(given))
    else:
        config = resolve_options(options, http__listen=http).config
    if config.device == "sim" and detach:
        from engine.sim.realtime import describe_rack

        click.echo(describe_rack(config), err=True)
    patience = (config.limits.start_s if timeout is None else timeout) if wait else None
    if detach:
        from engine.detach import start_daemon

        return start_daemon(config, patience)
    ready_within_s = math.inf if patience is None else patience
    return compose.run_head_process(config, lifeline=lifeline, parent=parent, ready_within_s=ready_within_s)


@cli.command()
@reach_options
@click.option("--drain", type=Duration(), help="Time for running requests to finish.  [default: 60s]")
@click.option("--now", is_flag=True, help="Stop at once; running requests fail.")
def down(config_file: str | None, directory: str | None, drain: float | None, now: bool) -> int:
    """Stop a running engine, and wait until it is gone."""
    if now and drain is not None:
        raise click.UsageError("--now and --drain exclude each other")
    import trio

    return trio.run(_down, runtime_path(config_file, directory), 0.0 if now else 60.0 if drain is None else drain)


async def _down(path: str, drain_s: float) -> int:
    from engine.faces.admin import open_operator, wait_process_end
    from engine.runtime import RuntimeDirectory

    try:
        async with open_operator(RuntimeDirectory(path).admin_socket) as head:
            accepted = await head.ask_shutdown(int(drain_s * 1000), f"engine down by uid {os.getuid()}")
            fate = f"have {drain_s:g} s to finish" if drain_s else "fail"
            asked = f"; {accepted.running} requests {fate}" if accepted.running else ""
            click.echo(f"stopping pid {head.head_pid}{asked}", err=True)
            if await wait_process_end(head.head_pid, drain_s + DOWN_MARGIN_S):
                return EXIT_OK
            click.echo(f"pid {head.head_pid} is still there; engine.log in {path} says what it waits for", err=True)
            return EXIT_UNREACHABLE
    except PeerGone as error:
        return tell_unreachable(path, error)


@cli.command()
@reach_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--watch", is_flag=True, help="Again and again until Ctrl-C.")
@click.option("--interval", type=Duration(), default="2s", show_default=True, help="For --watch.")
def status(config_file: str | None, directory: str | None, as_json: bool, watch: bool, interval: float) -> int:
    """Show a running engine on one screen."""
    import trio

    try:
        return trio.run(_status, runtime_path(config_file, directory), as_json, watch, interval)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if watch and is_interrupt(error):
            return EXIT_OK  # that is how a watch ends
        raise


async def _status(path: str, as_json: bool, watch: bool, interval_s: float) -> int:
    import trio

    from engine.faces.admin import open_operator
    from engine.runtime import RuntimeDirectory

    try:
        async with open_operator(RuntimeDirectory(path).read_socket) as head:
            while True:
                _show_status(await head.ask_status(), await head.ask_experts(), as_json=as_json, again=watch)
                if not watch:
                    return EXIT_OK
                await trio.sleep(interval_s)
    except PeerGone as error:
        return tell_unreachable(path, error)


def _show_status(report: StatusReport, experts: ExpertsReport, *, as_json: bool, again: bool) -> None:
    from engine.faces.status import print_status, status_json

    if as_json:
        click.echo(json.dumps(status_json(report, experts)))
        return
    if again and sys.stdout.isatty():
        click.clear()
    print_status(report, experts)


@cli.group()
def config() -> None:
    """Check, show and describe the configuration."""


@config.command("check")
@config_options
def config_check(**options: Any) -> int:
    """Read every source and report all problems at once."""
    resolved = resolve_options(options)
    ranks = resolved.config.roles
    click.echo(f"ok: {len(ranks)} ranks, digest {resolved.config.digest}", err=True)
    return EXIT_OK


@config.command("show")
@config_options
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def config_show(origin: bool, as_json: bool, **options: Any) -> int:
    """Print every value that an engine would use."""
    from engine.config import config_view

    resolved = resolve_options(options)
    view = config_view(resolved.config)
    if as_json:
        data: dict[str, Any] = {"schema": 1, "digest": resolved.config.digest, "values": view}
        if origin:
            data["origins"] = dict(resolved.origins)
        click.echo(json.dumps(data))
        return EXIT_OK
    for name, value in view.items():
        line = f"{name} = {json.dumps(value)}"
        click.echo(f"{line:<48} # {resolved.origins[name]}" if origin else line)
    return EXIT_OK


@config.command("schema")
def config_schema() -> int:
    """Print the JSON schema of the TOML file."""
    from engine import keys

    click.echo(json.dumps(keys.config_schema(), indent=2))
    return EXIT_OK


@cli.command()
@reach_options
@click.option("--model", help="Checkpoint directory to look at, or nano for the bundled model.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(config_file: str | None, directory: str | None, model: str | None, as_json: bool) -> int:
    """Look at this machine and say what is missing and what to do."""
    from engine.doctor import diagnose
    from engine.settings import peek_setting

    name = peek_setting("model", model, config_file, os.environ) or "nano"
    diagnosis = diagnose(name, runtime_path(config_file, directory))
    if as_json:
        click.echo(json.dumps(diagnosis.to_json()))
    else:
        for finding in diagnosis.findings:
            click.echo(f"{finding.level:<5}{finding.subject:<13}{finding.found}")
            if finding.advice:
                click.echo(f"{'':<18}-> {finding.advice}")
    return EXIT_OK if diagnosis.is_healthy else EXIT_SOME_FAILED


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="With the versions of what it is built on.")
def version(as_json: bool) -> int:
    """Print the version."""
    from engine.version import VERSION

    if as_json:
        from engine.doctor import engine_packages

        click.echo(json.dumps({"schema": 1, "engine": VERSION, "packages": engine_packages()}))
    else:
        click.echo(f"engine {VERSION}")
    return EXIT_OK


@cli.command(hidden=True)
@click.option("--control", type=int, required=True)
@click.option("--given", type=int, required=True)
def rank(control: int, given: int) -> None:
    """The process of one rank; started by the engine."""
    from engine import compose
    from engine.spawn import take_bytes

    code = compose.run_rank_process(control, json.loads(take_bytes(given)))
    # Everything is closed. Taking an interpreter with torch down takes seconds on a busy machine; the supervisor would
    # end this process before and never learn the code.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@cli.command(hidden=True)
@click.option("--given", type=int, required=True)
def front(given: int) -> int:
    """The process of one HTTP front; started by the engine."""
    import signal

    import msgspec

    from engine.front.process import FrontGiven, run_front_process
    from engine.spawn import die_with_parent, take_bytes

    what = msgspec.json.decode(take_bytes(given), type=FrontGiven)
    die_with_parent(what.parent, signal.SIGTERM)
    return run_front_process(what)


def runtime_path(config_file: str | None, directory: str | None) -> str:
    """The runtime directory that `reach_options` name."""
    from engine.settings import runtime_directory

    return runtime_directory(directory, config_file, os.environ)


def tell_unreachable(path: str, error: PeerGone) -> int:
    """Says that no engine answers there and how to start one; the exit code for it."""
    click.echo(f"no engine answers in {path} ({error})", err=True)
    click.echo(f"start one with: engine up --detach --wait ready --dir {path}", err=True)
    return EXIT_UNREACHABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    from engine.runtime import HeadRuns

    try:
        code = cli.main(args=arguments, prog_name="engine", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_OK
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough. stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except HeadRuns as error:
        click.echo(f"error: {error}", err=True)
        return EXIT_REFUSED
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        return EXIT_USAGE
    except PeerGone as error:
        click.echo(f"error: {error}", err=True)
        return EXIT_UNREACHABLE
    except EngineError as error:
        click.echo(f"error: {error}", err=True)
        return EXIT_SOME_FAILED
    except BaseExceptionGroup as group:
        if is_interrupt(group):
            return EXIT_INTERRUPTED
        return _report_bug(group)
    except Exception as error:  # the process boundary: a bug gets its own exit code and leaves a report to send
        return _report_bug(error)


def is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C is behind it; out of nurseries it comes in groups."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(KeyboardInterrupt)[0] is not None
    return isinstance(error, KeyboardInterrupt)


def _report_bug(error: BaseException) -> int:
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile("w", prefix="engine-bug-", suffix=".txt", delete=False, encoding="utf-8") as dump:
        dump.write(f"{sys.argv!r}\n{sys.version}\n{text}")
    click.echo(f"{text}\nthis is a bug of the engine; a report lies in {dump.name}", err=True)
    return EXIT_BUG
