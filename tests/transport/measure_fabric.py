"""Prints what pushes between two processes cost: `PYTHONPATH=. python tests/transport/measure_fabric.py [ENGINE...]`.

Not a test: its numbers are worth something only on a quiet machine, and they belong in a dated report.
"""

from __future__ import annotations

import statistics
import sys
import time

import trio

from tests.conformance.fabric_peer import open_fabric
from tests.conformance.test_fabric import BIG, PROCESS_ENGINES, Pair, RemotePeer, open_pair

SIZES = {"16 KiB": ([0], [0]), "64 KiB": ([*range(4)],) * 2, "1 MiB": ([*range(64)],) * 2, "16 MiB": ([BIG], [BIG])}
IDLE_S = 3.0


async def measure_size(pair: Pair, local: list[int], remote: list[int]) -> tuple[list[float], list[float], list[float]]:
    post, total, inside = [], [], []
    for _ in range(200 if local[0] != BIG else 40):
        begun = time.perf_counter()
        transfer = pair.fabric.push(pair.target, local, remote)
        posted = time.perf_counter()
        report = await pair.fabric.wait(transfer)
        total.append(1e6 * (time.perf_counter() - begun))
        post.append(1e6 * (posted - begun))
        inside.append(report.post_us)
        await trio.sleep(0.0005)
    return post, total, inside


async def measure_idle(engine: str) -> float:
    """Per cent of a core that an open, idle fabric takes."""
    async with open_fabric(engine, "idle"):
        await trio.sleep(0.2)
        before = time.process_time()
        await trio.sleep(IDLE_S)
        return 100 * (time.process_time() - before) / IDLE_S


async def main(engines: list[str]) -> None:
    processes: dict[str, RemotePeer] = {}
    try:
        for engine in engines:
            print(f"{engine}: idle {await measure_idle(engine):.2f} % of a core")
            async with open_pair(engine, processes) as pair:
                for name, (local, remote) in SIZES.items():
                    await measure_size(pair, local, remote)
                    post, total, inside = await measure_size(pair, local, remote)
                    print(
                        f"{engine:9} {name:>7}: push() {statistics.median(post):6.0f} us, done after"
                        f" min {min(total):6.0f} median {statistics.median(total):6.0f}"
                        f" p99 {statistics.quantiles(total, n=100)[-1]:6.0f} us,"
                        f" library posting {statistics.median(inside):6.0f} us"
                    )
    finally:
        for peer in processes.values():
            peer.close()


if __name__ == "__main__":
    trio.run(main, sys.argv[1:] or PROCESS_ENGINES)
