"""The command `engine bench`: its options, turned into a measurement, a table and a record."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from engine.cli import config_options, resolve_options
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import ClusterConfig

LIST_LIMIT = 4096
"""A longer list of numbers is a mistake."""
ON_CPU = ("rows", "context", "steps", "prefill")
ON_CUDA = ("shapes", "iters", "routing", "as_rank_of", "dep", "records", "layers")
"""Options of `engine bench forward` that one kind of device only has."""


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """`1,8,32`: ascending whole numbers above zero; empty for none."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")] if value else []
        if not all(word.isdigit() and 0 < int(word) < 1 << 31 for word in words) or len(words) > LIST_LIMIT:
            self.fail(f"{value!r} is not a list of whole numbers above zero; write 1,8,32", param, ctx)
        return tuple(sorted({int(word) for word in words}))


class StepCaseText(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """`ROWS:CONTEXT:STEPS`, or `ROWS:CONTEXT:STEPS:AHEAD`; a text with a name in it is left to `bench.cases`."""

    name = "case"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...] | str:
        if isinstance(value, tuple) or "=" in value:
            return value  # type: ignore[no-any-return]
        words = value.split(":")
        if len(words) not in (3, 4) or not all(word.isdigit() for word in words) or 0 in map(int, words[:3]):
            self.fail(f"{value!r} is not ROWS:CONTEXT:STEPS[:AHEAD]", param, ctx)
        return tuple(map(int, words))


@click.group("bench")
@click.help_option("-h", "--help")
def bench() -> None:
    """Measure the engine on this machine: the model's step alone, or the whole path beside it."""


@bench.command("forward")
@config_options
@click.option("--rows", type=Numbers(), default="1,8,32", show_default=True, help="Sequences in a step.")
@click.option("--context", type=click.IntRange(1), default=256, show_default=True, help="Ids of each sequence.")
@click.option("--steps", type=click.IntRange(1), default=50, show_default=True, help="Steps of a sample.")
@click.option(
    "--case",
    "cases",
    type=StepCaseText(),
    multiple=True,
    help="ROWS:CONTEXT:STEPS[:AHEAD], instead of the above; AHEAD steps go before the timed ones. With --device cuda:"
    " NAME=[N*]Q[@K][:D], N requests with Q rows each at a length of K tokens (k: x 1024), D of them drafts.",
)
@click.option("--prefill", type=Numbers(), default="64,256,1024", show_default=True, help="Prompt lengths.")
@click.option("--samples", type=click.IntRange(1), default=3, show_default=True, help="Of everything.")
@click.option("--shapes", metavar="FILE", type=click.Path(dir_okay=False), help="cuda: JSON file of cases.")
@click.option("--iters", type=click.IntRange(1), default=20, show_default=True, help="cuda: steps of a sample.")
@click.option(
    "--routing",
    type=click.Choice(["real", "balanced", "zipf"]),
    default="real",
    show_default=True,
    help="cuda: how rows choose experts.",
)
@click.option(
    "--as-rank-of",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="cuda: hold one of so many shares of the experts, for the rows of all ranks.",
)
@click.option("--dep", type=click.IntRange(2), help="cuda: really so many ranks, a GPU each, with their exchange.")
@click.option(
    "--records",
    type=click.Choice(["fp8", "bf16", "fp32"]),
    default="fp8",
    show_default=True,
    help="cuda: format of what is kept of a sequence.",
)
@click.option("--layers", type=click.IntRange(1), help="cuda: only the model's first ones.")
@click.option("--served", is_flag=True, help="Each case also as the loop of a decode rank runs it.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("--quiet", is_flag=True, help="Nothing but the record.")
@click.option("--output-json", metavar="FILE", help="Write the record there; - is stdout.")
@click.option("--given", type=int, hidden=True, help="Descriptor with the resolved configuration.")
@click.help_option("-h", "--help")
@click.pass_context
def forward(ctx: click.Context, /, given: int | None, **options: Any) -> int:
    """The model's decode step, in this process, with no runtime around it; and how fast it reads prompts.

    With --device cuda: its step on a GPU, with dummy weights of --model: v4-flash, v4.1-flash, a
    config.json or its folder.
    """
    if options["device"] == "cuda":
        _refuse_given(ctx, ON_CPU, "--device cuda has none")
        return _measure_on_cuda(options)
    _refuse_given(ctx, ON_CUDA, "needs --device cuda")
    named = [case for case in options["cases"] if isinstance(case, str)]
    if named:
        raise click.UsageError(f"--case {named[0]} needs --device cuda; the CPU's cases are ROWS:CONTEXT:STEPS[:AHEAD]")
    if given is not None:
        from engine.config import config_from_json
        from engine.spawn import take_bytes

        config = config_from_json(take_bytes(given))
    else:
        config = resolve_options(options).config
    _refuse_device(config)
    from engine.bench.forward import StepCase, measure_forward, open_bare_model
    from engine.bench.table import forward_table

    cases = [StepCase(*case) for case in options["cases"]]
    cases = cases or [StepCase(rows, options["context"], options["steps"]) for rows in options["rows"]]
    if not cases and not options["prefill"]:
        raise click.UsageError("nothing to measure: --rows and --prefill are empty")
    record = _begin("forward", config, options, ("rows", "context", "steps", "cases", "prefill", "samples", "seed"))
    bare = open_bare_model(config)
    record |= measure_forward(
        bare,
        cases,
        options["prefill"],
        samples=options["samples"],
        chunk=config.limits.prefill_chunk_tokens,
        seed=options["seed"],
        tell=_teller(options),
    )
    if options["served"]:
        from engine.bench.served_cpu import add_served

        add_served(record, config, bare, cases, samples=options["samples"], seed=options["seed"], tell=_teller(options))
    _end(record, forward_table(record), options)
    return 0


@bench.command("serve")
@config_options
@click.option("--sequences", type=Numbers(), default="1,8,32", show_default=True, help="Requests at once.")
@click.option("--prompt-tokens", type=click.IntRange(2), default=256, show_default=True, help="Ids of each prompt.")
@click.option(
    "--max-tokens",
    type=click.IntRange(4),
    default=128,
    show_default=True,
    help="Steps that all sequences make together.",
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs of everything.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("-v", "--verbose", is_flag=True, help="Show the engine's log.")
@click.option("--quiet", is_flag=True, help="Nothing but the record.")
@click.option("--output-json", metavar="FILE", help="Write the record there; - is stdout.")
@click.help_option("-h", "--help")
def serve(**options: Any) -> int:
    """An engine of this run's own under load, seen from a client, and the bare forward beside it."""
    import trio

    from engine.bench.serve import ServeOptions, measure_serve
    from engine.bench.table import serve_table

    resolved = resolve_options(options)
    config = resolved.config
    _refuse_device(config)
    if not options["sequences"]:
        raise click.UsageError("nothing to measure: --sequences is empty")
    if not options["verbose"] and resolved.origins.get("log.level") == "default":
        config = dataclasses.replace(config, log_level="warning")  # people look at the figures, not at the engine
    if resolved.origins["draft.tokens"].startswith("default"):
        # The bare step beside it drafts nothing, and its figures are of steps that bring each sequence a token.
        config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, tokens=0))
    names = ("sequences", "prompt_tokens", "max_tokens", "repeat", "seed")
    record = _begin("serve", config, options, names)
    record["pools"] = {"prefill": len(config.prefill.ranks), "decode": len(config.decode.ranks)}
    asked = ServeOptions(**{name: options[name] for name in names})

    async def measure() -> dict[str, Any]:
        return await measure_serve(config, asked, stderr=None, tell=_teller(options))

    record |= trio.run(measure)
    _end(record, serve_table(record), options)
    return 0


@bench.command("link")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Whose memory.")
@click.option("--pages", type=Numbers(), default="32,512", show_default=True, help="Pages of a request.")
@click.option("--samples", type=click.IntRange(1, 1000), default=7, show_default=True, help="Pushes of each kind.")
@click.option(
    "--while-prefill", is_flag=True, help="A prefill rank computes prompts of so many pages, and pushes them meanwhile."
)
@click.option("--model", metavar="NAME", help="Of that rank: nano or a checkpoint; cuda: as of engine bench forward.")
@click.option("--layers", type=click.IntRange(1), help="cuda: only its first ones.")
@click.option("--chunk", type=click.IntRange(1), default=2048, show_default=True, help="Ids of a chunk of a prompt.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of where pages lie.")
@click.option("--quiet", is_flag=True, help="Nothing but the record.")
@click.option("--output-json", metavar="FILE", help="Write the record there; - is stdout.")
@click.help_option("-h", "--help")
@click.pass_context
def bench_link(ctx: click.Context, /, **options: Any) -> int:
    """Pushes between two processes by NIXL, pages of V4-Flash's size: time, rate, posting.

    With --while-prefill: of a model's prompts, while they are computed, and once they are.
    """
    if not options["pages"]:
        raise click.UsageError("--pages is empty; write 32,512")
    if options["while_prefill"]:
        return _measure_pushing(options)
    _refuse_given(ctx, ("model", "layers", "chunk"), "needs --while-prefill")
    from engine.bench.link import LinkOptions, describe_push, measure_link

    asked = LinkOptions(options["device"], options["pages"], samples=options["samples"], seed=options["seed"])
    record = measure_link(asked, ["engine", *sys.argv[1:]], _teller(options))
    _end(record, "\n".join(describe_push(run) for run in record["runs"]), options)
    return int(not all(run["arrived"] for run in record["runs"]))


def _measure_pushing(options: dict[str, Any]) -> int:
    from engine.bench.pushing import PushingOptions, describe_pushing, measure_pushing

    default = "v4-flash" if options["device"] == "cuda" else "nano"
    asked = PushingOptions(
        device=options["device"],
        model=options["model"] or default,
        layers=options["layers"],
        pages=options["pages"],
        chunk=options["chunk"],
        samples=options["samples"],
        seed=options["seed"],
    )
    record = measure_pushing(asked, ["engine", *sys.argv[1:]], _teller(options))
    _end(record, "\n".join(describe_pushing(run) for run in record["runs"]), options)
    return int(not all(run["arrived"] for run in record["runs"]))


def _refuse_given(ctx: click.Context, names: tuple[str, ...], words: str) -> None:
    """Raises UsageError for an option that would do nothing."""
    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} {words}")


def _measure_on_cuda(options: dict[str, Any]) -> int:
    from pathlib import Path

    from engine.bench.cases import gather_cases
    from engine.bench.rig import StepOptions
    from engine.bench.step import describe_run, is_sound, measure_asked

    for case in options["cases"]:
        if not isinstance(case, str):
            raise click.UsageError(f"--case {':'.join(map(str, case))} is the CPU's; write NAME=[N*]Q[@K][:D]")
    shapes = options["shapes"]
    asked = StepOptions(
        model=options["model"] or "v4-flash",
        cases=tuple(gather_cases(options["cases"], Path(shapes) if shapes is not None else None)),
        iters=options["iters"],
        samples=options["samples"],
        routing=options["routing"],
        ranks=options["dep"] or options["as_rank_of"],
        records=options["records"],
        seed=options["seed"],
        layers=options["layers"],
        served=options["served"],
    )
    record = measure_asked(asked, ["engine", *sys.argv[1:]], _teller(options), is_group=options["dep"] is not None)
    _end(record, "\n".join(describe_run(run) for run in record["runs"]), options)
    return int(not all(map(is_sound, record["runs"])))


def _refuse_device(config: ClusterConfig) -> None:
    """Raises ConfigError for a rack that is simulated, whose figures are its scenario's, and for ranks on GPUs."""
    if config.device == "sim":
        raise ConfigError("engine bench measures, and device sim has nothing to measure; see engine up --device sim")
    if config.device == "cuda":
        raise ConfigError(
            "the configuration has device cuda, and this measures ranks on CPUs; write --device cpu, or engine bench"
            " forward --device cuda for a step on a GPU"
        )


def _begin(name: str, config: ClusterConfig, options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    from engine.bench.record import begin_record

    return begin_record(name, config, sys.argv[1:], {key: options[key] for key in names})


def _teller(options: dict[str, Any]) -> Any:
    return (lambda _: None) if options["quiet"] else (lambda line: click.echo(line, err=True))


def _end(record: dict[str, Any], table: Any, options: dict[str, Any]) -> None:
    """Table on stdout, or on stderr if the record goes to stdout."""
    from rich.console import Console

    from engine.bench.record import write_record

    path = options["output_json"]
    if path is not None:
        write_record(record, path)
    if not options["quiet"]:
        console = Console(stderr=path == "-")
        if not console.is_terminal:
            console = Console(stderr=path == "-", width=200)
        console.print(table)
