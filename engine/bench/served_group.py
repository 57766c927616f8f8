"""Served by a group: the cases of `group.py` once more, as the loops of all its decode ranks run them together.

A process and a GPU for each rank, as in service: device, mesh, slots, exchanges, the pact. This process is their head:
it names the membership as a head does and passes words on. All ranks begin a batch at the same time, a few steps before
those that are timed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import trio

from engine.actors.group import Group, Wire
from engine.bench.admission import measure_admissions
from engine.bench.cases import DeviceCase, cut_layers, load_model_config
from engine.bench.group import START_S
from engine.bench.loop import DECODE, LIFE, open_tasks
from engine.bench.rig import PAGE_TOKENS, StepOptions, count_pages, positions_of
from engine.bench.served import CASE_S, ServedSample
from engine.bench.served_cuda import AHEAD, SAMPLES, STEPS, is_served, judge_samples
from engine.bench.served_rank import GroupCase, run_rank_process
from engine.bench.step import describe_run
from engine.config import ExpertsConfig, Limits, RankConfig
from engine.core.parts import PartRules
from engine.errors import ConfigError, EngineError
from transport.wire import Frame


def add_served(record: dict[str, Any], options: StepOptions, tell: Callable[[str], None]) -> None:
    """Adds to a group's record what serving its cases takes. The bare ranks have ended: their memory is needed.

    Raises:
        ConfigError, EngineError: see `serve_group`.
    """
    served = serve_group(options, tell)
    for run in record["runs"]:
        if run["case"] in served and "median_us" in run:
            run["served"] = describe_ranks(served[run["case"]], run["median_us"])
            tell(describe_run(run))
    record["admissions"] = measure_admissions(max(case.requests for case in options.cases) - 1, tell)


def serve_group(options: StepOptions, tell: Callable[[str], None]) -> dict[str, list[list[ServedSample]]]:
    """Runs all cases that can be served; by name, for each rank SAMPLES samples and then the one that is split.

    Raises:
        ConfigError: there are too few GPUs, or no case can be served.
        EngineError: a rank ended, or said nothing for too long.
    """
    cases = [case for case in options.cases if is_served(case)]
    if not cases:
        raise ConfigError(f"--served needs a case with one row of each request and {AHEAD + STEPS + 3} tokens")
    config = _load_config(options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        plans = {
            case.name: [
                GroupCase(tuple(max(ends[-1] - AHEAD - STEPS, 1) for ends in positions_of(case)), STEPS, AHEAD, split)
                for split in (*[False] * SAMPLES, True)
            ]
            for case in cases
        }
        return run_group(rank_config(options, cases, folder), plans, folder, tell)


def _load_config(options: StepOptions) -> dict[str, Any]:
    config = load_model_config(options.model)
    return config if options.layers is None else cut_layers(config, options.layers)


def rank_config(options: StepOptions, cases: Sequence[DeviceCase], model: str) -> RankConfig:
    """Of each rank: room for the largest case."""
    rows, longest = max(case.requests for case in cases), max(case.length for case in cases)
    return RankConfig(
        role="decode",
        model=model,
        device="cuda",
        fabric="nixl",
        page_tokens=PAGE_TOKENS,
        max_model_tokens=longest,
        num_pages=max(case.requests * count_pages(case) for case in cases),
        num_slabs=rows,
        kv_dtype="fp8",
        threads=1,
        replay_rows=0,
        config_digest="",
        limits=Limits(decode_rows=rows, start_s=START_S),
        group=options.ranks,
        experts_main=ExpertsConfig(spare_slots=0),
        load_format="dummy",
    )


def describe_ranks(ranks: Sequence[Sequence[ServedSample]], forward_us: float) -> dict[str, Any]:
    """What is added to a case's entry of a record: the figures of the rank whose steps take longest, and under `ranks`
    each one's."""
    judged = [judge_samples(samples[:-1], samples[-1], forward_us) for samples in ranks]
    slowest = max(judged, key=lambda found: float(found["median_us"]))
    return slowest | {"ranks": judged}


def run_group(
    config: RankConfig, plans: dict[str, list[GroupCase]], folder: str, tell: Callable[[str], None]
) -> dict[str, list[list[ServedSample]]]:
    """Starts `config.group` ranks, has them run each case of each plan together, ends them.

    Args:
        folder: for their sockets.

    Returns:
        By plan, for each rank its samples.

    Raises:
        EngineError: a rank ended, or said nothing for too long.
    """
    with _open_ranks(config, folder) as pipes:
        return trio.run(_lead, config, plans, pipes, tell)


@contextlib.contextmanager
def _open_ranks(config: RankConfig, folder: str) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for place in range(config.group):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank_process, args=(config, place, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


# ---------------------------------------------------------------- the head


async def _lead(
    config: RankConfig, plans: dict[str, list[GroupCase]], pipes: Sequence[Connection], tell: Callable[[str], None]
) -> dict[str, list[list[ServedSample]]]:
    """Names the membership, then has the cases run."""
    experts = config.experts_main
    rules = PartRules(experts.spare_slots, "manual", experts.horizon_steps, experts.link_bytes_per_s)
    ranks = tuple(DECODE + place for place in range(config.group))
    group = Group("decode", 0, ranks, (rules, rules), (experts.max_bytes_per_step,) * 2)
    serving: set[int] = set()
    found: dict[str, list[list[ServedSample]]] = {name: [[] for _ in pipes] for name in plans}
    news = trio.Event()
    told: list[list[tuple[str, Any]]] = [[] for _ in pipes]

    async def listen(place: int) -> None:
        nonlocal news
        while True:
            try:
                kind, what = await trio.to_thread.run_sync(pipes[place].recv, abandon_on_cancel=True)
            except (EOFError, ConnectionResetError):
                raise EngineError(f"rank {ranks[place]} of the group has ended; its traceback is above") from None
            if kind == "word":
                group.rank_frames(ranks[place], [Frame(what[0], memoryview(what[1]))])
            elif kind == "hello":
                wire = Wire(
                    LIFE,
                    lambda message, blob: pipes[place].send(("head", (message, bytes(blob)))),
                    lambda why: tell(f"rank {ranks[place]}: {why}"),
                    lambda: serving.add(place),
                )
                ready, description = what
                group.rank_ready(ready, description, wire)
            else:
                told[place].append((kind, what))
            news.set()

    async def wait(what: str, limit_s: float, is_there: Callable[[], bool]) -> None:
        nonlocal news
        with trio.move_on_after(limit_s):
            while not is_there():
                news = trio.Event()
                await news.wait()
            return
        raise EngineError(f"the group's ranks: {what} not within {limit_s:g} s")

    async def gather(kind: str, limit_s: float) -> list[Any]:
        await wait(f"{kind!r} of all", limit_s, lambda: all(words and words[0][0] == kind for words in told))
        return [words.pop(0)[1] for words in told]

    async with open_tasks() as nursery:
        for place in range(len(pipes)):
            nursery.start_soon(listen, place)
        await wait("stepping together", START_S, lambda: len(serving) == len(pipes))
        tell(f"{len(pipes)} ranks step together")
        for name, cases in plans.items():
            for case in cases:
                for pipe in pipes:
                    pipe.send(("case", case))
                await gather("met", CASE_S)
                for pipe in pipes:
                    pipe.send(("go", None))
                for samples, sample in zip(found[name], await gather("sample", CASE_S), strict=True):
                    samples.append(sample)
            medians = [statistics.median(samples[0].step_us) / 1e3 for samples in found[name]]
            tell(f"served  {name}: " + ", ".join(f"{median:.3f}" for median in medians) + " ms a step")
    return found
