"""What is said on stderr, in each form, and to a stderr that is gone."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import termios

from engine.batch.reporter import Reporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    out = Terminal()
    reporter = Reporter("auto", out)
    reporter.status("1/2", {})
    reporter.status("2/2", {})
    reporter.note("a word")
    reporter.status("again", {}, asked=True)
    assert out.getvalue() == "\r\x1b[K1/2\r\x1b[K2/2\r\x1b[Ka word\n\r\x1b[Kagain\n"
    assert reporter.every_s < 1


def read_until_hang_up(terminal: int) -> bytes:
    """All that was written to the closed end of a pseudo-terminal; one read may return a part of it."""
    said = bytearray()
    with contextlib.suppress(OSError):  # EIO is how Linux says that the other end is closed and all is read
        while piece := os.read(terminal, 4096):
            said += piece
    return bytes(said)


def test_a_status_line_never_wraps() -> None:
    """It is cut to the terminal's width, wide characters counted as the two columns that they take."""
    main, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        with os.fdopen(terminal, "w", encoding="utf-8") as stream:
            reporter = Reporter("auto", stream)
            reporter.status("x" * 100, {})
            reporter.status("老" * 100, {})
        said = read_until_hang_up(main).decode()
    finally:
        os.close(main)
    assert said == "\r\x1b[K" + "x" * 39 + "\r\x1b[K" + "老" * 19


def test_elsewhere_lines_come_now_and_then() -> None:
    out = io.StringIO()
    reporter = Reporter("auto", out)
    reporter.status("1/2", {})
    reporter.summary("done", {})
    assert out.getvalue() == "1/2\ndone\n"
    assert reporter.every_s == 10


def test_json_is_one_object_a_line() -> None:
    out = io.StringIO()
    reporter = Reporter("json", out)
    reporter.status("1/2", {"ok": 1})
    reporter.summary("done", {"ok": 2})
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"ok": 1}, {"ok": 2}]


def test_none_still_answers_when_asked() -> None:
    out = io.StringIO()
    reporter = Reporter("none", out)
    reporter.status("1/2", {})
    reporter.status("2/2", {}, asked=True)
    assert out.getvalue() == "2/2\n"


def test_a_stderr_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    reporter = Reporter("line", stream)
    reporter.note("nobody hears this")
    reporter.note("nor this")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, writer)
    os.close(null)
    # so that what is still buffered can go somewhere
    stream.close()


def test_characters_that_the_terminal_lacks_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Reporter("line", stream).note("±2m")
    assert raw.getvalue() == b"?2m\n"
