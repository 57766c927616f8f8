"""The model card says what was measured, about the files that are shipped."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from engine.model.shapes import load_shape
from engine.nano.build import TOKENIZER
from engine.nano.export import BUDGETED
from engine.nano.plan import plan_tensors

SHIPPED = TOKENIZER.parent
RECORDS = Path(__file__).parents[2] / "docs" / "measurements"


@pytest.fixture(scope="module")
def card() -> str:
    return (SHIPPED / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    text = (RECORDS / "2026-11-29-nano-training.json").read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|usr|mnt)/", text), "a machine's path"
    loaded: dict[str, Any] = json.loads(text)
    assert {"date", "machine", "commit", "command", "results"} <= loaded.keys()
    return loaded


def test_every_domain_has_its_measured_row(card: str, record: dict[str, Any]) -> None:
    bits = record["results"]["held_out_bits_per_byte"]
    load = record["results"]["expert_load_max_over_mean"]
    for domain in bits["trained"].keys() - {"mean"}:
        figures = [f"{bits[kind][domain]:.3f}" for kind in ("trained", "random", "dense")]
        figures += [f"{load[domain][kind]:.2f}" for kind in ("mean_over_layers", "worst_layer")]
        assert f"| {domain} | {' | '.join(figures)} |" in card


def test_acceptance_selection_and_digests_are_the_records(card: str, record: dict[str, Any]) -> None:
    results = record["results"]
    for name, kind in (("T = 0", "T=0.0"), ("T = 0.7", "T=0.7")):
        figures = [f"{share:.3f}" for share in results["draft_acceptance"][kind]["per_position"]]
        accepted = results["draft_acceptance"][kind]["accepted_of_block"]
        assert f"| {name} | {' | '.join(figures)} | {accepted:.2f} |" in card
    for share in results["selection_bites_at_1024"].values():
        assert f"| {share:.3f} |" in card
    assert len(results["shards_sha256"]) == 17
    for domain, digest in results["shards_sha256"].items():
        assert f"| `{domain}.txt.xz` | `{digest}` |" in card


def test_samples_are_unedited(card: str, record: dict[str, Any]) -> None:
    assert len(record["results"]["samples"]) == 6
    for sample in record["results"]["samples"]:
        assert sample["prompt"] in card
        assert f"~~~text\n{sample['T=0.0']}\n~~~" in card
        assert f"~~~text\n{sample['T=0.7']}\n~~~" in card


def test_sizes_and_the_weights_digest_are_the_shipped_files(card: str) -> None:
    for name in BUDGETED:
        assert f"| `{name}` | {(SHIPPED / name).stat().st_size:,} |" in card
    assert hashlib.sha256((SHIPPED / "model.safetensors").read_bytes()).hexdigest() in card
    counts: dict[bool, int] = {}
    for name, tensor in plan_tensors(load_shape(SHIPPED)).items():
        is_drafter = name.startswith("mtp.")
        counts[is_drafter] = counts.get(is_drafter, 0) + math.prod(tensor.size)
    assert f"| **main model** | **{counts[False]:,}** |" in card
    assert f"| **drafter** | **{counts[True]:,}** |" in card
    assert f"| **all** | **{sum(counts.values()):,}** |" in card


def test_a_second_measurement_agrees(record: dict[str, Any]) -> None:
    """The reference forward on a CPU, over the same held-out documents, against the training forward on a GPU."""
    check = json.loads((RECORDS / "2026-11-29-nano-cpu-check.json").read_text(encoding="utf-8"))
    for selection, figures in check["results"]["held_out_bits_per_byte"].items():
        assert figures
        for domain, value in figures.items():
            assert abs(value - record["results"]["held_out_bits_per_byte"][selection][domain]) < 0.02
