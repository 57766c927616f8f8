"""Runs the real batch code against a FakeHead in one trio loop, and reads back what it wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import trio

from engine.batch.options import BatchOptions
from engine.batch.reporter import Reporter
from engine.batch.source import EngineSource
from engine.batch.start import run_batch
from engine.faces.text import TextCodec
from tests.batch.fake_head import FakeHead, expected

TOKENIZER = Path(__file__).parents[2] / "engine" / "nano" / "tokenizer.json"
RUN_S = 60.0
"""No test of the batch takes longer than this; one that does hangs."""


@functools.cache
def codec() -> TextCodec:
    return TextCodec.load(TOKENIZER)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a run left behind. `answers` and `errors` by id; ids are unique, or `records` would say otherwise."""

    code: int
    said: str
    records: list[dict[str, Any]]
    failures: list[dict[str, Any]]

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        return {record["custom_id"]: record for record in self.records if record["error"] is None}

    @property
    def errors(self) -> dict[str, dict[str, Any]]:
        return {record["custom_id"]: record for record in self.failures}


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file, which must end with a whole line."""
    if not path.exists():
        return []
    data = path.read_bytes()
    assert not data or data.endswith(b"\n"), "torn last line"
    return [json.loads(line) for line in data.splitlines()]


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Writes JSONL; bytes go in as they are."""
    with path.open("wb") as file:
        for line in lines:
            file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")


@contextlib.asynccontextmanager
async def head_at(head: FakeHead, path: Path) -> AsyncIterator[str]:
    """The head listens while the block lasts."""
    async with trio.open_nursery() as nursery:
        await nursery.start(head.serve, str(path))
        yield str(path)
        nursery.cancel_scope.cancel()


def source_at(path: str, *, shared: bool) -> EngineSource:
    @contextlib.asynccontextmanager
    async def use() -> AsyncIterator[str]:
        yield path

    return EngineSource(use, shared=shared, load_codec=lambda hello: codec())


async def run(
    tmp_path: Path,
    lines: Iterable[Any] | None,
    head: FakeHead,
    *,
    shared: bool = False,
    **options: Any,
) -> Outcome:
    """Runs `lines` (or what is in the input file already) through a batch with files in `tmp_path`."""
    if lines is not None:
        write_lines(tmp_path / "in.jsonl", lines)
    with trio.fail_after(RUN_S):
        async with head_at(head, tmp_path / "head.sock") as path:
            return await run_at(tmp_path, path, shared=shared, **options)


async def run_at(tmp_path: Path, socket: str, *, shared: bool = False, **options: Any) -> Outcome:
    """As `run`, with whatever listens at `socket`."""
    given: dict[str, Any] = {
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
        "progress": "line",
    }
    given |= options
    said = io.StringIO()
    code = await run_batch(BatchOptions(**given), source_at(socket, shared=shared), Reporter(given["progress"], said))
    output = Path(given["output"])
    records = read_records(output)
    failures = [record for record in records if record.get("error") is not None]
    failures += read_records(Path(given.get("errors") or tmp_path / "out.errors.jsonl"))
    return Outcome(code, said.getvalue(), records, failures)


def prompt_ids(text: str) -> bytes:
    return codec().encode_document(text)


def expected_text(prompt: bytes, max_tokens: int) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens that the fake head gives."""
    ids, reason = expected(prompt, max_tokens)
    return codec().decode(ids[:-1] if reason == "stop" else ids), reason, len(ids)


def completion_text(record: dict[str, Any]) -> str:
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]
