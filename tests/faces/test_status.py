"""The status table: all that it says fits a terminal of 80 columns."""

from __future__ import annotations

import msgspec
from rich.console import Console

from engine.faces.rankrows import RankRow, render_rows
from engine.faces.status import render_status, status_json
from transport.messages import PROTOCOL_VERSION, ExpertsReport, PartReport, RankSnapshot, RankStatus, StatusReport


def make_rank(rank: int, role: str, state: str, phase: str = "", restarts: int = 0) -> RankStatus:
    fields = {field.name: 0 for field in msgspec.structs.fields(RankSnapshot) if field.required} | {
        "rank": rank, "step": 123_456, "running": 256, "waiting": 4096, "pages_total": 4096, "pages_free": 3000,
        "pushed_bytes": 900 << 20, "loop_lag_us_p99": 97_500, "step_us_p50": 117_900,
    }  # fmt: skip
    snapshot = RankSnapshot(**fields) if state == "ready" else None
    return RankStatus(rank, role, 1 + restarts, 4242, state, phase, 300, restarts, snapshot)  # type: ignore[arg-type]


def render(report: StatusReport, *parts: PartReport) -> list[str]:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render_status(report, ExpertsReport(parts)))
    return capture.get().splitlines()


def test_eighty_columns_are_enough() -> None:
    ranks = (
        make_rank(0, "prefill", "ready"),
        make_rank(12, "decode", "ready"),
        make_rank(13, "decode", "starting", "weights 1234/2345MiB", 2),
    )
    report = StatusReport(
        version=PROTOCOL_VERSION, cluster="engine", model="nano", head_pid=4240, uptime_ms=61_000, ready=True,
        reasons=(), waiting=7, running=512, finished=20_000, failed=3, ranks=ranks, cancelled=11,
    )  # fmt: skip
    lines = render(report)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 80
    assert "waiting 7  running 512  finished 20000  cancelled 11  failed 3" in lines
    [p0] = [line.split() for line in lines if line.startswith("p0")]
    assert p0 == ["p0", "ready", "123456", "256", "4096", "1096/4096", "900.0MiB", "97.5ms", "117.9ms", "0.3s"]
    assert any(line.startswith("d13") for line in lines)


def test_groups_have_a_line_each_and_what_is_degraded_is_said_under_the_verdict() -> None:
    from tests.faces.experts_samples import make_part, make_status

    report = make_status(degraded=("group 0 of decode: rank 3 is missing",))
    forming = make_part(group=1, ranks=tuple(range(1000, 1024)), state="incomplete", steps=0, membership=12)
    lines = render(report, make_part(), make_part(part="draft"), forming)
    assert lines[1:3] == ["ready", "degraded: group 0 of decode: rank 3 is missing"]
    assert lines[-2:] == [
        "decode group 0: ranks 1-4  idle  membership 2  epoch 7  skew 2.00",
        "decode group 1: ranks 1000-1023  incomplete  membership 12  epoch 7  skew -",
    ]
    assert max(map(len, lines)) <= 80


def test_json_has_every_figure_by_name() -> None:
    import json

    from tests.faces.experts_samples import make_part, make_status

    data = json.loads(json.dumps(status_json(make_status(degraded=("x",)), ExpertsReport((make_part(),)))))
    assert data["schema"] == 1 and data["degraded"] == ["x"] and data["reasons"] == []
    assert data["ranks"][0]["snapshot"]["pages_total"] == 4096 and data["experts"][0]["skew"]["layer"] == 4


def test_cached_pages_that_nobody_uses_are_not_used() -> None:
    rank = make_rank(0, "prefill", "ready")
    snapshot = msgspec.structs.replace(rank.snapshot, pages_free=1000, pages_cached=2500, pages_pinned=300)
    rank = msgspec.structs.replace(rank, snapshot=snapshot)
    assert snapshot.pages_available == 3200
    report = StatusReport(
        version=PROTOCOL_VERSION, cluster="engine", model="nano", head_pid=4240, uptime_ms=61_000, ready=True,
        reasons=(), waiting=0, running=0, finished=0, failed=0, ranks=(rank,),
    )  # fmt: skip
    [p0] = [line.split() for line in render(report) if line.startswith("p0")]
    assert "896/4096" in p0
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render_rows([RankRow(rank, "", None)]))
    assert " 22% " in capture.get()
