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
    from engine.batch.runner import EngineSource
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


@click.command("batch", short_help="JSONL in, JSONL out.")
@click.option("-i", "--input", "input_", default="-", metavar="FILE", help="Requests, one JSON value a line. [-]")
@click.option("-o", "--output", default="-", metavar="FILE", help="Answers, one JSON object a line. [-]")
@click.option("--errors", metavar="FILE", help="Lines without an answer. [beside the output; in it if that is -]")
@click.option("--resume", is_flag=True, help="Go on where an earlier run on the same output stopped.")
@click.option("--keep-errors", is_flag=True, help="With --resume: do not try again what failed.")
@click.option("--order", type=click.Choice(["completion", "input"]), default="completion", help="Of the output.")
@click.option("--inflight", type=click.IntRange(1, 1_000_000), default=256, help="Requests at once.")
@click.option("--window", type=click.IntRange(0, 10_000_000), default=4096, help="Lines to read ahead or hold.")
@click.option("--max-errors", metavar="N|P%", help="Stop when more lines fail than this.")
@click.option("--retry", type=click.IntRange(0, 100), default=2, help="More attempts after a loss in the engine.")
@click.option("--deadline", type=Duration(), help="Record what has no answer after this as batch_expired.")
@click.option("--stall", type=Duration(), default=120.0, help="Cancel a request without a token for so long. [120s]")
@click.option("--grace", type=Duration(), default=30.0, help="For running requests after Ctrl-C. [30s]")
@click.option("--retry-for", type=Duration(), default=600.0, help="Wait so long for a daemon that went away. [10m]")
@click.option("--default", "defaults", multiple=True, metavar="K=V", help="Body field for lines that lack it.")
@click.option("--model", help="The model of an own engine; with --connect, refuse to run on any other.")
@click.option("--any-model", is_flag=True, help="Do not compare the model that lines name with the one served.")
@click.option("--seed", type=int, help="Derive the seed of each line without one from this and its id.")
@click.option("--strict", is_flag=True, help="Check all lines first; run nothing if one is bad.")
@click.option("--progress", type=click.Choice(["auto", "line", "json", "none"]), default="auto", help="On stderr.")
@click.option("--summary", metavar="FILE", help="Write the summary there as JSON.")
@click.option(
    "--connect",
    metavar="[PATH]",
    is_flag=False,
    flag_value=DEFAULT_DAEMON,
    help="Use the running daemon (its request socket or directory) instead of an engine of this run's own.",
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
    from engine.batch.runner import run_batch

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
    from engine.batch.runner import EngineSource
    from engine.cluster import default_requests_path

    if connect == DEFAULT_DAEMON:
        path = default_requests_path()
    elif os.path.isdir(connect):
        path = os.path.join(connect, "requests.sock")
    else:
        path = connect

    @contextlib.asynccontextmanager
    async def use() -> AsyncIterator[str]:
        yield path

    return EngineSource(use, shared=True, load_codec=load_codec)


def _own_engine(given: dict[str, Any]) -> EngineSource:
    from engine.batch.runner import EngineSource
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
