"""A caller's trace (W3C traceparent) behind a request's name in its label, so that every line about it can tell it."""

from __future__ import annotations

import re

_PARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


def read_parent(text: str) -> tuple[str, str, bool] | None:
    """Trace id, the caller's span id and whether he keeps the trace, of a traceparent; None for what is none."""
    found = _PARENT.fullmatch(text)
    return (found[1], found[2], bool(int(found[3], 16) & 1)) if found is not None else None


def trace_of(label: str) -> str | None:
    """The trace id of a label; None where it has none."""
    parent = read_parent(label.rpartition(" ")[2])
    return parent[0] if parent is not None else None
