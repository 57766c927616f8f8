"""What docs/operations/ ships for Grafana and Prometheus names only metrics that are exported."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.faces.metrics import metrics_text
from engine.front.counts import FrontCounts, make_counts_file
from tests.faces.experts_samples import make_part, make_status, make_traffic
from tests.faces.test_metrics import FULL
from transport.messages import ExpertsReport

PLACE = Path(__file__).parents[2] / "docs" / "operations"
NAME = re.compile(r"\b(?:engine|vllm):[a-z0-9_]+")
LABEL = re.compile(r'([a-z_]+)=~?"([^"]*)"')
ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


def exported() -> dict[str, set[str]]:
    """Names of series to the names of their labels."""
    descriptor = make_counts_file(1)
    counts = FrontCounts(descriptor, 0)
    counts.add_answer("chat", 200)
    fronts = counts.metrics_text()
    counts.close()
    os.close(descriptor)
    head = metrics_text(make_status(), ExpertsReport((FULL, make_part(part="draft"))), make_traffic(), 1e9)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(head + fronts):
        labels = {label for sample in family.samples for label in sample.labels}
        found.update({family.name + ending: labels for ending in ENDINGS[family.type]})
    return found


def expressions() -> dict[str, list[str]]:
    board = json.loads((PLACE / "grafana.json").read_text())
    rules = (PLACE / "alerts.yml").read_text()
    return {
        "grafana.json": [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())],
        "alerts.yml": re.findall(r"^ +expr: (.+)$", rules, re.M),
    }


def test_every_name_and_label_is_exported() -> None:
    known = exported()
    for file, texts in expressions().items():
        assert texts, file
        for text in texts:
            names = NAME.findall(text)
            assert names, text
            for name in names:
                assert name in known, f"{file}: {name}"
            for label in re.findall(r"by \(([a-z_, ]+)\)", text):
                asked = {word.strip() for word in label.split(",")}
                assert asked <= set().union(*(known[name] for name in names)), f"{file}: {text}"
            for label, _ in LABEL.findall(text):
                assert any(label in known[name] for name in names), f"{file}: {label} in {text}"


def test_the_alerts_are_those_that_are_promised() -> None:
    rules = (PLACE / "alerts.yml").read_text()
    assert re.findall(r"- alert: (\w+)", rules) == [
        "EngineDown", "EngineNotReady", "EngineStandsStill", "EngineSkew", "EnginePushesFail", "EngineRefuses",
        "EngineBalancerStandsStill",
    ]  # fmt: skip
    assert rules.count("expr: ") == rules.count("summary: ") == rules.count("severity: ") == 7


def test_panels_have_their_own_place() -> None:
    panels = json.loads((PLACE / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        across, down = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        cells = {(x, y) for x in across for y in down}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
