"""RecordFile and RecordWriter: whole lines, one owner, the right order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from engine.batch.output import OutputBusy, errors_path, open_output
from engine.batch.writer import RecordWriter
from engine.errors import ConfigError
from tests.batch.process import wait_until


def test_a_file_with_content_needs_resume(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match="--resume"):
        open_output(str(path), resume=False)
    assert path.read_bytes() == b"{}\n"


def test_a_second_owner_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    path = str(tmp_path / "out.jsonl")
    with open_output(path, resume=False), pytest.raises(OutputBusy):
        open_output(path, resume=True)
    open_output(path, resume=True).close()


@pytest.mark.parametrize("tail", [b"x", b'{"a": 1}', b"y" * 200_000])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":2}\n' + tail)
    with open_output(str(path), resume=True) as file:
        file.cut_torn_line()
        file.write(b"{}\n")
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n{}\n'


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"z" * 100_000)
    with open_output(str(path), resume=True) as file:
        file.cut_torn_line()
    assert path.read_bytes() == b""


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the kernel writes a part and then refuses."""
    path = tmp_path / "out.jsonl"
    code = (
        "import resource, signal, sys\n"
        "from engine.batch.output import open_output\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "file = open_output(sys.argv[1], resume=False)\n"
        "file.write(b'a' * 599 + b'\\n')\n"
        "try:\n    file.write(b'b' * 599 + b'\\n')\n"
        "except OSError:\n    sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False).returncode == 7
    assert path.read_bytes() == b"a" * 599 + b"\n"


def test_errors_go_beside_the_output() -> None:
    assert errors_path("a/out.jsonl") == "a/out.errors.jsonl"
    assert errors_path("out") == "out.errors.jsonl"


async def test_records_come_out_by_place_and_errors_at_once(tmp_path: Path) -> None:
    output = open_output(str(tmp_path / "out"), resume=False)
    errors = open_output(str(tmp_path / "err"), resume=False)
    with output, errors:
        writer = RecordWriter(output, errors, ordered=True, written=lambda: None)
        writer.put_answer(3, b"3\n")
        writer.put_error(1, b"e1\n")
        writer.put_answer(2, b"2\n")
        assert (writer.held, writer.backlog) == (3, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await wait_until(lambda: not writer.backlog, "the error record")
            assert (tmp_path / "err").read_bytes() == b"e1\n"
            assert (tmp_path / "out").read_bytes() == b""
            writer.put_answer(0, b"0\n")
            writer.put_answer(6, b"6\n")
            writer.put_answer(5, b"5\n")
            writer.release()
            await wait_until(lambda: not writer.backlog, "the answers")
            nursery.cancel_scope.cancel()
        assert (tmp_path / "out").read_bytes() == b"0\n2\n3\n5\n6\n"
        assert output.dirty
        writer.sync()
        assert not output.dirty
