"""Requests that have not ended, as a table for people."""

from __future__ import annotations

from rich.table import Table

from engine.faces.plain import make_plain
from engine.faces.status import describe_age
from transport.messages import RequestRow, RequestsReport

NAME_CHARACTERS = 18
"""Of a client's name and of a label, in the table; JSON has all."""


def render_requests(report: RequestsReport) -> Table:
    """The oldest first; fits 80 columns where names are short."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    table.add_column("request", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("age", "in state", "prompt", "out", "ranks", "try"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("client", overflow="ellipsis", no_wrap=True)
    table.add_column("label", overflow="ellipsis", no_wrap=True)
    for row in report.rows:
        table.add_row(
            str(row.request), row.state, describe_age(row.age_ms / 1e3), describe_age(row.state_ms / 1e3),
            str(row.prompt_tokens), f"{row.generated}/{row.max_tokens}", _ranks(row), str(row.attempt),
            _short(row.client), _short(row.label),
        )  # fmt: skip
    return table


def _ranks(row: RequestRow) -> str:
    prefill = f"p{row.prefill_rank}" if row.prefill_rank >= 0 else "-"
    return f"{prefill}>d{row.decode_rank}" if row.decode_rank >= 0 else prefill


def _short(text: str) -> str:
    text = make_plain(text)
    return text if len(text) <= NAME_CHARACTERS else text[: NAME_CHARACTERS - 1] + "…"
