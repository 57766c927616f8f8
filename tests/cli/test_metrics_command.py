"""engine metrics and engine status against a scripted head: what scripts and collectors get, with its exit code."""

from __future__ import annotations

import json
import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.cli import main
from tests.cli.scripted_head import scripted_head
from tests.faces.experts_samples import make_part, make_status


@pytest.fixture
def head(tmp_path):
    (tmp_path / "run").mkdir()
    with scripted_head(tmp_path / "run") as head:
        head.parts = [(make_part(applied=2),)]
        yield head


def values(text: str) -> dict[str, float]:
    return {sample.name: sample.value for one in text_string_to_metric_families(text) for sample in one.samples}


def test_metrics_go_to_stdout(head, capfd):
    assert main(["metrics", "--dir", head.directory]) == 0
    out, err = capfd.readouterr()
    assert err == "" and values(out)["engine:up"] == 1 and values(out)["engine:eplb_balancedness"] == 0.5
    assert 'engine:eplb_rebalance_events_total{part="main",pool="decode",result="applied"} 2.0' in out


def test_a_file_is_replaced_whole_and_can_be_read_by_others(head, tmp_path, capfd):
    file = tmp_path / "engine.prom"
    file.write_text("old")
    assert main(["metrics", "--dir", head.directory, "--output", str(file)]) == 0
    assert capfd.readouterr().out == "" and values(file.read_text())["engine:ready"] == 1
    assert file.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["engine.prom", "run"], "no temporary file stays"


def test_an_engine_that_is_down_is_a_metric_too(tmp_path, capfd):
    file = tmp_path / "engine.prom"
    assert main(["metrics", "--dir", str(tmp_path / "none"), "-o", str(file)]) == 4
    assert values(file.read_text()) == {"engine:up": 0} and "no engine answers" in capfd.readouterr().err


@pytest.mark.parametrize("target", ["nowhere/engine.prom", "full"])
def test_a_file_that_can_not_be_written_is_a_usage_error(head, tmp_path, capfd, target):
    (tmp_path / "full" / "inside").mkdir(parents=True)
    assert main(["metrics", "--dir", head.directory, "-o", str(tmp_path / target)]) == 2
    assert target in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["full", "run"], "no temporary file stays"


def test_status_shows_groups_and_what_is_degraded(head, capfd):
    head.status = make_status(degraded=("group 0 of decode: rank 3 is missing",))
    assert main(["status", "--dir", head.directory]) == 0
    out = capfd.readouterr().out
    assert "degraded: group 0 of decode: rank 3 is missing" in out
    assert "decode group 0: ranks 1-4  idle  membership 2  epoch 7  skew 2.00" in out
    assert main(["status", "--json", "--dir", head.directory]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["degraded"] == ["group 0 of decode: rank 3 is missing"]
    assert data["experts"][0]["membership"] == 2 and data["schema"] == 1
