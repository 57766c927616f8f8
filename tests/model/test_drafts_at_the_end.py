"""Drafts where there is no room: behind the end of the longest text, in steps of more rows than may draft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import DeviceError
from engine.model.draft_sizes import ToldRows
from engine.model.drafting import Pick
from engine.model.rows import RowBatch
from tests.model.paged_cases import random_ids, write_checkpoint
from tests.model.test_paged_drafts import small_ahead_config
from tests.model.test_step_drafts import load

SLABS, DRAFTS = np.array([2, 1]), 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ahead")
    write_checkpoint(directory, config=small_ahead_config())
    return directory


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_row_at_the_end_of_the_longest_text_drafts_for_nobody(checkpoint: Path, is_drawn: bool) -> None:
    model, info = load(checkpoint, "cpu", drafts=DRAFTS)
    drafter, last = model.drafter, info.max_model_tokens - 1
    assert drafter is not None
    pick: Pick | None = (lambda logits, positions: logits.argmax(1).numpy()) if is_drawn else None
    anchors = random_ids(2, 320, seed=1)
    found = drafter.propose(SLABS, anchors, np.array([last, last - 60]), DRAFTS, pick=pick).tokens
    assert found.shape == (2, DRAFTS) and (found >= 0).all()
    # The other row's are what they are without it.
    alone = drafter.propose(SLABS[1:], anchors[1:], np.array([last - 60]), DRAFTS, pick=pick).tokens
    assert np.array_equal(found[1:], alone)


def test_more_rows_than_may_draft_are_computed_without(checkpoint: Path) -> None:
    model, _ = load(checkpoint, "cpu", drafts=DRAFTS, rows=2)
    assert model.drafter is not None and model.drafter.steps is not None
    steps, most = model.drafter.steps, max(model.drafter.steps.plain)
    assert most > 3 and max(steps.drafting) == 2 * (1 + DRAFTS)
    asked = [(count, drafts) for count in (1, 2, 3, most, most + 1) for drafts in (0, 1, DRAFTS)]
    found = {each: steps.find_drafts(*each) for each in asked}
    assert {each for each, drafts in found.items() if drafts == DRAFTS} == {(1, DRAFTS), (2, DRAFTS)}
    assert {each for each, drafts in found.items() if drafts is None} == {
        (count, drafts) for count, drafts in asked if drafts == 1 or count > most
    }
    column = np.array([5, 6, 7])
    rows = ToldRows(
        column, column, column, column + 9, np.full(3, DRAFTS), np.ones((3, DRAFTS), np.int64), column[:, None]
    )
    lines = steps.launch(rows, 0)
    # Where each stood, a token, and no draft.
    assert lines[:, :3].tolist() == [[5, 1, 0], [6, 1, 0], [7, 1, 0]] and lines.shape == (3, 4)


def test_drafts_of_more_rows_than_may_draft_are_not_judged(checkpoint: Path) -> None:
    model, _ = load(checkpoint, "cpu", drafts=DRAFTS, rows=1)
    ids = random_ids(4, 320, seed=2).reshape(2, 2)
    model.forward(RowBatch(SLABS, np.array([0, 0]), ids, np.array([[3], [4]])))
    assert model.drafter is not None
    with pytest.raises(DeviceError, match="drafts of 2 rows were judged, a step has some up to 1"):
        model.drafter.keep(np.array([1, 2]), np.array([8, 9]))
