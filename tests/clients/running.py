"""A real client in its own environment, and the engine that it is let loose on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.front.test_engine import ROOT, Engine

TOKENIZER = ROOT / "engine" / "nano"
"""The bundled model's directory: clients that count tokens themselves load its tokenizer from there."""

CHAT_TOKENS = 4
"""What a chat of one user's message has beside the message: begin of text, user, assistant, end of thought."""

# Small, as the machine is: nothing here needs more pages, and a stopped run should not drain for long.
SETS = ("limits.drain_s=1s", "num_pages=600", "num_slabs=16")

# Words that are one token each. What is made of them splits in one way only, so a client that counts the tokens of a
# text finds as many as were generated. What a small model draws freely has tokens that the tokenizer itself would
# have joined, "the" as "t" and "he", and then the counts of a text and of its tokens differ.
WORDS = """about which return function their there would other could should where object think people great string
value always every class example table first method friend again number command often under world"""


@contextlib.contextmanager
def running_engine(place: Path) -> Iterator[Engine]:
    """An engine with HTTP on a port of its own. At the end it has to stop by itself, with nothing bad in its log."""
    engine = Engine(place, *(word for one in SETS for word in ("--set", one)), asks_keys=False)
    try:
        engine.wait("head.ready")
        engine.wait("front.linked")
        yield engine
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(30) == 0, engine.log
        bad = [line for line in engine.log.splitlines() if re.search(r" (WARNING|ERROR) |front\.bug|status=5", line)]
        assert not bad, bad
    finally:
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait()


def post(engine: Engine, path: str, body: object) -> Any:
    """The answer to a request; not to be had within 60 s is an error, and so is any status but 200."""
    request = urllib.request.Request(engine.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def word_biases(engine: Engine) -> dict[str, int]:
    """A `logit_bias` with which all that is generated is WORDS."""
    biases = {}
    for word in WORDS.split():
        (token,) = post(engine, "/tokenize", {"prompt": f" {word}", "add_special_tokens": False})["tokens"]
        biases[str(token)] = 100
    return biases


class Client:
    """Programs of one environment.

    Args:
        name: folder under `.clients`; `make clients` makes it. The test is skipped without it.
        place: an empty folder: the client's home, so that no earlier run and no user's settings count.
    """

    def __init__(self, name: str, place: Path) -> None:
        self.bin = ROOT / ".clients" / name / "bin"
        self._place = place
        if not self.bin.is_dir():
            pytest.skip(f".clients/{name} is not there: make clients CLIENTS={name}")

    def _environment(self, scratch: str) -> dict[str, str]:
        # Hubs are at a port where nobody listens: what wants to download something fails at once.
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self._place), "TMPDIR": scratch,
            "LANG": "C.UTF-8", "COLUMNS": "120", "OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9",
            "TRANSFORMERS_VERBOSITY": "error",
        }  # fmt: skip

    def run(self, program: str, *arguments: str | Path, within_s: float, **environment: str) -> str:
        """What a program printed, both streams. It has to end with 0 in time, else all of its processes are ended."""
        output = self._place / f"{program}.out"
        with self.started(program, *arguments, output=output, **environment) as process:
            try:
                code = process.wait(within_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{program}: not done within {within_s} s: {output.read_text()}") from None
        said = output.read_text()
        assert code == 0, said
        return said

    @contextlib.contextmanager
    def started(
        self, program: str, *arguments: str | Path, output: Path, **environment: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A program that runs for as long as the block lasts, in a process group of its own."""
        with contextlib.ExitStack() as held:
            # Not below the test's own folder: sockets are made there, and their paths have to be short.
            scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True))
            process = subprocess.Popen(
                [self.bin / program, *arguments], stdin=subprocess.DEVNULL,
                stdout=held.enter_context(output.open("wb")), stderr=subprocess.STDOUT, cwd=ROOT,
                env={**self._environment(scratch), **environment}, start_new_session=True,
            )  # fmt: skip
            held.callback(_end, process)
            yield process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
