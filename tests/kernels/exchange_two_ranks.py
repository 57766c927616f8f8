"""The exchange between two ranks on two GPUs, checked and timed: `python -m tests.kernels.exchange_two_ranks`.

Each rank is a process. Both compute what all must have from everybody's rows, which NCCL gathers, and compare bits;
what is wrong on either is printed, and the exit code is 1. `exchange_times.py` has the times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: NVLink's multicast stays off.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from engine.core.group import Membership
from engine.model.mesh import MeshListener, open_mesh
from engine.model.nvlink import Expiry, NvlinkExchange, allocate_mailbox, meet
from engine.model.peer_memory import PeerMapping, SharedMemory, allocate
from kernels.mailbox import MailboxLayout
from tests.kernels.exchange_steps import HIDDEN, LAYERS, TOP_K, Inputs, Step, table_of
from tests.kernels.exchange_times import capture, compare_memories, time_exchanges
from transport.messages import Member

SIZES = ((1, 1, 1), (16, 16, 16), (64, 64, 64), (256, 256, 256), (5, 0, 16), (0, 64, 64), (37, 64, 64))
"""Own rows of both ranks, and places."""
SETS, REPLAYS, NAP_NS = 4, 200, 150_000


class Rank:
    """What one of the two processes checks and times."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cuda", rank)
        self.problems: list[str] = []
        self.times: list[dict[str, Any]] = []
        self._membership = 0
        # As long as graphs may touch it.
        self._mapped: list[SharedMemory | PeerMapping] = []

    def expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.problems.append(f"rank {self.rank}: {what}")

    def open(self, layout: MailboxLayout, limit_s: float = 20.0) -> tuple[NvlinkExchange, Tensor, dict[int, int]]:
        memory = allocate_mailbox(layout, self.device)
        addresses = meet(memory, dist.group.WORLD, (0, 1))
        exchange = NvlinkExchange(layout, self.rank, memory, limit_s=limit_s)
        self.enter(exchange, addresses)
        return exchange, memory, addresses

    def open_peer_memory(
        self, layout: MailboxLayout, limit_s: float = 20.0
    ) -> tuple[NvlinkExchange, Tensor, dict[int, int]]:
        """The same in memory that ranks of the engine have for one another, met as they meet."""
        share = allocate(layout.num_bytes, self.device, repr(layout))
        paths: list[Any] = [None, None]
        with tempfile.TemporaryDirectory() as folder:
            dist.all_gather_object(paths, f"{folder}/mesh")
            listener = MeshListener(paths[self.rank])
            members = tuple(Member(place, 1, path, 0) for place, path in enumerate(paths))
            membership = Membership(1, members, (b"", b""), ())
            mesh = open_mesh(listener, membership, self.rank, limit_s=limit_s, is_wanted=lambda: True, share=share)
            mesh.close()
            listener.close()
            self.meet_host()
        self._mapped += [share, *mesh.peers.values()]
        exchange = NvlinkExchange(layout, self.rank, share.memory, limit_s=limit_s)
        addresses = {self.rank: share.address} | {place: peer.address for place, peer in mesh.peers.items()}
        self.enter(exchange, addresses)
        return exchange, share.memory, addresses

    def enter(self, exchange: NvlinkExchange, addresses: dict[int, int]) -> None:
        self._membership += 1
        exchange.enter(self._membership, addresses)
        self.meet_host()

    def meet_host(self) -> None:
        """Both have done what they were told, and wait for each other."""
        torch.cuda.synchronize()
        dist.barrier(device_ids=[self.rank])
        torch.cuda.synchronize()

    def check_bits(self, layout: MailboxLayout, name: str, is_routed: bool = False, is_symmetric: bool = True) -> None:
        exchange, _, addresses = self.open(layout) if is_symmetric else self.open_peer_memory(layout)
        luck = random.Random(self.rank)
        for *counts, rows in SIZES:
            both = (counts[0], counts[1])
            pool = [Inputs(self.rank, both, rows, layout, seed, is_routed) for seed in range(SETS)]
            places = [table_of(self.rank, self.device)] * LAYERS if is_routed else None
            step = Step(self.rank, exchange.rows(rows, None, places), counts[self.rank], rows, is_routed)
            for inputs in pool:
                step.fill(inputs)
                step.run()
                wrong = int(step.count_wrong(inputs))
                self.expect(wrong == 0, f"{name} {counts} of {rows}, eager: {wrong} numbers differ")
            graph = capture(step.run)
            total = torch.zeros((), dtype=torch.int64, device=self.device)
            sleeper = luck.choices((0, 1), k=REPLAYS)
            naps = torch.tensor(
                [[luck.randrange(NAP_NS) * (luck.random() < 0.5) * sleeper[n] for _ in range(2 * LAYERS)]
                 for n in range(REPLAYS)], device=self.device,
            )  # fmt: skip
            for replay in range(REPLAYS):
                step.fill(pool[replay % SETS])
                step.naps.copy_(naps[replay])
                graph.replay()
                total += step.count_wrong(pool[replay % SETS])
            wrong = int(total)
            self.expect(wrong == 0, f"{name} {counts} of {rows}, {REPLAYS} replays: {wrong} numbers differ")
            found = exchange.find_expiry()
            self.expect(found is None, f"{name} {counts} of {rows}: {found}")
            self.enter(exchange, addresses)

    def check_expiry(self) -> None:
        layout = MailboxLayout(2, LAYERS, 64, HIDDEN, TOP_K)
        limit_s = 0.2
        exchange, memory, addresses = self.open(layout, limit_s=20.0)
        inputs = Inputs(self.rank, (64, 64), 64, layout, 99, False)
        step = Step(self.rank, exchange.rows(64), 64, 64)
        step.fill(inputs)
        step.run()  # compiles
        self.meet_host()
        short = NvlinkExchange(layout, self.rank, memory, limit_s=limit_s)
        step = Step(self.rank, short.rows(64), 64, 64)
        step.fill(inputs)
        self.enter(short, addresses)
        graph = capture(step.run, warm_ups=2)
        self.meet_host()
        graph.replay()
        self.expect(int(step.count_wrong(inputs)) == 0, "before the expiry: numbers differ")
        self.expect(short.find_expiry() is None, f"before the expiry: {short.find_expiry()}")
        self.meet_host()
        for late in (0, 1):
            if self.rank == late:
                began = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                spent = time.perf_counter() - began
                found = short.find_expiry()
                # Who comes first waits for the rows of the other; who comes late finds these, and waits for the sums.
                self.expect(found == Expiry(3, 0, late, 1 - late), f"alone, it says: {found}")
                self.expect(limit_s * 0.9 < spent < limit_s * 2 + 0.03, f"alone, it took {spent * 1e3:.1f} ms")
                self.times.append(
                    {"name": f"step of rank {late} alone, limit {limit_s * 1e3:.0f} ms", "us": spent * 1e6}
                )
            self.meet_host()
        self.enter(short, addresses)
        graph.replay()
        self.expect(int(step.count_wrong(inputs)) == 0, "in the next membership: numbers differ")
        self.expect(short.find_expiry() is None, f"in the next membership: {short.find_expiry()}")
        self.meet_host()
        # Its flags of exchange 0 are still there, from both memberships.
        self.enter(short, addresses)
        if self.rank == 0:
            graph.replay()
            found = short.find_expiry()
            self.expect(found == Expiry(0, 0, 0, 1), f"beside flags of an older membership it says: {found}")
        self.meet_host()
        again = meet(memory, dist.new_group([0, 1]), (0, 1))
        self.enter(short, again)
        graph.replay()
        self.expect(int(step.count_wrong(inputs)) == 0, "after meeting again: numbers differ")
        self.meet_host()


def run_rank(rank: int, port: int, only: str, output: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    member = Rank(rank)
    wide = MailboxLayout(2, LAYERS, 256, HIDDEN, TOP_K, part_dtype=torch.float32)
    narrow = MailboxLayout(2, LAYERS, 256, HIDDEN, TOP_K, narrow=True)
    parts: dict[str, Callable[[], None]] = {
        "bits": lambda: member.check_bits(wide, "bf16/f32"),
        "narrow": lambda: member.check_bits(narrow, "fp8/bf16"),
        "routed": lambda: member.check_bits(wide, "bf16/f32 routed", is_routed=True),
        "peer": lambda: member.check_bits(wide, "bf16/f32 by descriptor", is_symmetric=False),
        "expiry": member.check_expiry,
        "times": lambda: time_exchanges(member),
        "memories": lambda: compare_memories(member),
    }
    for name in only.split(","):
        began = time.perf_counter()
        parts[name]()
        member.meet_host()
        if rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s, problems here: {len(member.problems)}", flush=True)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (member.problems, member.times))
    if rank == 0:
        report([problem for problems, _ in found for problem in problems], found[0][1] + found[1][1], output)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
    sys.exit(int(any(problems for problems, _ in found)))


def report(problems: list[str], times: list[dict[str, Any]], output: str) -> None:
    """One line for each thing that was timed, its variants side by side; both ranks have the slower one's times."""
    lines: dict[str, dict[str, Any]] = {}
    for entry in times:
        lines.setdefault(entry["name"], {})[str(entry.get("config", ""))] = entry
    for name, variants in lines.items():
        shown = "  ".join(f"{config} {entry['us']:6.2f}" for config, entry in variants.items())
        print(f"{name:26s} {next(iter(variants.values())).get('predicted_us', 0):5.1f} | {shown}")
    print("\n".join(problems) or "everything right on both ranks", flush=True)
    if output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit.stdout.strip(),
            "command": " ".join(sys.argv),
            "problems": problems,
            "times": times,
        }
        Path(output).write_text(json.dumps(record, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="bits,narrow,routed,peer,expiry,times")
    parser.add_argument("--output", default="", help="JSON of times and problems")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spawned = torch.multiprocessing.get_context("spawn")
    ranks = [spawned.Process(target=run_rank, args=(rank, port, options.only, options.output)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(process.exitcode != 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
