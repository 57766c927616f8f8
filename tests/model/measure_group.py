"""What a decode step costs in a group of two against a rank alone, here: python -m tests.model.measure_group.

Each rank is a process. Rounds of the kinds follow each other, so that a machine that gets slower does so for all. Two
figures: milliseconds between results, and milliseconds of processor time, which other people's load does not change
much.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import trio

from engine.config import Limits, RankConfig, model_directory
from engine.core.group import Membership, PartPlacement
from engine.core.placement import lay_out
from engine.core.plan import DecodeRow, PrefillChunk, StepPlan
from engine.model.device import TorchDevice, open_torch_device
from transport.messages import Member, Sampling

ROWS = (1, 8, 32)
ROUNDS, WARM, STEPS = 3, 3, 16
PROMPT, PAGES_EACH = 64, 16
_SAMPLING = Sampling(temperature=0.8, seed=5)


def config_for(group: int) -> RankConfig:
    return RankConfig(
        role="decode", model=str(model_directory("nano")), device="cpu", fabric="tcp", page_tokens=64,
        max_model_tokens=PAGES_EACH * 64, num_pages=PAGES_EACH * 32, num_slabs=32, kv_dtype="float32", threads=1,
        replay_rows=0, config_digest="0", limits=Limits(), group=group,
    )  # fmt: skip


async def open_member(directory: Path, place: int, group: int) -> TorchDevice:
    addresses = [str(directory / f"{other}.mesh") for other in range(group)]
    device = await open_torch_device(
        config_for(group), lambda *phase: None, mesh_address=addresses[place] if group > 1 else ""
    )
    if device.experts is not None:
        parts = [PartPlacement(1, lay_out(p.layers, p.experts, group, p.slots)) for p in device.info.parts]
        members = tuple(Member(other, 1, address, 0) for other, address in enumerate(addresses))
        await device.experts.prepare(Membership(1, members, (b"",) * group, tuple(parts)))
        device.experts.join(1)
    return device


async def run_plans(device: TorchDevice, plans: list[StepPlan]) -> list[float]:
    """Milliseconds between results, two steps queued."""
    ends, tickets = [time.perf_counter()], []
    for at in range(len(plans) + 2):
        if at >= 2:
            await device.wait(tickets.pop(0))
            ends.append(time.perf_counter())
        if at < len(plans):
            tickets.append(device.submit(plans[at]))
    return (np.diff(ends) * 1e3).tolist()


def pages_of(slab: int) -> tuple[int, ...]:
    return tuple(range(slab * PAGES_EACH, (slab + 1) * PAGES_EACH))


async def fill(device: TorchDevice, place: int) -> None:
    rng = np.random.default_rng(place)
    plans = []
    for slab in range(32):
        ids = memoryview(rng.integers(70, 8000, PROMPT).astype("<i4").tobytes())
        plans.append(StepPlan(1, (PrefillChunk(1, slab, 0, ids, pages_of(slab), _SAMPLING),), ()))
    await run_plans(device, plans)


async def measure(device: TorchDevice, rows: int, start: int) -> tuple[float, float]:
    """(milliseconds, milliseconds of processor time) of a step; the first few are left out of the former."""
    plans = [
        StepPlan(1, (), tuple(DecodeRow(1, slab, start + at, None, pages_of(slab), _SAMPLING) for slab in range(rows)))
        for at in range(WARM + STEPS)
    ]
    began = time.process_time()
    times = await run_plans(device, plans)
    return statistics.median(times[WARM:]), (time.process_time() - began) * 1e3 / len(plans)


async def serve(directory: Path, place: int) -> None:
    """The second process: does for each line of stdin what the first does."""
    devices = {1: await open_member(directory, place, 1), 2: await open_member(directory, place, 2)}
    for device in devices.values():
        await fill(device, place)
    print("ready", flush=True)
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        group, rows, start = map(int, line.split())
        await measure(devices[group], rows, start)
        print("done", flush=True)
    for device in devices.values():
        await device.aclose()


async def lead(directory: Path) -> None:
    command = [sys.executable, "-m", "tests.model.measure_group", str(directory)]
    process = await trio.lowlevel.open_process(command, stdin=-1, stdout=-1, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdin is not None and process.stdout is not None

    async def hear() -> str:
        assert process.stdout is not None
        return (await process.stdout.receive_some()).decode()

    devices = {1: await open_member(directory, 0, 1), 2: await open_member(directory, 0, 2)}
    for device in devices.values():
        await fill(device, 0)
    await hear()
    kinds = ("alone", "two alone", "group")
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    start = PROMPT
    for _ in range(ROUNDS):
        for rows in ROWS:
            for kind in kinds:
                group = 2 if kind == "group" else 1
                if kind != "alone":
                    await process.stdin.send_all(f"{group} {rows} {start}\n".encode())
                found.setdefault((rows, kind), []).append(await measure(devices[group], rows, start))
                if kind != "alone":
                    await hear()
        start += WARM + STEPS
    await process.stdin.aclose()
    await process.wait()
    for device in devices.values():
        await device.aclose()
    for rows in ROWS:
        for which, name in enumerate(("ms", "processor ms")):
            columns = {kind: [pair[which] for pair in found[rows, kind]] for kind in kinds}
            ratios = [g / a for g, a in zip(columns["group"], columns["alone"], strict=True)]
            beside = [g / a for g, a in zip(columns["group"], columns["two alone"], strict=True)]
            print(
                f"{rows:3d} rows: "
                + ", ".join(f"{kind} {statistics.median(column):.2f} {name}" for kind, column in columns.items())
                + f"; group / alone {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                + f", group / two alone {statistics.median(beside):.2f} ({min(beside):.2f}-{max(beside):.2f})"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trio.run(serve, Path(sys.argv[1]), 1)
    else:
        with tempfile.TemporaryDirectory() as made:
            trio.run(lead, Path(made))
