"""Defaults, error budgets and numbers from the command line."""

from __future__ import annotations

import pytest

from engine.batch.meter import Meter
from engine.batch.options import parse_default, parse_error_budget
from engine.errors import ConfigError


def test_a_default_is_json_or_else_a_string() -> None:
    assert parse_default("max_tokens=64") == ("max_tokens", b"64")
    assert parse_default("stop=END") == ("stop", b'"END"')
    assert parse_default('stop=["a", "b"]') == ("stop", b'["a", "b"]')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_tokens", "field=value"),
        ("max_token=5", "did you mean 'max_tokens'"),
        ("max_tokens=many", "max_tokens: Expected `int`"),
        ("best_of=2", "not supported"),
        ("messages=[]", "unknown field"),
    ],
)
def test_a_default_that_no_body_could_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_default(text)


def test_error_budgets() -> None:
    count = parse_error_budget("3")
    assert not count.is_spent(3, 10) and count.is_spent(4, 4)
    share = parse_error_budget("1%")
    assert not share.is_spent(50, 99), "too few lines to judge"
    assert share.is_spent(2, 100) and not share.is_spent(1, 100)
    assert share.is_spent(1, 50, final=True)
    assert not parse_error_budget("100%").is_spent(200, 200)
    for text in ("-1", "x", "101%", "1.5", "%"):
        with pytest.raises(ConfigError, match="--max-errors"):
            parse_error_budget(text)


def test_the_status_line_reads_as_documented() -> None:
    meter = Meter(started_at=0.0, total=50_000, skipped=0)
    for second in range(31):
        meter.output_tokens = 41_200 * second
        meter.mark(float(second))
    meter.ok, meter.prompt_tokens, meter.cached_tokens = 18_201, 310_000, 294_600
    meter.completion_tokens, meter.completion_squares = 18_201 * 68, 18_201 * 68.0 * 80
    meter.output_tokens = meter.completion_tokens
    meter.errors["timeout"] = 3
    line = meter.status(31.0, running=512, oldest=(41.2, "id-7"))
    assert line.startswith("18,204/50,000 36%  ETA 00:00:52 ±")
    assert line.endswith("  err 3  run 512  out 41.2k tok/s  in 310k (95% cached)  oldest 41s id-7")
    meter.total = None
    assert meter.status(31.0, running=1, oldest=None).startswith("18,204  err 3  run 1  out")
    assert "ETA" not in meter.status(31.0, running=1, oldest=None)


def test_the_rate_is_of_the_recent_past() -> None:
    meter = Meter()
    for second in range(100):
        meter.output_tokens = 10 * second if second < 60 else 600 + 100 * (second - 60)
        meter.mark(float(second))
    assert meter.output_rate() == pytest.approx(100, rel=0.05)
