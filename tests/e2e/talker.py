"""An engine of real processes with HTTP, and conversations with it, turn by turn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.test_commands import engine

ROOT = Path(__file__).parents[2]
READY_S = 60.0
ASK_S = 60.0


class Engine:
    """A running one. `settings` are `--set` words."""

    def __init__(self, place: Path, *settings: str) -> None:
        self.directory = str(place / "run")
        self._log = place / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
        sets = [word for one in settings for word in ("--set", one)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine", "up", "--http", "127.0.0.1:0", "--dir", self.directory, *sets],
                stderr=log, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.url = ""

    def await_ready(self) -> Engine:
        self.wait("head.ready")
        self.url = self.wait(r"http\.listen url=(\S+)")
        self.wait("front.linked")
        return self

    def wait(self, pattern: str, *, count: int = 1) -> str:
        """Until the log has it so many times; the first group of the last one."""
        deadline = time.monotonic() + READY_S
        while len(found := re.findall(pattern, log := self._log.read_text())) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, log
            time.sleep(0.05)
        return found[-1]

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The answer and its headers, by lower-case name."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), named)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return json.loads(answer.read()), {name.lower(): value for name, value in answer.headers.items()}

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in\n{text}"
        return sum(map(float, found))

    def await_metric(self, name: str, wanted: float) -> float:
        """Its value once it is at least that; ranks report a few times a second."""
        deadline = time.monotonic() + 10
        while (value := self.metric(name)) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return value

    def ranks(self) -> dict[int, dict[str, Any]]:
        status = json.loads(engine("status", "--json", "--dir", self.directory).stdout)
        return {rank["rank"]: rank for rank in status["ranks"]}

    def await_idle(self) -> None:
        """Until no rank says that a request has pages; what ranks say may be half a second old."""
        deadline = time.monotonic() + 10
        while held := [
            (number, name)
            for number, rank in self.ranks().items()
            for name in ("pages_owned", "pages_granted", "pages_pinned")
            if rank["snapshot"] is None or rank["snapshot"][name]
        ]:
            assert time.monotonic() < deadline, f"ranks still hold {held}"
            time.sleep(0.05)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(place: Path, *settings: str) -> Iterator[Engine]:
    started = Engine(place, *settings)
    try:
        yield started.await_ready()
    finally:
        started.close()


@dataclasses.dataclass
class Turn:
    """What came of one turn.

    Attributes:
        prompt, ids: of the prompt, and of what was generated.
    """

    text: str
    prompt: list[int]
    ids: list[int]
    cached: int
    prefill: int


@dataclasses.dataclass
class Talk:
    """A conversation of a chat."""

    name: str
    messages: list[dict[str, str]]
    turns: list[Turn] = dataclasses.field(default_factory=list)

    def say(self, engine: Engine, words: str, **fields: Any) -> Turn:
        """The next turn; the answer becomes part of the conversation."""
        self.messages.append({"role": "user", "content": words})
        body = {
            "messages": self.messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            **fields,
        }  # fmt: skip
        answer, headers = engine.post("/v1/chat/completions", body, X_Session_ID=self.name, engine_show_ranks="1")
        (choice,) = answer["choices"]
        turn = Turn(
            choice["message"]["content"],
            answer["prompt_token_ids"],
            choice["token_ids"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            int(headers["engine-prefill-rank"]),
        )
        assert answer["usage"]["prompt_tokens"] == len(turn.prompt)
        self.messages.append({"role": "assistant", "content": turn.text})
        self.turns.append(turn)
        return turn


def common(one: list[int], other: list[int]) -> int:
    """Ids that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
