"""Meter: the counts of a batch, and what follows from them: rates, the time left, the status line, the summary."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from engine.actors.client import Row

WINDOW_S = 30.0
"""Rates are taken over this much of the past."""


@dataclasses.dataclass(slots=True)
class Meter:
    """Counts of one run. Times are trio times.

    Attributes:
        started_at: when the first line was read.
        total: lines of the input, None while unknown.
        read, skipped: lines taken from the input; those of them that an earlier run had done.
        ok, errors: lines that ended; `errors` by type.
        prompt_tokens, cached_tokens, output_tokens: of answered requests; output tokens as they come.
        attempts: submissions beyond the first.
    """

    started_at: float = 0.0
    total: int | None = None
    read: int = 0
    skipped: int = 0
    ok: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    completion_tokens: int = 0
    completion_squares: float = 0.0
    attempts: int = 0
    ranks: set[int] = dataclasses.field(default_factory=set)
    _marks: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    @property
    def ended(self) -> int:
        """Lines that have their record from this run."""
        return self.ok + self.num_errors

    def count_answer(self, rows: Sequence[Row], completion: int) -> None:
        """One line was answered, with `completion` tokens in all its answers to one prompt."""
        self.ok += 1
        for row in rows:
            assert row.started is not None
            self.ranks |= {row.started.prefill_rank, row.started.decode_rank}
        first = rows[0].started
        assert first is not None
        self.prompt_tokens += rows[0].num_prompt
        self.cached_tokens += first.cached_tokens
        self.completion_tokens += completion
        self.completion_squares += completion * completion

    def mark(self, now: float) -> None:
        """Remembers the count of output tokens, for rates. Called about once a second."""
        self._marks.append((now, self.output_tokens))
        while len(self._marks) > 2 and self._marks[0][0] < now - WINDOW_S:
            self._marks.popleft()

    def output_rate(self) -> float:
        """Output tokens per second over the recent past; 0.0 while unknown."""
        if len(self._marks) < 2:
            return 0.0
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def time_left(self) -> tuple[float, float] | None:
        """Seconds until the end and their uncertainty (one standard deviation), by tokens left; None while unknown."""
        rate = self.output_rate()
        if self.total is None or self.ok < 2 or rate <= 0:
            return None
        mean = self.completion_tokens / self.ok
        variance = max(0.0, self.completion_squares / self.ok - mean * mean)
        lines = max(0, self.total - self.ended - self.skipped)
        begun = max(0, self.output_tokens - self.completion_tokens)  # of requests that still run
        left = max(0.0, lines * mean - begun)
        relative = math.sqrt(variance / self.ok + variance / max(lines, 1)) / mean if mean else 0.0
        return left / rate, left / rate * relative

    def status(self, now: float, *, running: int, oldest: tuple[float, str] | None) -> str:
        """The status line for people, what matters most in front. `oldest`: age in seconds and id of the oldest running
        request."""
        done = self.ended + self.skipped
        parts = [f"{done:,}" if self.total is None else f"{done:,}/{self.total:,} {_percent(done, self.total)}"]
        left = self.time_left()
        if left is not None:
            parts.append(f"ETA {_clock(left[0])} ±{_about(left[1])}")
        parts.append(f"err {self.num_errors:,}")
        parts.append(f"run {running}")
        parts.append(f"out {_short(self.output_rate())} tok/s")
        cached = f" ({_percent(self.cached_tokens, self.prompt_tokens)} cached)" if self.cached_tokens else ""
        parts.append(f"in {_short(self.prompt_tokens)}{cached}")
        if oldest is not None:
            parts.append(f"oldest {oldest[0]:.0f}s {_printable(oldest[1])}")
        return "  ".join(parts)

    def progress(self, now: float, *, running: int, oldest: tuple[float, str] | None) -> dict[str, Any]:
        """The status as one JSON object."""
        left = self.time_left()
        return {
            "schema": 1,
            "event": "batch.progress",
            "lines_done": self.ended + self.skipped,
            "lines_total": self.total,
            "lines_read": self.read,
            "ok": self.ok,
            "errors": self.num_errors,
            "skipped": self.skipped,
            "running": running,
            "output_tokens_per_s": round(self.output_rate(), 1),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "oldest_s": round(oldest[0], 1) if oldest else None,
            "oldest_id": oldest[1] if oldest else None,
            "eta_s": round(left[0], 1) if left else None,
            "eta_error_s": round(left[1], 1) if left else None,
            "wall_s": round(now - self.started_at, 3),
        }

    def summary(self, now: float, *, exit_code: int, stopped: str | None, model: str) -> dict[str, Any]:
        """What a run came to, as one JSON object. `stopped`: why it ended early, None if it did not."""
        wall = max(now - self.started_at, 1e-9)
        return {
            "schema": 1,
            "event": "batch.summary",
            "model": model,
            "exit_code": exit_code,
            "stopped": stopped,
            "lines_read": self.read,
            "ok": self.ok,
            "errors": self.num_errors,
            "errors_by_type": dict(sorted(self.errors.items())),
            "skipped": self.skipped,
            "attempts_repeated": self.attempts,
            "tokens": {
                "cached": self.cached_tokens,
                "new": self.prompt_tokens - self.cached_tokens,
                "output": self.completion_tokens,
            },
            "wall_s": round(wall, 3),
            "output_tokens_per_s": round(self.completion_tokens / wall, 2),
            "ranks": len(self.ranks),
            "output_tokens_per_s_per_rank": round(self.completion_tokens / wall / len(self.ranks), 2)
            if self.ranks
            else None,
        }


def describe_summary(summary: dict[str, Any]) -> str:
    """The summary for people, two lines."""
    tokens = summary["tokens"]
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in summary["errors_by_type"].items())
    skipped = f", {summary['skipped']:,} done before" if summary["skipped"] else ""
    return (
        f"{summary['ok']:,} ok, {summary['errors']:,} errors{f' ({kinds})' if kinds else ''}{skipped}"
        f" of {summary['lines_read']:,} lines in {summary['wall_s']:.1f} s\n"
        f"tokens: {tokens['new']:,} in, {tokens['cached']:,} cached, {tokens['output']:,} out;"
        f" {summary['output_tokens_per_s']:,.1f} tok/s out"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part // whole}%" if whole else "100%"


def _short(value: float) -> str:
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            number = value / divisor
            return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
    return f"{value / 1e9:.1f}G"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _about(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 90 else f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.0f}h"


def _printable(text: str) -> str:
    """An id for a terminal: no control characters, not too long."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= 40 else clean[:39] + "…"
