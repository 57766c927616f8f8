"""Expert slots of V4-Flash on GPUs: how long they take to fill, to change tables, to be read, and to be copied.

    python -m tests.model.measure_slots --output-json slots.json

One GPU has all slots of a rank of two (81 GB). Copies need a second one, and are left out without it. Predictions stand
in docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from torch import Tensor

from engine.bench.cases import load_model_config
from engine.bench.record import SCHEMA, describe_machine, find_commit
from engine.config import ExpertsConfig, Limits, RankConfig
from engine.core.group import Membership, PartPlacement
from engine.core.placement import EMPTY, lay_out
from engine.core.switch import COPIES_RUNNING
from engine.model.device_grouping import open_device_parts
from engine.model.device_slots import DevicePart, DeviceSlotPool, DeviceSource
from engine.model.dummy import DummySource
from engine.model.expert_slots import TorchExpertSlots
from engine.model.ops import ops_for
from engine.model.shapes import ModelShape, load_shape
from engine.model.slot_form import SlotForm
from engine.model.slots import SlotTable
from engine.model.step_weights import PlacedExperts, make_step_weights
from engine.version import VERSION
from kernels.forms import SlotWeights
from transport.fabric import BlockRun, Fabric, Target
from transport.messages import Member
from transport.nixl_fabric import open_nixl_fabric

SPARE = 550
"""A tenth of a rank's slots."""
LAYERS = 6
"""Of the products: more than caches hold, all of different experts."""
ROWS = (1, 16, 64, 128)
STEP_S = 0.003

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--no-products", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    count = torch.cuda.device_count()
    runs: list[Record] = []

    def tell(run: Record) -> None:
        runs.append(run)
        print({name: round(value, 2) if isinstance(value, float) else value for name, value in run.items()}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(load_model_config("v4-flash")), encoding="utf-8")
        shape, part = measure_filling(folder, device, tell)
    if not options.no_products:
        measure_products(shape, part, device, tell)
    if count > 1:
        # A pool of another size, as the receiver's is: a fabric's tables are equal on all ranks.
        del part
        torch.cuda.empty_cache()
        form = SlotForm(shape.hidden, shape.expert_width, torch.uint8)
        slots = LAYERS * shape.num_experts
        with open_receiver(form.slot_bytes, slots) as peer:
            trio.run(measure_copies, shape, form, slots, peer, device, tell)
    if options.output_json is not None:
        gpus = [torch.cuda.get_device_name(gpu) for gpu in range(count)]
        record = {
            "schema": SCHEMA,
            "bench": "slots",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {**describe_machine(), "gpus": gpus},
            "engine": VERSION,
            "commit": find_commit(),
            "command": shlex.join(["python", "-m", "tests.model.measure_slots", *sys.argv[1:]]),
            "settings": {"spare": SPARE, "layers": LAYERS},
            "runs": runs,
        }
        options.output_json.write_text(json.dumps(record), encoding="utf-8")


@contextlib.contextmanager
def clocked(run: Record, name: str) -> Iterator[None]:
    """Notes milliseconds until the device has done all."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    torch.cuda.synchronize()
    run[name] = (time.perf_counter() - began) * 1e3


def measure_filling(folder: str, device: torch.device, tell: Callable[[Record], None]) -> tuple[ModelShape, DevicePart]:
    """All experts of a rank of two, the dense weights beside them, and switches of tables."""
    config = RankConfig(
        role="decode", model=folder, device="cuda", fabric="nixl", page_tokens=256, max_model_tokens=8192, num_pages=1,
        num_slabs=1, kv_dtype="fp8", threads=1, replay_rows=0, config_digest="0", group=2, load_format="dummy",
        limits=Limits(), experts_main=ExpertsConfig(spare_slots=SPARE),
    )  # fmt: skip
    shape = load_shape(Path(folder))
    run: Record = {"what": "filling"}
    with clocked(run, "allocation_ms"):
        (part,), _ = open_device_parts(config, device)
    info = part.pool.info
    run |= {"slots": info.slots, "slot_bytes": info.slot_bytes}
    placement = lay_out(info.layers, info.experts, 2, info.slots)
    experts = TorchExpertSlots((part.pool,), (part.source,), "0", lambda: None)
    members = (Member(0, 1, "0", 0), Member(1, 1, "1", 0))
    membership = Membership(1, members, (b"", b""), (PartPlacement(1, placement),))
    with clocked(run, "experts_ms"):
        trio.run(experts.prepare, membership)
    run["experts"] = int((part.pool.held != EMPTY).sum())
    with clocked(run, "dense_ms"):
        placed = PlacedExperts(part.pool.weights, part.tables.expert_to_slot, part.tables.counts)
        dense = make_step_weights(shape, DummySource(shape, device), max_tokens=8192, placed=placed)
    tell(run | {"dense_bytes": dense.dense_bytes, "free_gib": torch.cuda.mem_get_info(device)[0] / 2**30})
    tables = [SlotTable(placement), SlotTable(placement)]
    for routed in (False, True):
        part.tables.routed = routed
        part.tables.clear()
        part.tables.put(tables[1], 0, part.pool)
        host, same, stream = [], [], []
        for turn in range(40):
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            # The device sleeps longer than the host takes, so that events tell of the copy alone.
            torch.cuda._sleep(10_000_000)
            events[0].record()
            began = time.perf_counter()
            part.tables.put(tables[turn % 2], 0, part.pool)
            host.append((time.perf_counter() - began) * 1e6)
            events[1].record()
            began = time.perf_counter()
            part.tables.put(tables[turn % 2], 0, part.pool)
            same.append((time.perf_counter() - began) * 1e6)
            torch.cuda.synchronize()
            stream.append(events[0].elapsed_time(events[1]) * 1e3)
        medians = {"host_us": statistics.median(host), "stream_us": statistics.median(stream)}
        tell({"what": "switch", "routed": routed, **medians, "same_us": statistics.median(same)})
    return shape, part


def measure_products(shape: ModelShape, part: DevicePart, device: torch.device, tell: Callable[[Record], None]) -> None:
    """The experts' products of some layers, from slots and from an array for each of their parts."""
    arrays = DummySource(shape, device).slots([divmod(int(key), 256) for key in part.pool.held[: LAYERS * 128]])
    generator = torch.Generator(device).manual_seed(3)
    for rows in ROWS:
        graphs, outputs, run = [], [], {"what": "products", "rows": rows}
        for slots in (arrays, part.pool.weights):
            call = make_products(shape, rows, slots, part.tables.expert_to_slot, generator.manual_seed(rows))
            graphs.append(capture(call))
            outputs.append(call())
        torch.cuda.synchronize()
        run["equal"] = all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
        for name, graph in zip(("arrays_us", "slots_us", "arrays_again_us", "slots_again_us"), graphs * 2, strict=True):
            run[name] = statistics.median(time_graph(graph) for _ in range(15))
        tell(run)


def make_products(
    shape: ModelShape, rows: int, slots: SlotWeights, tables: Tensor, generator: torch.Generator
) -> Callable[[], list[Tensor]]:
    """Sums of random rows over random experts, for each of some layers."""
    device, ops = tables.device, ops_for(tables.device)
    x = torch.randn((rows, shape.hidden), device=device, generator=generator).bfloat16()
    drawn = torch.rand((LAYERS, rows, shape.num_experts), device=device, generator=generator)
    ids = drawn.topk(shape.top_k, -1).indices.sort(-1).values.int().contiguous()
    weights = torch.rand((rows, shape.top_k), device=device, generator=generator)

    def call() -> list[Tensor]:
        return [ops.mix_experts(x, ids[layer], weights, tables[layer], slots, shape.clamp) for layer in range(LAYERS)]

    return call


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a call, which compiles first."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, replays: int = 10) -> float:
    """Microseconds of a layer. Waits without spinning: others may want the processor."""
    begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (replays * LAYERS)


@contextlib.contextmanager
def open_receiver(slot_bytes: int, slots: int) -> Iterator[Connection]:
    """A process on the second GPU whose slots may be written: it says its fabric's description, and then a checksum for
    each list of slots that it is sent."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(slot_bytes, slots, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


def receive(slot_bytes: int, slots: int, peer: Connection) -> None:
    """The other process."""
    torch.cuda.set_device(1)
    memory = torch.zeros(slots * slot_bytes, dtype=torch.uint8, device="cuda:1")

    async def serve() -> None:
        async with open_nixl_fabric("in", device=1, on_thread_start=lambda: torch.cuda.set_device(1)) as fabric:
            await fabric.register([BlockRun(memory.data_ptr(), slot_bytes, slots)])
            peer.send(fabric.describe())
            while True:
                try:
                    asked = await hear(peer)
                except EOFError:
                    return
                peer.send(checksum([memory[slot * slot_bytes : (slot + 1) * slot_bytes] for slot in asked]))

    trio.run(serve)


async def hear(peer: Connection) -> Any:
    """What the other process says next."""
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(peer.recv, abandon_on_cancel=True)


def checksum(parts: Iterable[Tensor]) -> int:
    """CRC-32 over all of them."""
    value = 0
    for part in parts:
        value = zlib.crc32(part.cpu().numpy().data, value)
    return value


async def measure_copies(
    shape: ModelShape,
    form: SlotForm,
    slots: int,
    peer: Connection,
    device: torch.device,
    tell: Callable[[Record], None],
) -> None:
    """Slots to another GPU, as a rank's loop copies them; alone, and beside products of the sender."""
    pool = DeviceSlotPool("main", LAYERS, shape.num_experts, slots, form, device)
    source = DeviceSource(pool, "layers", DummySource(shape, device).put_expert)
    for slot in range(slots):
        source.load(slot, slot)
    table = torch.arange(slots, dtype=torch.int32, device=device).view(LAYERS, -1)
    graph = capture(make_products(shape, 16, pool.weights, table, torch.Generator(device).manual_seed(16)))
    moved = np.random.default_rng(2).permutation(slots)[:SPARE].tolist()
    async with open_nixl_fabric(
        "out", device=0, receives=False, on_thread_start=lambda: torch.cuda.set_device(0)
    ) as fabric:
        began = time.perf_counter()
        await fabric.register([pool.run])
        tell({"what": "registered", "bytes": pool.run.count * pool.run.block_bytes, "s": time.perf_counter() - began})
        target = await fabric.connect(await hear(peer))
        await copy_slots(fabric, target, moved[:20], COPIES_RUNNING)
        for running in (1, 2, COPIES_RUNNING, 16):
            tell({"what": "copies", "running": running, **await copy_slots(fabric, target, moved, running)})
        peer.send(moved)
        tell({"what": "arrived", "equal": await hear(peer) == checksum(map(pool.bytes_of, moved))})
        for running, budget in ((0, 0), (COPIES_RUNNING, 5), (COPIES_RUNNING, 20), (COPIES_RUNNING, 0)):
            tell(await copy_beside(graph, fabric, target, moved, running, budget))


async def copy_slots(fabric: Fabric, target: Target, slots: Sequence[int], running: int, budget: int = 0) -> Record:
    """Each slot is a push, so many at a time; with a budget, so many begin in the time of a step."""
    turns, times, sizes = trio.Semaphore(running), [], []

    async def copy(slot: int) -> None:
        began = time.perf_counter()
        report = await fabric.wait(fabric.push(target, [slot], [slot]))
        sizes.append(report.num_bytes)
        times.append((time.perf_counter() - began) * 1e3)
        turns.release()

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for at, slot in enumerate(slots):
            if budget and at and at % budget == 0:
                await trio.sleep(STEP_S)
            await turns.acquire()
            nursery.start_soon(copy, slot)
    took = time.perf_counter() - began
    rate = sum(sizes) / took / 1e9
    return {"slots": len(slots), "ms": took * 1e3, "gb_per_s": rate, "one_ms": statistics.median(times)}


async def copy_beside(
    graph: torch.cuda.CUDAGraph, fabric: Fabric, target: Target, slots: Sequence[int], running: int, budget: int
) -> Record:
    """What products take while slots are copied; without `running`, while none are."""
    times: list[float] = []
    stopped = False

    def compute() -> None:
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stopped:
                times.append(time_graph(graph, replays=2))

    found: Record = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, compute)
        await trio.sleep(0.2)
        times.clear()
        if running:
            found = await copy_slots(fabric, target, slots, running, budget)
        else:
            await trio.sleep(0.5)
        seen = np.array(times)
        stopped = True
    products = {"p50_us": float(np.median(seen)), "p99_us": float(np.quantile(seen, 0.99)), "samples": len(seen)}
    return {"what": "beside products", "running": running, "budget": budget, **products, **found}


if __name__ == "__main__":
    main()
