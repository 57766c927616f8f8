"""Prints what an exchange between the ranks of a group on one host costs, by three carriers.

`OMP_NUM_THREADS=1 PYTHONPATH=. python tests/model/measure_mesh.py [--rounds N] [--json FILE]`. Not a test.

Carriers: the engine's mesh, the same frames through shared memory with a message on a socket as bell, and
torch.distributed's gloo, which is told the sizes in advance. Every process sends `size` bytes to each other one and
adds up what arrives.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.core.group import Membership
from engine.model.mesh import MeshListener, open_mesh
from transport.messages import Member

SIZES = (0, 4 << 10, 32 << 10, 512 << 10)
EXCHANGES = {0: 1000, 4 << 10: 1000, 32 << 10: 500, 512 << 10: 100}
WARM = 20
Exchange = Callable[[int, int], None]  # number, bytes


def consume(data: Any) -> None:
    np.add.reduce(np.frombuffer(data, np.uint64))


def mesh_carrier(folder: str, place: int, places: int) -> Exchange:
    members = tuple(Member(rank, 1, f"{folder}/{rank}", 0) for rank in range(places))
    listener = MeshListener(members[place].mesh_address)
    membership = Membership(1, members, (b"",) * places, ())
    mesh = open_mesh(listener, membership, place, limit_s=10, is_wanted=lambda: True)
    outgoing = np.ones(max(SIZES), np.uint8)

    def exchange(number: int, size: int) -> None:
        frame = [outgoing[:size]]
        for view in mesh.exchange((number, 0, 0, 0), {p: frame for p in mesh.places if p != place}).values():
            consume(view)

    return exchange


class Shared:
    """One direction between two processes: three slots, used in turn, as views stay valid over the next exchange."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("measure")
        os.ftruncate(self.fd, 3 * max(SIZES))
        self.view = memoryview(mmap.mmap(self.fd, 3 * max(SIZES)))

    def slot(self, number: int, size: int) -> memoryview:
        at = number % 3 * max(SIZES)
        return self.view[at : at + size]


def shared_carrier(pairs: dict[tuple[int, int], Any], place: int, places: int) -> Exchange:
    bell = struct.Struct("<5q")
    others = [p for p in range(places) if p != place]
    socks: dict[int, socket.socket] = {p: pairs[min(p, place), max(p, place)][0][place > p] for p in others}
    sends: dict[int, Shared] = {p: pairs[min(p, place), max(p, place)][1][place > p] for p in others}
    receives: dict[int, Shared] = {p: pairs[min(p, place), max(p, place)][1][place < p] for p in others}
    outgoing = memoryview(bytearray(max(SIZES)))
    by_fd = {sock.fileno(): p for p, sock in socks.items()}

    def exchange(number: int, size: int) -> None:
        for p in others:
            if size:
                sends[p].slot(number, size)[:] = outgoing[:size]
            socks[p].send(bell.pack(size, number, 0, 0, 0))
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        missing = len(others)
        while missing:
            for fd, _ in poll.poll(10_000):
                p = by_fd[fd]
                got, theirs, *_ = bell.unpack(socks[p].recv(bell.size))
                assert theirs == number
                consume(receives[p].slot(number, got))
                poll.unregister(fd)
                missing -= 1

    return exchange


def gloo_carrier(folder: str, place: int, places: int) -> Exchange:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=place,
        world_size=places,
        timeout=timedelta(seconds=20),
    )
    sent = torch.ones(places * max(SIZES), dtype=torch.uint8)
    taken = torch.zeros(places * max(SIZES), dtype=torch.uint8)

    def exchange(number: int, size: int) -> None:
        # It has no exchange of nothing, so one of 8 bytes stands for it.
        bytes_all = places * max(8, size)
        dist.all_to_all_single(taken[:bytes_all], sent[:bytes_all])
        for p in range(places):
            if p != place:
                consume(taken[p * max(8, size) : (p + 1) * max(8, size)].numpy())

    return exchange


def run_child(make: Callable[[], Exchange], pipe: int) -> None:
    exchange = make()
    found, number = {}, 0
    for size in SIZES:
        for _ in range(WARM):
            exchange(number, size)
            number += 1
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(EXCHANGES[size]):
            exchange(number, size)
            number += 1
        count = 1e-6 * EXCHANGES[size]
        found[size] = ((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count)
    os.write(pipe, json.dumps(found).encode())


def run_group(carrier: str, places: int) -> dict[str, tuple[float, float]]:
    """Per size: microseconds per exchange (mean over processes), and processor time of all processes together."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = {}
        if carrier == "shared":
            pairs = {
                (a, b): (socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM), (Shared(), Shared()))
                for a in range(places)
                for b in range(a + 1, places)
            }
        makes: dict[str, Callable[[int], Exchange]] = {
            "mesh": lambda place: mesh_carrier(folder, place, places),
            "shared": lambda place: shared_carrier(pairs, place, places),
            "gloo": lambda place: gloo_carrier(folder, place, places),
        }
        children = []
        for place in range(places):
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    run_child(lambda place=place: makes[carrier](place), writing)
                    code = 0
                finally:
                    os._exit(code)
            os.close(writing)
            children.append((pid, reading))
        found = []
        for pid, reading in children:
            with os.fdopen(reading) as pipe:
                found.append(json.loads(pipe.read() or "{}"))
            os.waitpid(pid, 0)
        for socks, shared in pairs.values():
            for sock in socks:
                sock.close()
            for one in shared:
                os.close(one.fd)
    return {
        size: (statistics.mean(one[size][0] for one in found), sum(one[size][1] for one in found)) for size in found[0]
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--json")
    asked = options.parse_args()
    runs: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    load = os.getloadavg()[0]
    for _ in range(asked.rounds):
        for places in (2, 4):
            for carrier in ("mesh", "shared", "gloo"):
                for size, figures in run_group(carrier, places).items():
                    runs.setdefault((places, size, carrier), []).append(figures)
    rows = []
    for (places, size, carrier), figures in sorted(runs.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        walls = sorted(wall for wall, _ in figures)
        row = {
            "places": places,
            "frame_bytes": int(size),
            "carrier": carrier,
            "exchange_us": {
                "median": round(statistics.median(walls), 1),
                "least": round(walls[0], 1),
                "most": round(walls[-1], 1),
            },
            "processor_us_all_places": round(statistics.median(cpu for _, cpu in figures), 1),
        }
        rows.append(row)
        print(places, size, carrier, row["exchange_us"], row["processor_us_all_places"])
    if asked.json:
        record = {
            "date": "2026-11-29",
            "machine": "2-core x86-64 VM",
            "load_before": round(load, 2),
            "command": "OMP_NUM_THREADS=1 PYTHONPATH=. python tests/model/measure_mesh.py"
            f" --rounds {asked.rounds} --json {asked.json}",
            "note": "other programs were running on both cores; carriers alternate within each round",
            "rounds": asked.rounds,
            "results": rows,
        }
        with open(asked.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
