"""A rank of the engine whose sockets flip a bit: in the pushes that its life sends, those of the given numbers.

Run as a rank's program. `FLIP_PUSHES` in the environment is like `0:1,3`: of rank 0, the first and the third push. Only
what is on its way changes; the memory that it is read from stays what it was.
"""

from __future__ import annotations

import json
import os
import sys

import transport.tcp_fabric as tcp_fabric
from engine.cli import main


def sabotage() -> None:
    given = int(sys.argv[sys.argv.index("--given") + 1])
    rank = json.loads(os.pread(given, os.fstat(given).st_size, 0))["rank"]
    victim, numbers = os.environ["FLIP_PUSHES"].split(":")
    chosen = {int(number) for number in numbers.split(",")} if int(victim) == rank else set()
    send_views, count = tcp_fabric.send_views, 0

    async def send(sock, views) -> None:
        nonlocal count
        if len(views) > 1:  # else it is no push: head and bytes
            count += 1
            if count in chosen:
                spoilt = bytearray(views[-1])
                spoilt[len(spoilt) // 2] ^= 0x10
                views = [*views[:-1], memoryview(spoilt)]
        await send_views(sock, views)

    tcp_fabric.send_views = send


if __name__ == "__main__":
    sabotage()
    sys.argv[1:1] = ["rank"]
    sys.exit(main())
