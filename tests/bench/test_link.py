"""Pushes between two real processes, small ones: all kinds arrive, and cost what is told."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from engine.bench import link
from engine.bench.link import PARTS, LinkOptions, describe_push, list_blocks, measure_link
from engine.errors import FabricError


def test_kinds_name_the_same_pages_in_other_places() -> None:
    kinds = list_blocks(45, 60, seed=2)
    assert len(kinds) == 5
    for kind, (local, remote) in kinds.items():
        by_layer = kind.startswith("by layer")
        assert len(local) == len(set(local)) == (45 * PARTS if by_layer else 45)
        assert sorted(remote) == sorted(local)
        assert min(local) == (60 if by_layer else 0) and max(local) < 60 * (1 + PARTS)
    assert kinds["pages in runs of 8"][1] != kinds["pages in runs of 8"][0]


def test_all_kinds_arrive() -> None:
    lines: list[str] = []
    asked = LinkOptions(pages=(3, 16), page_bytes=4096, part_bytes=128, samples=2)
    record: dict[str, Any] = measure_link(asked, ["engine", "bench", "link"], lines.append)
    runs = record["runs"]
    assert len(runs) == len(lines) == 10 and all(run["arrived"] for run in runs)
    assert [run["bytes"] for run in runs[:3]] == [3 * 4096] * 3 and runs[-1]["bytes"] == 16 * PARTS * 128
    # Neighbours that have neighbouring targets go as one.
    by_kind = {run["kind"]: run for run in runs[5:]}
    assert by_kind["pages in order"]["descriptors"] < by_kind["pages anywhere"]["descriptors"] <= 16
    assert all(len(run["samples_us"]) == 2 and run["post_us"] >= 0 and run["gb_per_s"] > 0 for run in runs)
    assert "WRONG" in describe_push(runs[0] | {"arrived": False})


async def test_a_receiver_that_ends_or_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send([3])
    assert await link.hear(ours) == [3]
    monkeypatch.setattr(link, "ANSWER_S", 0.05)
    with pytest.raises(FabricError, match=r"has said nothing for 0\.05 s"):
        await link.hear(ours)
    # Ends the thread that still listens, too.
    theirs.close()
    with pytest.raises(FabricError, match="has ended"):
        await link.hear(ours)
    ours.close()
