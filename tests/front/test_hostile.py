"""Bodies that nobody would send: each is answered in time, by 200 or by an error that names what is wrong.

FUZZ_CASES is how many (300); FUZZ_RECORD a file that is told what was answered, for `docs/measurements`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch.fields import FIELD_TO_TYPE
from engine.config import HttpConfig
from tests.front.rig import ids_of, running_front

CASES = int(os.environ.get("FUZZ_CASES", "300"))
STATUSES = (200, 400, 404, 413)
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from(["nano", "text", "user", "assistant", "json_object", "\ud800", "</think>", "\0"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | SCALARS, "content": st.text() | VALUES}
    ),
    max_size=3,
)
SENSIBLE = {
    "messages": MESSAGES,
    "prompt": st.text() | st.lists(st.integers(-1, 9000), max_size=9) | st.lists(st.text(max_size=5), max_size=3),
    "tokens": st.lists(st.integers(-1, 9000), max_size=9),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    "n": st.integers(0, 4),
    "max_tokens": st.integers(0, 3000),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=18),
    "temperature": st.floats(0, 2),
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])}),
    "tools": st.just([]) | st.just([{"type": "function"}]),
}
NAMES = sorted({*FIELD_TO_TYPE, *SENSIBLE, "cache_salt"})
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4).flatmap(
    lambda wild: st.fixed_dictionaries({}, optional=SENSIBLE).map(lambda sane: {**wild, **sane})
)
NESTED = st.integers(1, 5000).map(lambda depth: b'{"messages":' + b"[" * depth + b"]" * depth + b"}")
MANGLED = st.tuples(BODIES, st.integers(0, 400), st.binary(max_size=3)).map(
    lambda parts: (whole := json.dumps(parts[0]).encode())[: parts[1]] + parts[2] + whole[parts[1] :]
)
RAW = BODIES.map(lambda body: json.dumps(body).encode()) | MANGLED | NESTED | st.binary(max_size=100)


@pytest.fixture(scope="module")
def front():
    """A front and the loop that it runs in."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = contextlib.AsyncExitStack()
        http = HttpConfig(body_bytes=20_000)
        rig = runner.run(stack.enter_async_context(running_front(http=http)))
        rig.head.auto = ids_of("well then")
        answers: collections.Counter[tuple[str, int]] = collections.Counter()
        begun = time.monotonic()
        yield runner, rig, answers
        runner.run(stack.aclose())
    if record := os.environ.get("FUZZ_RECORD"):
        told = {path: {str(status): answers[path, status] for status in STATUSES} for path in PATHS}
        whole = {"cases": answers.total(), "answers": told, "wall_s": round(time.monotonic() - begun)}
        Path(record).write_text(json.dumps(whole, indent=1) + "\n")


@settings(
    max_examples=CASES, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
@given(path=st.sampled_from(PATHS), body=RAW)
def test_any_body_is_answered(front, path, body):
    runner, rig, answers = front
    answer = runner.run(rig.post(path, body))
    assert answer.status in STATUSES, (answer.status, answer.body)
    answers[path, answer.status] += 1
    if answer.status != 200:
        error = answer.error
        assert error["message"] and error["code"] and error["type"] == "invalid_request_error"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.events[-1] == "[DONE]"
    else:
        assert answer.json
    assert not rig.front.generations and rig.front._waiting == 0 and rig.front._body_bytes == 0
