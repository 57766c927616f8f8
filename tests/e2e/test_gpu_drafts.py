"""Drafts on GPUs: ranks that draft say what ranks that do not say, greedy or drawn, from a pushed context on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.test_gpu_ranks import CLOSE, PROMPTS, ROOT, draw_lines, run_batch, text_of
from tests.model.step_cases import write_agreeing_checkpoint
from tests.model.test_paged_drafts import small_ahead_config

ON_GPU = ("device=cuda", "kv_dtype=float32", "fabric=nixl")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose drafts often hold."""
    directory = tmp_path_factory.mktemp("model")
    write_agreeing_checkpoint(directory, small_ahead_config() | {"vocab_size": 8192})
    shutil.copy(ROOT / "engine" / "nano" / "tokenizer.json", directory / "tokenizer.json")
    return directory


def test_texts_are_those_of_ranks_that_do_not_draft(model: Path, tmp_path: Path) -> None:
    """Greedy ones are verified on the device; steps with a row that is drawn are judged by the host."""
    lines = draw_lines()
    for number, line in enumerate(lines[-5:]):
        line |= {"temperature": 0.8, "seed": number}
    plain = run_batch(tmp_path, model, lines, *ON_GPU, "draft.tokens=0")
    drafted = run_batch(tmp_path, model, lines, *ON_GPU, "draft.tokens=3", "draft.max_rows=16")
    assert plain.keys() == drafted.keys() and len(drafted) == PROMPTS
    others = [key for key, answer in plain.items() if text_of(answer) != text_of(drafted[key])]
    assert len(others) <= CLOSE, others
