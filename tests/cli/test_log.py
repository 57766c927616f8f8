"""Log lines: stable names, one line each, repeats counted."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from engine.core.events import EventRing
from engine.log import configure_log, keep_events, log_event

logger = logging.getLogger("engine.test")


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(form: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_log(form, level, "d17", stream)
    return stream


def test_text_is_one_line_that_a_person_can_read():
    stream = written("text")
    log_event(logger, "info", "rank.ready", rank=3, took_s=0.123456, nothing=None, path="a b", msg="first\nsecond")
    [line] = stream.getvalue().splitlines()
    assert line[12:] == ' d17  INFO    rank.ready rank=3 took_s=0.1235 path="a b" | first | second'


def test_json_carries_the_same_event_with_its_fields():
    stream = written("json")
    log_event(logger, "warning", "rank.down", rank=3, msg="first\nsecond")
    line = json.loads(stream.getvalue())
    assert {**line, "ts": ""} == {
        "ts": "", "level": "warning", "who": "d17", "event": "rank.down", "rank": 3, "msg": "first\nsecond",
    }  # fmt: skip


def test_levels_below_the_configured_one_cost_nothing():
    stream = written("json", "warning")
    log_event(logger, "info", "head.start")
    assert stream.getvalue() == ""


def test_equal_warnings_are_counted_and_different_ones_are_not(monkeypatch):
    stream = written("json")
    now = [1000.0]
    make = logging.LogRecord.__init__

    def stamped(record: logging.LogRecord, *values: object, **more: object) -> None:
        make(record, *values, **more)  # type: ignore[arg-type]
        record.created = now[0]

    monkeypatch.setattr(logging.LogRecord, "__init__", stamped)
    for _ in range(500):
        log_event(logger, "warning", "socket.accept", msg="too many open files")
    log_event(logger, "warning", "rank.down", rank=1, generation=1)
    log_event(logger, "warning", "rank.down", rank=1, generation=2)
    now[0] += 11
    log_event(logger, "warning", "socket.accept", msg="too many open files")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["socket.accept", "rank.down", "rank.down", "socket.accept"]
    assert "repeated" not in lines[0] and lines[3]["repeated"] == 499


def test_an_event_that_is_no_warning_is_never_held_back():
    stream = written("json")
    for _ in range(3):
        log_event(logger, "info", "request.finish", request=1)
    assert len(stream.getvalue().splitlines()) == 3


# ---------------------------------------------------------------- events that are kept


def kept(ring: EventRing) -> list[tuple[str, str, str]]:
    return [(event.level, event.name, event.text) for event in ring.after(0)[1]]


def test_kept_events_have_the_words_of_the_log_whatever_its_level_and_form():
    stream, ring = written("json", "error"), EventRing()
    keep_events(ring)
    log_event(logger, "debug", "request.abort")
    log_event(logger, "info", "rank.ready", rank=3, took_s=0.123456, path="a b", msg="first\nsecond")
    log_event(logger, "error", "head.failed", msg="no")
    logging.getLogger("some.library").warning("%d sockets", 3)
    try:
        raise ValueError("seven")
    except ValueError:
        logger.exception("broke")
    assert kept(ring) == [
        ("info", "rank.ready", 'rank=3 took_s=0.1235 path="a b" | first | second'),
        ("error", "head.failed", "| no"),
        ("warning", "some.library", "3 sockets"),
        ("error", "engine.test", "broke | ValueError: seven"),
    ]
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["head.failed", "broke"]
    assert ring.after(0)[1][0].at_ms > 1_700_000_000_000


def test_a_warning_that_repeats_is_counted_in_both_places():
    stream, ring = written("text"), EventRing()
    keep_events(ring)
    for _ in range(5):
        log_event(logger, "warning", "rank.down", rank=3)
    assert len(stream.getvalue().splitlines()) == 1 and kept(ring) == [("warning", "rank.down", "rank=3")]
