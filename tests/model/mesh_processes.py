"""Ranks of a mesh as processes, and a group of them: what drives `mesh_rank.py` and `peer_rank.py`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model.mesh import _HELLO, _MAGIC

ROOT = Path(__file__).parents[2]
ANSWER_S = 30.0
Answer = dict[str, Any]


class Rank:
    """A process of one of those files."""

    def __init__(self, *command: str, variables: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *(command or ("tests.model.mesh_rank",))],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.owed = 0

    def post(self, action: str, **options: Any) -> None:
        self.owed += 1
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([action, options]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], ANSWER_S)[0], f"no answer within {ANSWER_S} s"
        answer: Answer = json.loads(self.process.stdout.readline())
        self.owed -= 1
        return answer

    def call(self, action: str, **options: Any) -> Answer:
        self.post(action, **options)
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


class Group:
    """Ranks 10, 11, ... of generations 3, 4, ... in places 0, 1, ..."""

    def __init__(self, ranks: list[Rank], folder: Path) -> None:
        self.ranks = ranks
        self.members = [[10 + p, 3 + p, str(folder / f"{p}")] for p in range(len(ranks))]
        self.every([("listen", {"address": address}) for _, _, address in self.members])

    def every(self, calls: list[tuple[str, Answer]]) -> list[Answer]:
        """One call for each rank, all at the same time."""
        for rank, (action, options) in zip(self.ranks, calls, strict=True):
            rank.post(action, **options)
        return [rank.answer() for rank in self.ranks]

    def joining(self, place: int, number: int = 1, limit_s: float = 5.0, wanted_s: float = 60.0) -> Answer:
        return {"number": number, "members": self.members, "place": place, "limit_s": limit_s, "wanted_s": wanted_s}

    def open(self, number: int = 1, limit_s: float = 5.0) -> None:
        places = range(len(self.ranks))
        for answer in self.every([("open", self.joining(place, number, limit_s)) for place in places]):
            assert answer.get("places") == list(places), answer

    def hello(self, number: int, sender: int, receiver: int, generation: int | None = None) -> bytes:
        source, target = self.members[sender], self.members[receiver]
        return _HELLO.pack(_MAGIC, number, source[0], generation or source[1], target[0], target[1])
