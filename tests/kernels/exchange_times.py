"""How long exchanges between two ranks take in a graph, by rows and by how they are cut, beside NCCL in the same run.

A part of `exchange_two_ranks.py`, which opens the ranks. Predictions were written before the first run.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.nvlink import NvlinkExchange
from kernels.combine import combine_rows
from kernels.exchange import ExchangeConfig, choose_config, dispatch_rows
from kernels.mailbox import Mailbox, MailboxLayout

HIDDEN, TOP_K, EXPERTS = 4096, 6, 256
LAYERS, ROWS = 20, (1, 16, 64, 256)
# A barrier of this kind took 3.0 us, and 896 KB each way 6.9 (docs/performance.md, Exchange over NVLink).
PREDICTED = {
    ("dispatch", "bf16"): {1: 3.6, 16: 4.2, 64: 5.8, 256: 10.5},
    ("dispatch", "fp8"): {1: 4.2, 16: 4.6, 64: 5.4, 256: 8.5},
    ("combine", "f32"): {1: 3.8, 16: 4.8, 64: 7.5, 256: 17.0},
    ("combine", "bf16"): {1: 3.8, 16: 4.4, 64: 6.0, 256: 11.0},
}
CONFIGS = {
    "1x8": ExchangeConfig(1, 8),
    "1x4": ExchangeConfig(1, 4),
    "2x4": ExchangeConfig(2, 4),
    "4x2": ExchangeConfig(4, 2),
    "1x8 late": ExchangeConfig(1, 8, early=False),
}
"""Parts of a row x warps."""
FEW = ("1x8", "4x2")


class Member(Protocol):
    """One of the two ranks, see `exchange_two_ranks.py`."""

    rank: int
    device: torch.device
    problems: list[str]
    times: list[dict[str, Any]]

    def open(self, layout: MailboxLayout) -> tuple[NvlinkExchange, Tensor, dict[int, int]]: ...

    def open_peer_memory(self, layout: MailboxLayout) -> tuple[NvlinkExchange, Tensor, dict[int, int]]: ...

    def meet_host(self) -> None: ...

    def expect(self, is_right: bool, what: str) -> None: ...


def capture(call: Callable[[], None], warm_ups: int = 1) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


def time_exchanges(member: Member) -> None:
    """All sizes and variants, into the member's times."""
    for narrow, part_dtype in ((False, torch.float32), (True, torch.bfloat16)):
        layout = MailboxLayout(2, LAYERS, max(ROWS), HIDDEN, TOP_K, narrow=narrow, part_dtype=part_dtype)
        exchange, _, _ = member.open(layout)
        for rows in ROWS:
            _time_rows(member, exchange.mailbox, rows)
        found = exchange.find_expiry()
        member.expect(found is None, f"while it was timed: {found}")


def compare_memories(member: Member) -> None:
    """Torch's symmetric memory beside the engine's own, in turns, three times each, into the member's times."""
    layout = MailboxLayout(2, LAYERS, max(ROWS), HIDDEN, TOP_K)
    exchanges = {"symmetric": member.open(layout)[0], "peer": member.open_peer_memory(layout)[0]}
    for rows in ROWS:
        calls = {name: _plain_exchanges(exchange.mailbox, rows) for name, exchange in exchanges.items()}
        predicted = {"dispatch": PREDICTED["dispatch", "bf16"][rows], "combine": PREDICTED["combine", "bf16"][rows]}
        for turn in range(3):
            for name, both in calls.items():
                for phase, call in both.items():
                    label = f"{name} {turn}"
                    _time(member, f"{phase} bf16 {rows}", label, call, choose_config(rows), predicted[phase])
    for name, exchange in exchanges.items():
        found = exchange.find_expiry()
        member.expect(found is None, f"in {name} memory: {found}")


def _plain_exchanges(box: Mailbox, rows: int) -> dict[str, Callable[[ExchangeConfig], None]]:
    """Both phases of LAYERS layers, with parts that are added up already."""
    device = box.memory.device
    x = torch.randn((rows, HIDDEN), device=device).bfloat16()
    ids = torch.rand((rows, EXPERTS), device=device).topk(TOP_K, -1).indices.sort(-1).values.int()
    weights = torch.rand((rows, TOP_K), device=device)
    sums, all_ids, out = torch.randn((2 * rows, HIDDEN), device=device), ids.repeat(2, 1), torch.empty_like(x)

    def dispatch(config: ExchangeConfig) -> None:
        for layer in range(LAYERS):
            dispatch_rows(box, layer, rows, x, ids, weights, config)

    def combine(config: ExchangeConfig) -> None:
        for layer in range(LAYERS):
            combine_rows(box, layer, rows, sums, all_ids, x, out, None, config)

    return {"dispatch": dispatch, "combine": combine}


def _time_rows(member: Member, box: Mailbox, rows: int) -> None:
    device, narrow = member.device, box.layout.narrow
    kind, part = ("fp8", "bf16") if narrow else ("bf16", "f32")
    x = torch.randn((rows, HIDDEN), device=device).bfloat16()
    ids = torch.rand((rows, EXPERTS), device=device).topk(TOP_K, -1).indices.sort(-1).values.int()
    weights = torch.rand((rows, TOP_K), device=device)
    all_ids = ids.repeat(2, 1)
    table = torch.where(torch.arange(EXPERTS, device=device) % 2 == member.rank, 0, -1).int()
    pairs = torch.randn((2 * rows, TOP_K, HIDDEN), device=device)
    sums, base, out = pairs[:, 0].contiguous(), torch.randn_like(x), torch.empty_like(x)

    def dispatch(config: ExchangeConfig) -> None:
        for layer in range(LAYERS):
            dispatch_rows(box, layer, rows, x, ids, weights, config)

    def combine(config: ExchangeConfig) -> None:
        for layer in range(LAYERS):
            combine_rows(box, layer, rows, sums, all_ids, base, out, None, config)

    def combine_pairs(config: ExchangeConfig) -> None:
        for layer in range(LAYERS):
            combine_rows(box, layer, rows, pairs, all_ids, base, out, table, config)

    def both(config: ExchangeConfig) -> None:
        for layer in range(LAYERS):
            dispatch_rows(box, layer, rows, x, ids, weights, config)
            combine_rows(box, layer, rows, sums, all_ids, base, out, None, config)

    there, back = PREDICTED["dispatch", kind][rows], PREDICTED["combine", part][rows]
    for label, config in CONFIGS.items():
        if narrow and label not in FEW:
            continue
        _time(member, f"dispatch {kind} {rows}", label, dispatch, config, there)
        _time(member, f"combine {part} {rows}", label, combine, config, back)
        if label in FEW:
            _time(member, f"combine pairs {part} {rows}", label, combine_pairs, config, back + 1.5)
            _time(member, f"dispatch + combine {kind} {rows}", label, both, config, there + back)
    if not narrow:
        joined, swapped = torch.empty((2 * rows, HIDDEN), dtype=x.dtype, device=device), torch.empty_like(sums)

        def gather(_: ExchangeConfig) -> None:
            for _layer in range(LAYERS):
                dist.all_gather_into_tensor(joined, x)

        def swap(_: ExchangeConfig) -> None:
            for _layer in range(LAYERS):
                dist.all_to_all_single(swapped, sums)

        _time(member, f"nccl all_gather bf16 {rows}", "graph", gather, ExchangeConfig(), 35.0)
        _time(member, f"nccl all_to_all f32 {rows}", "graph", swap, ExchangeConfig(), 50.0)


def _time(
    member: Member,
    name: str,
    label: str,
    run: Callable[[ExchangeConfig], None],
    config: ExchangeConfig,
    predicted: float,
) -> None:
    """Microseconds of one of LAYERS exchanges in a graph; the slower rank's."""
    try:
        graph = capture(lambda: run(config))
        member.meet_host()
        for _ in range(3):
            graph.replay()
        samples = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / 5 / LAYERS)
        value = torch.tensor([statistics.median(samples), max(samples)], device=member.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        us, us_max = value.tolist()
        found = {"name": name, "config": label, "us": us, "us_max": us_max, "predicted_us": predicted}
        if member.rank == 0:
            member.times.append(found)
    except Exception as error:
        # A variant that breaks must not cost the others their device time.
        traceback.print_exc(limit=4)
        member.problems.append(f"rank {member.rank}: {name}: {error}"[:300])
