"""Group: the same steps on all ranks of a group at once, a GPU and a process each, with the exchange between them.

Each rank builds its share of the model and replays its own graphs; exchanges inside keep them together, so a sample is
the group's time whichever rank's clock took it. All ranks run the same code in the same order, and nothing else may
come between.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from engine.bench.rig import StepBench, StepOptions
from engine.bench.step import describe_run, measure_runs, open_record
from engine.errors import ConfigError
from engine.model.nvlink import NvlinkExchange, allocate_mailbox, meet
from engine.model.shapes import ModelShape
from kernels.mailbox import MailboxLayout

WAIT_S = 60.0
"""Longest wait of an exchange: ranks compile and capture for different times."""
START_S = 600.0
"""Until all ranks have their weights."""
CASE_S = 2 * START_S
"""Longest silence of a rank: its start, and all of a case."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def measure_group(options: StepOptions, arguments: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """As `step.measure_steps`, on `options.ranks` GPUs. A run has rank 0's figures, and under `ranks` each rank's time
    and experts touched.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if torch.cuda.device_count() < options.ranks:
        raise ConfigError(f"a group of {options.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    receivers, processes = [], []
    for rank in range(options.ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(options, rank, port, sender), daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    found: list[list[dict[str, Any]]] = [[] for _ in receivers]
    try:
        for case in options.cases:
            for rank, receiver in enumerate(receivers):
                found[rank].append(_receive(receiver, rank))
            run = _join([runs[-1] for runs in found])
            tell(describe_run(run))
            for rank, entry in enumerate(run.get("ranks", ())):
                tell(
                    f"  rank {rank}: {entry['median_us'] / 1e3:.3f} ms, {entry['experts_touched']:.1f} experts a layer,"
                    f" {entry['share_of_bound']:.2f} of its bound"
                )
            assert run["case"] == case.name
    finally:
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
    return open_record(options, arguments) | {
        "group": options.ranks,
        "runs": [_join(list(runs)) for runs in zip(*found, strict=True)],
    }


def _receive(receiver: Connection, rank: int) -> dict[str, Any]:
    if not receiver.poll(CASE_S):
        raise ConfigError(f"rank {rank} of the group has said nothing for {CASE_S:g} s")
    try:
        run: dict[str, Any] = receiver.recv()
    except EOFError:
        raise ConfigError(f"rank {rank} of the group has ended; its traceback is above") from None
    return run


def _join(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of those of all ranks: the first one's, as long as nobody has failed."""
    for run in runs:
        if "error" in run:
            return run
    whole = dict(runs[0])
    whole["finite"] = all(run["finite"] for run in runs)
    whole["graph_equals_eager"] = all(run["graph_equals_eager"] for run in runs)
    # A step waits for the rank with most to read.
    slowest = max(runs, key=lambda run: run["bound_us"])
    whole |= {key: slowest[key] for key in ("bound_us", "bytes", "experts_touched")}
    whole["share_of_bound"] = whole["bound_us"] / whole["median_us"]
    whole["ranks"] = [
        {
            "median_us": run["median_us"],
            "samples_us": run["samples_us"],
            "experts_touched": statistics.fmean(run["experts_touched"]["per_layer"]),
            "bound_us": run["bound_us"],
            "share_of_bound": run["share_of_bound"],
        }
        for run in runs
    ]
    return whole


def _run_rank(options: StepOptions, rank: int, port: int, sender: Connection) -> None:
    """A rank's process."""
    os.environ |= NO_MULTICAST
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=options.ranks,
        rank=rank,
        device_id=device,
        timeout=datetime.timedelta(seconds=START_S),
    )
    exchange: NvlinkExchange | None = None

    def make_exchange(shape: ModelShape) -> NvlinkExchange:
        nonlocal exchange
        layout = MailboxLayout(
            ranks=options.ranks,
            layers=shape.num_layers,
            capacity=max(case.requests * case.rows for case in options.cases),
            hidden=shape.hidden,
            top_k=shape.top_k,
        )
        memory = allocate_mailbox(layout, device)
        group = dist.group.WORLD
        assert group is not None
        exchange = NvlinkExchange(layout, rank, memory, limit_s=WAIT_S)
        exchange.enter(1, meet(memory, group, range(options.ranks)))
        return exchange

    bench = StepBench(options, device, rank=rank, make_exchange=make_exchange)
    torch.cuda.synchronize()
    dist.barrier()
    for run in measure_runs(bench):
        expiry = exchange.find_expiry() if exchange is not None else None
        sender.send(run if expiry is None else {"case": run["case"], "error": str(expiry)})
        if expiry is not None:
            return
        dist.barrier()
    dist.destroy_process_group()
