"""Ranks on GPUs: prompts on one, tokens on another where there are two, pages pushed between them, a CPU's texts."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.paged_cases import small_v4_config, write_checkpoint

ROOT = Path(__file__).parent.parent.parent
PROMPTS = 50
CLOSE = 2
"""Texts that may differ: where two ids are as likely to the last bit of float32, other sums choose another."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = ROOT / "engine" / "nano" / "tokenizer.json"
    write_checkpoint(directory, config=small_v4_config() | {"vocab_size": 8192})
    shutil.copy(tokenizer, directory / "tokenizer.json")
    return directory


def run_batch(folder: Path, model: Path, lines: list[dict[str, Any]], *settings: str) -> dict[str, dict[str, Any]]:
    """Answers by id."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target.unlink(missing_ok=True)
    sets = ["page_tokens=64", "max_model_tokens=512", "num_pages=200", "limits.decode_rows=16"]
    # Most prompts are several chunks: pages of all but the last are pushed with nothing sampled behind them.
    sets += ["limits.prefill_chunk_tokens=64", "checksum_pushes=true", *settings]
    command = [sys.executable, "-m", "engine", "batch", "-i", str(source), "-o", str(target), "--model", str(model)]
    done = subprocess.run(
        [*command, *(word for setting in sets for word in ("--set", setting))],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())}


def draw_lines() -> list[dict[str, Any]]:
    generator = random.Random(5)
    words = (ROOT / "README.md").read_text().split()
    lines = []
    for number in range(PROMPTS):
        count = generator.choice([1, 2, 3, 15, 16, 17, 33, 60, 120, 180])
        text = " ".join(generator.choice(words) for _ in range(count))
        lines.append(
            {"custom_id": f"r{number}", "prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        )
    return lines


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["response"]["body"]["choices"][0]["text"]
    return text


def test_texts_are_those_of_cpu_ranks(model: Path, tmp_path: Path) -> None:
    lines = draw_lines()
    on_cpu = run_batch(tmp_path, model, lines)
    on_gpu = run_batch(tmp_path, model, lines, "device=cuda", "kv_dtype=float32", "fabric=nixl")
    assert on_cpu.keys() == on_gpu.keys() and len(on_gpu) == PROMPTS
    assert all(answer["engine"]["pushed_bytes"] > 0 for answer in on_gpu.values())
    assert all(answer["engine"]["attempts"] == 1 for answer in on_gpu.values()), "a push with a wrong checksum"
    others = [key for key, answer in on_cpu.items() if text_of(answer) != text_of(on_gpu[key])]
    assert len(others) <= CLOSE, others


def test_what_is_asked_beyond_the_likeliest_is_as_on_a_cpu(model: Path, tmp_path: Path) -> None:
    """Seeds, penalties and log-probabilities take the way over the host."""
    lines = draw_lines()[:12]
    for number, line in enumerate(lines):
        line |= {"temperature": 0.8, "seed": number, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 2}
    on_cpu = run_batch(tmp_path, model, lines)
    on_gpu = run_batch(tmp_path, model, lines, "device=cuda", "kv_dtype=float32", "fabric=nixl")
    others = [key for key, answer in on_cpu.items() if text_of(answer) != text_of(on_gpu[key])]
    assert len(others) <= CLOSE, others


def test_bf16_records_and_dummy_weights_serve(model: Path, tmp_path: Path) -> None:
    answers = run_batch(tmp_path, model, draw_lines()[:8], "device=cuda", "load_format=dummy", "kv_dtype=bfloat16")
    assert len(answers) == 8
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 24 for answer in answers.values())
