"""Serve: the whole path, measured from outside: a private engine, a client, and the bare forward beside it.

A repeat measures all row counts bare and then served, in one go, so that a ratio compares what the machine was at the
same time. The bare forward runs in a process of its own while the engine is idle, on the same prompts and at the
context that the served rows have on average.

While prompts are computed, those that came first decode already. So each row count is first run until it is steady, to
learn how many tokens each sequence is ahead then; in the measured runs it is asked for so many more. All sequences then
decode together for about `max_tokens` steps.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import math
import os
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import trio

from engine.actors.client import HeadClient, Row, run_head_client
from engine.bench.arrivals import Arrivals, client_figures, find_window, handoff_figures
from engine.bench.prompts import make_prompts
from engine.bench.summary import summarise_serve
from engine.bench.watch import Watch
from engine.cluster import start_cluster
from engine.config import ClusterConfig
from engine.errors import ConfigError, EngineError
from engine.faces.admin import open_operator
from engine.runtime import RuntimeDirectory
from engine.spawn import child_environment, engine_command, give_json
from transport.messages import Sampling
from transport.unix import open_unix_stream

LEAD_TOKENS = 2048
"""Most tokens that a sequence may be ahead when the last one starts."""
LEAD_MARGIN = 1.25
"""A measured run may prefill more slowly than the one that leads were learnt from."""
CASE_S = 600.0
"""One run of one row count, or one process of the bare forward."""

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class ServeOptions:
    """`sequences` row counts, each with prompts of `prompt_tokens` and about `max_tokens` steps all together."""

    sequences: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    repeat: int
    seed: int


@dataclasses.dataclass(slots=True)
class Case:
    """A row count. `leads`: per sequence in order of submission, tokens it is ahead when all are running."""

    sequences: int
    leads: list[int] = dataclasses.field(default_factory=list)

    @property
    def ahead(self) -> int:
        """Mean of the leads: tokens of a row before the steady state."""
        return round(statistics.fmean(self.leads))


async def measure_serve(
    config: ClusterConfig, options: ServeOptions, *, stderr: int | None, tell: Tell
) -> dict[str, Any]:
    """Starts an engine, measures, ends it.

    Args:
        stderr: descriptor for the engine's log; None is this process's own.
        tell: gets a line of progress per run.

    Returns:
        `runs` and `summary` of a record.

    Raises:
        ConfigError: the options do not fit the configuration.
        EngineError: the engine did not start, a request failed, or no steady state was reached.
    """
    check_options(config, options)
    runs: list[dict[str, Any]] = []
    async with _open_engine(config, stderr) as (client, arrivals, watch):
        cases = [Case(count) for count in options.sequences]
        for case in cases:
            case.leads = await _learn_leads(client, arrivals, case, config, options)
            ahead = max(case.leads)
            tell(f"{case.sequences} sequences: the first is {ahead} tokens ahead when the last starts")
        for repeat in range(options.repeat):
            seed = options.seed + repeat
            bare = await _run_bare(config, cases, options, seed)
            for case, step_ms in zip(cases, bare, strict=True):
                runs.append({"kind": "bare", "repeat": repeat, "sequences": case.sequences, **step_ms})
                tell(f"bare    {case.sequences:>3} rows: {step_ms['step_ms']:.2f} ms a step")
            for case in cases:
                figures = await _run_case(client, arrivals, watch, case, config, options, seed)
                runs.append({"kind": "served", "repeat": repeat, "sequences": case.sequences, **figures})
                tell(
                    f"served  {case.sequences:>3} rows: {figures['step_ms']:.2f} ms a step,"
                    f" {figures['tokens_per_s']:.1f} tokens/s"
                )
    return {"runs": runs, "summary": summarise_serve(runs)}


def check_options(config: ClusterConfig, options: ServeOptions) -> None:
    """Raises ConfigError unless all sequences can run at once."""
    most = len(config.decode.ranks) * min(config.limits.decode_rows, config.num_slabs)
    if max(options.sequences) > most:
        raise ConfigError(
            f"{max(options.sequences)} sequences can not run at once: {len(config.decode.ranks)} decode ranks with"
            f" limits.decode_rows {config.limits.decode_rows} and num_slabs {config.num_slabs} hold {most}"
        )
    for count in options.sequences:
        if _most_tokens(config, options, count) < options.max_tokens + 2:
            raise ConfigError(
                f"{count} sequences of {options.prompt_tokens} + {options.max_tokens} tokens do not fit:"
                f" max_model_tokens is {config.max_model_tokens}, a rank has {config.num_pages} pages of"
                f" {config.page_tokens} tokens"
            )


def _most_tokens(config: ClusterConfig, options: ServeOptions, sequences: int) -> int:
    """Longest completion that all sequences can have at once."""
    rows = math.ceil(sequences / len(config.decode.ranks))
    room = min(config.num_pages // rows * config.page_tokens, config.max_model_tokens)
    return min(room - options.prompt_tokens, options.max_tokens + LEAD_TOKENS)


# ---------------------------------------------------------------- served


@contextlib.asynccontextmanager
async def _open_engine(config: ClusterConfig, stderr: int | None) -> AsyncIterator[tuple[HeadClient, Arrivals, Watch]]:
    """A ready engine with a client and a watch on it. Errors leave it one by one, not in groups."""
    failure: EngineError | None = None
    arrivals = Arrivals()
    async with start_cluster(config, stderr=stderr) as cluster:
        await cluster.wait_ready(config.limits.start_s)
        directory = RuntimeDirectory(os.path.dirname(cluster.requests_path))
        async with open_operator(directory.read_socket) as head:
            watch = Watch(head)
            stream = await open_unix_stream(cluster.requests_path)
            try:
                async with trio.open_nursery() as nursery:

                    async def speak(*, task_status: trio.TaskStatus[HeadClient]) -> None:
                        await run_head_client(stream, arrivals, name="bench", task_status=task_status)

                    client: HeadClient = await nursery.start(speak)
                    nursery.start_soon(watch.run)
                    yield client, arrivals, watch
                    nursery.cancel_scope.cancel()
            except* EngineError as group:
                failure = _first_leaf(group)
    if failure is not None:
        raise failure


def _first_leaf(group: BaseExceptionGroup[EngineError]) -> EngineError:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _make_rows(lengths: Sequence[int], config: ClusterConfig, options: ServeOptions, seed: int) -> list[Row]:
    prompts = make_prompts(len(lengths), options.prompt_tokens, config.vocab_size, seed)
    return [
        Row(
            prompt=array.array("i", prompt).tobytes(),
            sampling=Sampling(max_tokens=length, ignore_eos=True),
            label=str(place),
        )
        for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def _learn_leads(
    client: HeadClient, arrivals: Arrivals, case: Case, config: ClusterConfig, options: ServeOptions
) -> list[int]:
    """Runs the case until it is steady, then cancels it."""
    most = _most_tokens(config, options, case.sequences)
    rows = _make_rows([most] * case.sequences, config, options, options.seed)
    arrivals.begin([row.label for row in rows])
    with _bounded(f"{case.sequences} sequences to run together"):
        for row in rows:
            await client.submit(row)
        await arrivals.wait(arrivals.is_steady)
        if not arrivals.is_steady():
            raise EngineError(f"{case.sequences} sequences ended before all were running; ask for shorter prompts")
        leads = [len(arrivals.times[row.label]) - 2 for row in rows]
        for row in rows:
            if client.holds(row):
                client.cancel(row)
        await arrivals.wait()
    return leads


async def _run_case(
    client: HeadClient,
    arrivals: Arrivals,
    watch: Watch,
    case: Case,
    config: ClusterConfig,
    options: ServeOptions,
    seed: int,
) -> dict[str, Any]:
    """One measured run."""
    most = _most_tokens(config, options, case.sequences)
    lengths = [min(most, options.max_tokens + 2 + math.ceil(lead * LEAD_MARGIN)) for lead in case.leads]
    rows = _make_rows(lengths, config, options, seed)
    arrivals.begin([row.label for row in rows])
    watch.forget()
    with _bounded(f"{case.sequences} sequences to end"):
        for row in rows:
            await client.submit(row)
        await arrivals.wait(arrivals.is_steady)
        before, seen = watch.thread_times(), sum(map(len, arrivals.times.values()))
        await arrivals.wait(arrivals.has_end)
        after, steps = watch.thread_times(), (sum(map(len, arrivals.times.values())) - seen) / len(rows)
        await arrivals.wait()
    await trio.sleep(2 * config.limits.snapshot_s)  # the ranks' percentiles are to hold the last steps too
    times = [arrivals.times[row.label] for row in rows]
    window = find_window(times)
    return {
        **client_figures([row.submitted_at for row in rows], times, window),
        **handoff_figures([arrivals.accounts[row.label] for row in rows]),
        "ranks": watch.figures(window.start, window.end),
        "processes": {name: after[name].since(before[name], max(steps, 1.0)) for name in before},
    }


@contextlib.contextmanager
def _bounded(what: str) -> Any:
    with trio.move_on_after(CASE_S) as scope:
        yield
    if scope.cancelled_caught:
        raise EngineError(f"waited {CASE_S:g} s for {what}")


# ---------------------------------------------------------------- bare


async def _run_bare(
    config: ClusterConfig, cases: Sequence[Case], options: ServeOptions, seed: int
) -> list[dict[str, Any]]:
    """The forward of every case, in a process of its own; one sample each, of the prompts that `seed` gives."""
    given = give_json(dataclasses.asdict(config))
    command = [*engine_command(), "bench", "forward", "--given", str(given), "--samples", "1", "--prefill", ""]
    for case in cases:
        rows = math.ceil(case.sequences / len(config.decode.ranks))
        command += ["--case", f"{rows}:{options.prompt_tokens}:{options.max_tokens}:{case.ahead}"]
    try:
        with _bounded("the bare forward"):
            done = await trio.run_process(
                [*command, "--seed", str(seed), "--quiet", "--output-json", "-"],
                capture_stdout=True,
                capture_stderr=True,
                check=False,
                pass_fds=(given,),
                env=child_environment(config.threads),
            )
    finally:
        os.close(given)
    if done.returncode != 0:
        raise EngineError(f"the bare forward ended with code {done.returncode}: {done.stderr.decode().strip()}")
    found = [run for run in json.loads(done.stdout)["runs"] if run["kind"] == "decode"]
    return [
        {
            "step_ms": run["step_ms_mean"],
            "step_ms_p50": run["step_ms_median"],
            "step_ms_min": run["step_ms_min"],
            "cpu_ms_per_step": run["cpu_ms_per_step"],
            "ready_ms_per_step": run["ready_ms_per_step"],
            "ahead": run["ahead"],
        }
        for run in found
    ]
