"""Steps that draft, launched ahead and void: what runs again finds all that it reads, however many drafts had held."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import DraftConfig
from engine.model.draft_sizes import ToldRows
from engine.model.gpu_rank import load_gpu_group
from engine.model.kv import SPARE_ROWS
from engine.model.ops import reference_ops
from engine.model.rows import RowBatch
from engine.model.step_drafter import MOST_DRAFTS_IN_GROUP
from engine.model.step_model import StepModel
from tests.model.gpu_drafts_process import drafting_config
from tests.model.gpu_rank_cases import PROMPT_ROWS
from tests.model.paged_cases import random_ids, write_checkpoint
from tests.model.plain_rows import PlainRows
from tests.model.test_paged_drafts import small_ahead_config
from tests.model.test_step_drafts import load

SLAB, TABLES, LENGTH = 2, np.arange(5, 13)[None], 70


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ahead")
    write_checkpoint(directory, config=small_ahead_config())
    return directory


def launch(model: StepModel, position: int, drafts: int) -> None:
    """A step of one sequence with drafts behind its row, as if nobody knew better."""
    assert model.drafter is not None and model.drafter.steps is not None
    column = np.array([position])
    ids = random_ids(1 + drafts, 320, seed=position)
    told = ToldRows(ids[:1], column, np.array([SLAB]), column + 20, np.array([drafts]), ids[None, 1:], TABLES)
    model.drafter.steps.launch(told, drafts)


def read_row(model: StepModel, ids: np.ndarray) -> Tensor:
    """Logits of the row behind the prompt, alone."""
    return model.forward(RowBatch(np.array([SLAB]), np.array([LENGTH]), ids[None, -1:], TABLES)).clone()


@pytest.mark.parametrize(("drafts", "holds"), [(MOST_DRAFTS_IN_GROUP, True), (SPARE_ROWS - 1, False)])
def test_two_void_steps_write_over_nothing_that_is_read_again(checkpoint: Path, drafts: int, holds: bool) -> None:
    """With as many drafts as a rank alone may have, whose steps are never void, they would."""
    model, _ = load(checkpoint, "cpu", drafts=drafts)
    ids = random_ids(LENGTH + 1, 320, seed=1)
    model.forward_prompt(RowBatch(np.array([SLAB]), np.array([0]), ids[None, :LENGTH], TABLES), last=True)
    before = read_row(model, ids)
    launch(model, LENGTH, drafts)
    launch(model, LENGTH + 1 + drafts, drafts)
    assert torch.equal(read_row(model, ids), before) is holds


def test_a_rank_of_a_group_drafts_no_more(checkpoint: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(drafting_config(checkpoint, 2), draft=DraftConfig(tokens=SPARE_ROWS - 1, max_rows=2))
    model, info, group = load_gpu_group(
        config, lambda *_: None, torch.device("cpu"), place=0, mesh_address=str(tmp_path / "mesh"),
        ops=reference_ops(), prompt_rows=PROMPT_ROWS, peers=PlainRows,
    )  # fmt: skip
    assert model.drafter is not None and info.max_drafts == model.drafter.drafts == MOST_DRAFTS_IN_GROUP
    group.close()
    group.share.close()
