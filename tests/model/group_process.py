"""One rank of a group in a process of its own: python -m tests.model.group_process DIRECTORY PLACE SIZE SEED STEPS."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from engine.core.group import Membership, PartPlacement
from engine.core.placement import lay_out
from engine.model.device import open_torch_device
from tests.model.group_cases import digest, group_config, ignore, make_schedule, run_schedule
from transport.messages import Member


async def run_member(directory: Path, place: int, size: int, seed: int, steps: int) -> str:
    """Joins the others of membership 1 and runs a schedule; the digest of what came out."""
    addresses = [str(directory / f"process-{other}.mesh") for other in range(size)]
    device = await open_torch_device(group_config(directory, size), ignore, poison=True, mesh_address=addresses[place])
    parts = tuple(PartPlacement(1, lay_out(part.layers, part.experts, size, part.slots)) for part in device.info.parts)
    members = tuple(Member(10 + other, 1, address, 0) for other, address in enumerate(addresses))
    membership = Membership(1, members, (b"",) * size, parts)
    assert device.experts is not None
    await device.experts.prepare(membership)
    device.experts.join(1)
    outcomes = await run_schedule(device, make_schedule(seed, steps))
    await device.aclose()
    return digest(outcomes, device)


if __name__ == "__main__":
    print(trio.run(run_member, Path(sys.argv[1]), *map(int, sys.argv[2:])))
