"""A process that is one rank of a mesh: commands as JSON lines on stdin, answers on stdout. See `test_mesh.py`."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np

from engine.core.group import Membership
from engine.errors import EngineError
from engine.model.mesh import Mesh, MeshBroken, MeshListener, open_mesh
from transport.messages import Member


def content(seed: int, number: int, source: int, target: int, size: int) -> np.ndarray:
    """What `source` sends to `target`: known to both."""
    first = (seed * 31 + number * 17 + source * 5 + target) % 251
    return np.resize(np.arange(first, first + 256, dtype=np.int64) % 251, size).astype(np.uint8)


class Rank:
    def __init__(self) -> None:
        self.listener: MeshListener | None = None
        self.mesh: Mesh | None = None
        self.place = -1

    def listen(self, address: str) -> dict[str, Any]:
        if self.listener is not None:
            self.listener.close()
        self.listener = MeshListener(address)
        return {}

    def open(self, number: int, members: list[Any], place: int, limit_s: float, wanted_s: float) -> dict[str, Any]:
        """Joins; the membership is wanted for `wanted_s`."""
        self.close()
        assert self.listener is not None
        membership = Membership(number, tuple(Member(*one, 0) for one in members), (b"",) * len(members), ())
        self.place, end = place, time.monotonic() + wanted_s
        self.mesh = open_mesh(
            self.listener, membership, place, limit_s=limit_s, is_wanted=lambda: time.monotonic() < end
        )
        return {"places": self.mesh.places}

    def play(self, seed: int, exchanges: int, sizes: list[int], pause_s: float) -> dict[str, Any]:
        """Random frames, of which every byte is compared, those of the exchange before once more."""
        assert self.mesh is not None
        chance, own, total = random.Random(seed), random.Random(seed + self.place), 0
        others = [place for place in self.mesh.places if place != self.place]
        before: dict[int, tuple[memoryview, np.ndarray]] = {}
        for number in range(exchanges):
            size = {(a, b): chance.choice(sizes) for a in self.mesh.places for b in self.mesh.places}
            frames = {}
            for other in others:
                whole = content(seed, number, self.place, other, size[self.place, other])
                cuts = sorted(own.randrange(len(whole) + 1) for _ in range(own.randrange(4)))
                frames[other] = np.split(whole, cuts)
            key = (number, 0, number % 7, 1)
            self.mesh.start(key, frames)
            time.sleep(own.random() * pause_s)
            found = self.mesh.finish(key)
            time.sleep(own.random() * pause_s)
            assert found.keys() == set(others)
            now = {p: (view, content(seed, number, p, self.place, size[p, self.place])) for p, view in found.items()}
            for view, expected in [*before.values(), *now.values()]:
                assert np.array_equal(np.frombuffer(view, np.uint8), expected), (number, self.place)
            total += sum(view.nbytes for view in found.values())
            before = now
        return {"bytes": total}

    def exchange(self, keys: list[list[int]], size: int = 100) -> dict[str, Any]:
        """One exchange for each key, at once one after the other."""
        assert self.mesh is not None
        for step, passed, layer, phase in keys:
            key = (step, passed, layer, phase)
            self.mesh.exchange(key, {p: [bytes(size)] for p in self.mesh.places if p != self.place})
        return {}

    def send_one(self, key: list[int], target: int) -> dict[str, Any]:
        """The begin of an exchange that is cut off after its first frame, as by a stop of the process."""
        assert self.mesh is not None
        links = self.mesh._links
        self.mesh._links = {target: links[target]}
        self.mesh.start((key[0], key[1], key[2], key[3]), {target: [b"last"]})
        self.mesh._links = links
        return {}

    def close(self) -> dict[str, Any]:
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
        return {}


def serve(rank: object) -> None:
    """Calls the methods of `rank` that it is told, until the end of stdin."""
    for line in sys.stdin:
        action, options = json.loads(line)
        begun, used = time.monotonic(), time.process_time()
        try:
            answer = getattr(rank, action)(**options)
        except MeshBroken as error:
            answer = {"error": "MeshBroken", "place": error.place, "why": error.why, "overdue": error.overdue}
        except (EngineError, AssertionError) as error:
            answer = {"error": type(error).__name__, "why": str(error)}
        answer |= {"took_s": time.monotonic() - begun, "used_s": time.process_time() - used}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(Rank())
