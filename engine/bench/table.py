"""Table: a record for people, on one screen."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def forward_table(record: dict[str, Any]) -> RenderableType:
    """Steps and prompts of a `forward` record."""
    summary = record["summary"]
    steps = _table("rows", "context", "step ms", "least", "most", "tokens/s")
    for case in summary["decode"]:
        steps.add_row(
            str(case["rows"]),
            str(case["context"]),
            _range(case["step_ms"], 2),
            f"{case['step_ms_least']:.2f}",
            f"{case['step_ms_most']:.2f}",
            f"{case['tokens_per_s']:.1f}",
        )
    prompts = _table("prompt", "tokens/s")
    for case in summary["prefill"]:
        prompts.add_row(str(case["tokens"]), _range(case["tokens_per_s"], 0))
    if any("served_ms" in case for case in summary["decode"]):
        return Group(_title(record), steps, _served(record), prompts)
    return Group(_title(record), steps, prompts)


def _served(record: dict[str, Any]) -> RenderableType:
    """The same steps in a rank's loop; processor time in microseconds of a step."""
    cases = [case for case in record["summary"]["decode"] if "served_ms" in case]
    spent = list(cases[0]["cpu_us"])
    table = _table("rows", "context", "served ms", "gap ms", *(f"{name} us" for name in spent))
    for case in cases:
        table.add_row(
            str(case["rows"]),
            str(case["context"]),
            _range(case["served_ms"], 2),
            f"{case['gap_ms']:.2f}",
            *(f"{case['cpu_us'][name]:.0f}" for name in spent),
        )
    admissions = _table("admission of ids", "decode rank us", "prefill rank us", "to its commit us")
    for found in record["admissions"]:
        names = ("decode_us", "prefill_us", "prefill_whole_us")
        admissions.add_row(str(found["ids"]), *(f"{found[name]:.0f}" for name in names))
    return Group(table, admissions)


def serve_table(record: dict[str, Any]) -> RenderableType:
    """Figures of a `serve` record: one column per row count."""
    summary = record["summary"]
    cases = summary["cases"]
    table = _table("", *(str(case["sequences"]) for case in cases))
    lines = [
        ("tokens/s", "served", "tokens_per_s", 1, 1.0),
        ("step served, ms", "served", "step_ms", 2, 1.0),
        ("step bare, ms", "bare", "step_ms", 2, 1.0),
        ("between tokens p50, ms", "served", "itl_ms_p50", 2, 1.0),
        ("between tokens p99, ms", "served", "itl_ms_p99", 2, 1.0),
        ("first token, ms", "served", "ttft_ms_p50", 1, 1.0),
        ("first to second, ms", "served", "second_ms_p50", 1, 1.0),
        ("hand-off, ms", "served", "handoff_us_p50", 2, 1e-3),
        ("push, ms", "served", "push_us_p50", 2, 1e-3),
        ("post per push, us", "served", "post_us_per_push", 1, 1.0),
        ("pushes", "served", "pushes", 0, 1.0),
        ("pushed, MiB", "served", "pushed_bytes", 1, 2.0**-20),
    ]
    for label, part, name, digits, scale in lines:
        table.add_row(label, *(_range(case[part][name], digits, scale) for case in cases))
    ranks = sorted({name.removesuffix("_step_us_p50") for name in cases[0]["served"] if name.endswith("_step_us_p50")})
    for rank in ranks:
        for name, scale, digits in (
            ("step_us_p50", 1e-3, 2),
            ("step_us_p99", 1e-3, 2),
            ("device_us_p50", 1e-3, 2),
            ("loop_lag_us_p50", 1e-3, 2),
            ("loop_lag_us_p99", 1e-3, 2),
            ("cpu_ms_per_step", 1.0, 2),
            ("ready_ms_per_step", 1.0, 2),
        ):
            cells = [case["served"].get(f"{rank}_{name}") for case in cases]
            words = name.replace("_us_", " ").replace("_ms_", " ").replace("_", " ")
            table.add_row(
                f"{rank} {words}, ms", *("-" if cell is None else _range(cell, digits, scale) for cell in cells)
            )
    ratios = _table("ratio", "median", "least", "most")
    for name, found in summary["ratios"].items():
        ratios.add_row(name, *(f"{found[key]:.3f}" for key in ("median", "min", "max")))
    return Group(_title(record), table, ratios)


def _title(record: dict[str, Any]) -> Text:
    machine = record["machine"]
    packages = " ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return Text(
        f"{record['model']} on {record['device']}, {machine['cores']} cores ({machine['cpu']}), python"
        f" {machine['python']} {packages}\ncommit {record['commit']}, median (least-most) of runs\n"
    )


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _range(found: dict[str, float], digits: int, scale: float = 1.0) -> str:
    low, middle, high = (f"{found[key] * scale:.{digits}f}" for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low}-{high})"
