"""LineReader against a plain split, and against inputs that are made to fill memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.lines import RAW_BYTES, LineReader, RawLine


def read_all(data: bytes, *, max_lines: int = 7, max_bytes: int = 1 << 20, limit: int = 64 << 20) -> list[RawLine]:
    reader_fd, writer_fd = os.pipe()
    try:
        os.write(writer_fd, data)
        os.close(writer_fd)
        reader = LineReader(reader_fd, line_limit=limit)
        lines: list[RawLine] = []
        while not reader.ended:
            lines += reader.read(max_lines, max_bytes)
        return lines
    finally:
        os.close(reader_fd)


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")), max_size=30), st.booleans())
@settings(max_examples=150, deadline=None)
def test_lines_numbers_and_offsets_are_those_of_a_split(pieces: list[bytes], ends: bool) -> None:
    data = b"\n".join(pieces) + (b"\n" if ends else b"")
    wanted = []
    offset = 0
    for number, piece in enumerate(data.split(b"\n"), 1):
        if piece.strip(b" \t\r") and not (number == 1 and piece.startswith(b"\xef\xbb\xbf")):
            wanted.append((number, offset, piece))
        offset += len(piece) + 1
    got = [(line.number, line.offset, line.data) for line in read_all(data)]
    assert [line for line in got if line[0] > 1 or not data.startswith(b"\xef\xbb\xbf")] == wanted


def test_only_a_newline_ends_a_line() -> None:
    data = '{"a":"\u2028\u0085\x0b\x0c"}\r\n1\r2\n'.encode()
    assert [line.data for line in read_all(data)] == ['{"a":"\u2028\u0085\x0b\x0c"}\r'.encode(), b"1\r2"]


def test_a_byte_order_mark_is_skipped_at_the_start_only() -> None:
    lines = read_all(b"\xef\xbb\xbf{}\n\xef\xbb\xbf{}\n")
    assert [(line.data, line.offset) for line in lines] == [(b"{}", 3), (b"\xef\xbb\xbf{}", 6)]


def test_a_line_at_the_limit_passes_and_one_beyond_is_cut_but_counted() -> None:
    lines = read_all(b"a" * 10_000 + b"\n" + b"b" * 10_001 + b"\nc\n", limit=10_000)
    assert [line.too_long for line in lines] == [False, True, False]
    assert lines[0].data == b"a" * 10_000
    assert (len(lines[1].data), lines[1].num_bytes) == (RAW_BYTES, 10_001)
    assert (lines[2].number, lines[2].offset, lines[2].data) == (3, 20_003, b"c")


def test_an_endless_line_takes_bounded_memory(tmp_path: Path) -> None:
    """32 MiB without a line end against a limit of 1 MiB."""
    path = tmp_path / "endless"
    with path.open("wb") as file:
        for _ in range(32):
            file.write(b"x" * (1 << 20))
        file.write(b'\n{"prompt":"a"}')
    fd = os.open(path, os.O_RDONLY)
    try:
        reader = LineReader(fd, line_limit=1 << 20)
        tracemalloc.start()
        first = reader.read(1, 1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert first[0].num_bytes == 32 << 20 and first[0].too_long
        assert reader.read(5, 1 << 20)[0].data == b'{"prompt":"a"}'
        assert reader.read(5, 1 << 20) == [] and reader.ended
    finally:
        os.close(fd)


def test_a_read_gives_what_is_there_and_does_not_wait_for_more() -> None:
    reader_fd, writer_fd = os.pipe()
    try:
        os.write(writer_fd, b"one\ntwo\nthr")
        reader = LineReader(reader_fd)
        assert [line.data for line in reader.read(64, 1 << 20)] == [b"one", b"two"]
        os.write(writer_fd, b"ee\n")
        assert [line.data for line in reader.read(64, 1 << 20)] == [b"three"]
        assert not reader.ended
    finally:
        os.close(reader_fd)
        os.close(writer_fd)


def test_a_slice_ends_at_its_bytes() -> None:
    lines = b"".join(b"x" * 99 + b"\n" for _ in range(50))
    reader_fd, writer_fd = os.pipe()
    try:
        os.write(writer_fd, lines)
        assert len(LineReader(reader_fd).read(64, 1000)) == 11
    finally:
        os.close(reader_fd)
        os.close(writer_fd)
