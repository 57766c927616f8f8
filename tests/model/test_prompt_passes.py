"""A prompt through steps of few and of many rows: what is chosen by the number of rows changes no bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.bench.cases import load_model_config
from engine.config import Limits, RankConfig
from engine.model.rows import RowBatch
from engine.model.step_loading import choose_prompt_rows, load_step_model

SMALL = {
    "vocab_size": 2048, "hidden_size": 1024, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4],
    "o_groups": 2, "o_lora_rank": 256, "index_topk": 64, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024, "num_hash_layers": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Of V4-Flash: as small as products of the matrix units are, in layers of all kinds."""
LENGTH, PAGES = 1500, 8


def rank_config(model: str, **more: object) -> RankConfig:
    given = {
        "role": "prefill", "model": model, "device": "cuda", "fabric": "nixl", "page_tokens": 256,
        "max_model_tokens": 2048, "num_pages": PAGES, "num_slabs": 2, "kv_dtype": "fp8", "threads": 1,
        "replay_rows": 0, "config_digest": "0", "load_format": "dummy",
        "limits": Limits(decode_rows=1, prefill_chunk_tokens=2048),
    } | more  # fmt: skip
    return RankConfig(**given)  # type: ignore[arg-type]


def test_ranks_that_only_read_prompts_have_long_steps() -> None:
    assert choose_prompt_rows(rank_config("")) == (32, 256, 512, 1024, 2048)
    assert choose_prompt_rows(rank_config("", limits=Limits(prefill_chunk_tokens=768))) == (32, 256, 512, 1024)
    assert choose_prompt_rows(rank_config("", limits=Limits(prefill_chunk_tokens=64))) == (32, 256)
    assert choose_prompt_rows(rank_config("", group=4)) == (32, 256, 512)
    assert choose_prompt_rows(rank_config("", group=32)) == (32, 256)
    assert choose_prompt_rows(rank_config("", role="decode")) == (32, 256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_bits_of_a_prompt_do_not_depend_on_its_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_model_config("v4-flash") | SMALL), encoding="utf-8")
    ids = np.random.default_rng(3).integers(0, SMALL["vocab_size"], LENGTH)
    table = np.arange(PAGES)[None]
    found = []
    for rows, cuts in (((256,), [LENGTH]), ((32, 1024), [LENGTH]), ((512,), [700, 1, 30, LENGTH - 731])):
        config = rank_config(str(tmp_path))
        device = torch.device("cuda")
        model, _ = load_step_model(config, lambda *_: None, device, poison=True, prompt_rows=rows)
        parts, start = [], 0
        for cut in cuts:
            own = ids[None, start : start + cut]
            parts.append(model.forward(RowBatch(np.array([1]), np.array([start]), own, table)).clone())
            start += cut
        found.append(torch.cat(parts))
        assert found[-1].isfinite().all()
        assert torch.equal(model.forward(RowBatch(np.array([0]), np.array([0]), ids[None], table), [7]), found[-1][7:8])
    for other in found[1:]:
        assert torch.equal(other, found[0])
