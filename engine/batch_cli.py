"""The command `engine batch`: its options, checked and turned into BatchOptions and an EngineSource."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from engine.errors import ConfigError, EngineError
from engine.keys import parse_duration

if TYPE_CHECKING:
    from engine.batch.source import EngineSource
    from engine.config import ClusterConfig
    from engine.faces.text import TextCodec
    from transport.messages import HeadHello

SHARED_PRIORITY = 10
"""On a daemon that others use too, batch work comes last."""
DEFAULT_DAEMON = "-default-"
"""What `--connect` without a path becomes."""


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """`30s`, `6h`, `250ms`, or a number of seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


EPILOG = """\b
Examples:
  engine batch -i prompts.jsonl -o answers.jsonl
  engine batch -i prompts.jsonl -o answers.jsonl --resume
  zcat prompts.jsonl.gz | engine batch --connect --default max_tokens=64 > answers.jsonl

\b
Ctrl-C lets running requests finish, a second one drops them; --resume goes on.
Exit codes: 0 all lines answered, 1 some failed, 2 usage, 3 stopped and can be
resumed, 4 no engine, 5 refused, 130 second Ctrl-C.
"""


@click.command("batch", short_help="JSONL in, JSONL out.", epilog=EPILOG)
@click.option("-i", "--input", "input_", default="-", metavar="FILE", show_default=True, help="Requests; - is stdin.")
@click.option("-o", "--output", default="-", metavar="FILE", show_default=True, help="Answers; - is stdout.")
@click.option("--errors", metavar="FILE", help="Lines without an answer.  [default: beside the output, or in it if -]")
@click.option("--resume", is_flag=True, help="Go on where an earlier run on the same output stopped.")
@click.option("--keep-errors", is_flag=True, help="With --resume: do not try again what failed.")
@click.option(
    "--order",
    type=click.Choice(["completion", "input"]),
    default="completion",
    show_default=True,
    help="Of the output.",
)
@click.option(
    "--inflight",
    type=click.IntRange(1, 1_000_000),
    default=256,
    metavar="N",
    show_default=True,
    help="Requests at once.",
)
@click.option(
    "--window",
    type=click.IntRange(0, 10_000_000),
    default=4096,
    metavar="N",
    show_default=True,
    help="Lines to read ahead, or to hold for --order input.",
)
@click.option("--max-errors", metavar="N|P%", help="Stop when more lines fail than this.")
@click.option(
    "--retry",
    type=click.IntRange(0, 100),
    default=2,
    metavar="N",
    show_default=True,
    help="More attempts after a loss in the engine.",
)
@click.option("--deadline", type=Duration(), help="Record what has no answer after this as batch_expired.")
@click.option(
    "--stall", type=Duration(), default="120s", show_default=True, help="Cancel a request without a token for so long."
)
@click.option("--grace", type=Duration(), default="30s", show_default=True, help="For running requests after Ctrl-C.")
@click.option(
    "--retry-for", type=Duration(), default="10m", show_default=True, help="Wait so long for a daemon that went away."
)
@click.option("--default", "defaults", multiple=True, metavar="K=V", help="Body field for lines that lack it.")
@click.option("--model", metavar="DIR", help="Of an own engine; with --connect, refuse to run on any other.")
@click.option("--any-model", is_flag=True, help="Do not compare the model that lines name with the one served.")
@click.option("--seed", type=int, metavar="N", help="Derive the seed of each line without one from this and its id.")
@click.option("--strict", is_flag=True, help="Check all lines first; run nothing if one is bad.")
@click.option(
    "--progress",
    type=click.Choice(["auto", "line", "json", "none"]),
    default="auto",
    metavar="FORM",
    show_default=True,
    help="On stderr: line, json or none; auto is one line that is rewritten, on a terminal.",
)
@click.option("--summary", metavar="FILE", help="Write the summary there as JSON.")
@click.option(
    "--connect",
    metavar="[PATH]",
    is_flag=False,
    flag_value=DEFAULT_DAEMON,
    help="Use the running daemon (its directory or request socket) instead of an engine of this run's own.",
)
@click.option("-c", "--config", "config_file", envvar="ENGINE_CONFIG", metavar="FILE", help="TOML configuration.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="One configuration value.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log of an engine of this run's own.")
@click.help_option("-h", "--help")
@click.pass_context
def batch(ctx: click.Context, /, **given: Any) -> None:
    """Runs prompts from a file or stdin, within bounded memory.

    A line is an OpenAI Batch line {custom_id, method, url, body}, a bare body with "messages" or "prompt", or a JSON
    string. Without --connect it starts an engine of its own and ends it with the batch.
    """
    import trio

    from engine.batch.options import BatchOptions, ErrorBudget, parse_default, parse_error_budget
    from engine.batch.start import run_batch

    shared = given["connect"] is not None
    try:
        if shared and (given["config_file"] or given["sets"]) and _is_from_command_line(ctx, "config_file", "sets"):
            raise ConfigError("--connect uses an engine that runs already; -c and --set do not go with it")
        if given["keep_errors"] and not given["resume"]:
            raise ConfigError("--keep-errors goes with --resume")
        options = BatchOptions(
            input=given["input_"],
            output=given["output"],
            errors=given["errors"],
            resume=given["resume"],
            keep_errors=given["keep_errors"],
            order=given["order"],
            inflight=given["inflight"],
            window=given["window"],
            max_errors=parse_error_budget(given["max_errors"]) if given["max_errors"] else ErrorBudget(),
            retry=given["retry"],
            retry_for=given["retry_for"],
            deadline=given["deadline"],
            stall=given["stall"],
            grace=given["grace"],
            defaults=dict(parse_default(text) for text in given["defaults"]),
            model=given["model"] if shared else None,  # an own engine is started with it
            any_model=given["any_model"],
            seed=given["seed"],
            strict=given["strict"],
            progress=given["progress"],
            summary=given["summary"],
            priority=SHARED_PRIORITY if shared else 0,
            label=f"batch-{os.getpid()}",
            resume_command=resume_command(sys.argv[1:]),
        )
        source = _shared_engine(given["connect"]) if shared else _own_engine(given)
    except EngineError as error:
        click.echo(f"engine batch: {error}", err=True)
        ctx.exit(2)
    ctx.exit(trio.run(run_batch, options, source))


def resume_command(arguments: Sequence[str]) -> str:
    """The command line that goes on with a run that had these arguments."""
    words = ["engine", *arguments]
    return shlex.join(words if "--resume" in words else [*words, "--resume"])


def load_codec(hello: HeadHello) -> TextCodec:
    """The tokenizer of the model that a head on this host serves. Blocks.

    Raises:
        ConfigError: it is not there or not usable.
    """
    from engine.config import model_directory
    from engine.faces.text import TextCodec

    return TextCodec.load(model_directory(hello.model))


def _is_from_command_line(ctx: click.Context, *names: str) -> bool:
    return any(ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE for name in names)


def _shared_engine(connect: str) -> EngineSource:
    from engine.batch.source import EngineSource
    from engine.cluster import default_requests_path

    if connect == DEFAULT_DAEMON:
        path = default_requests_path()
    else:
        path = connect if connect.endswith(".sock") else os.path.join(connect, "requests.sock")

    @contextlib.asynccontextmanager
    async def use() -> AsyncIterator[str]:
        yield path

    advice = (
        f"start one with: engine up --detach --wait ready --dir {shlex.quote(os.path.dirname(path) or '.')}\n"
        "or leave --connect out: the batch then starts an engine of its own"
    )
    return EngineSource(use, shared=True, load_codec=load_codec, advice=advice)


def _own_engine(given: dict[str, Any]) -> EngineSource:
    from engine.batch.source import EngineSource
    from engine.settings import resolve_config

    resolved = resolve_config(
        given["config_file"], flags={"model": given["model"]}, sets=given["sets"], environ=os.environ
    )
    config: ClusterConfig = resolved.config
    if not given["verbose"] and resolved.origins.get("log.level") == "default":
        config = dataclasses.replace(config, log_level="warning")  # people look at the batch, not at its engine

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[str]:
        from engine.cluster import start_cluster

        async with start_cluster(config) as cluster:
            await cluster.wait_ready(config.limits.start_s)
            yield cluster.requests_path

    return EngineSource(start, shared=False, load_codec=load_codec)
