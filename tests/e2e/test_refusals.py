"""What does not fit is refused, by name: a broken model directory, and ranks whose pages are laid out otherwise."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import NANO, model_directory
from engine.errors import ConfigError
from engine.model.device import open_torch_device
from engine.model.kv import plan_layout
from tests.e2e.duo import nano_config, open_duo
from tests.e2e.prompts import fresh_seed, random_ids
from tests.e2e.truth import load_nano

ROOT = Path(__file__).parents[2]
FILES = ("config.json", "engram.safetensors", "model.safetensors", "tokenizer.json")


def copy_nano(directory: Path) -> Path:
    """The bundled model in a directory of its own; files that a test replaces must be unlinked first."""
    for name in FILES:
        (directory / name).symlink_to(model_directory(NANO) / name)
    return directory


def rewrite(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def cut_file(name: str, share: float) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        data = (directory / name).read_bytes()
        rewrite(directory / name, data[: int(len(data) * share)])

    return change


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        for name, value in changes.items():
            (config if name in config else config["text_config"])[name] = value
        rewrite(directory / "config.json", json.dumps(config).encode())

    return change


def rename_tensor(directory: Path) -> None:
    """One letter of one name in the header: as many bytes as before, so the file still reads."""
    data = (directory / "model.safetensors").read_bytes()
    assert data.count(b'"layers.3.attn.wkv.weight"') == 1
    rewrite(directory / "model.safetensors", data.replace(b'"layers.3.attn.wkv.weight"', b'"layers.3.attn.wkw.weight"'))


BROKEN = {
    "no config": (lambda directory: (directory / "config.json").unlink(), r"config\.json does not exist"),
    "config cut": (cut_file("config.json", 0.5), r"config\.json cannot be read as JSON"),
    "another family": (edit_config(model_type="deepseek_v3"), "or 'deepseek_v4', found 'deepseek_v3'"),
    "another size": (edit_config(hidden_size=128), r"tensor \S+ must have shape \[.*128.*\], found \[.*256.*\]"),
    "more experts": (edit_config(n_routed_experts=32), r"tensor layers\.0\.ffn\.experts\.24\.\S+ .* is missing from"),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), r"model\.safetensors does not exist"),
    "weights cut": (cut_file("model.safetensors", 0.9), r"model\.safetensors is not a readable safetensors file"),
    "no file at all": (cut_file("model.safetensors", 0.0), r"model\.safetensors is not a readable safetensors file"),
    "a tensor less": (rename_tensor, r"tensor layers\.3\.attn\.wkv\.weight \[64, 256\] is missing from"),
    "memory cut": (cut_file("engram.safetensors", 0.5), r"engram\.safetensors is not a readable safetensors file"),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_broken_model_is_refused_by_the_name_of_what_is_broken(tmp_path: Path, broken: str) -> None:
    change, says = BROKEN[broken]
    change(copy_nano(tmp_path))
    with pytest.raises(ConfigError, match=says):
        await open_torch_device(nano_config(model=str(tmp_path)), lambda *phase: None)


def test_a_whole_engine_ends_with_a_reason_when_its_weights_are_cut(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    cut_file("model.safetensors", 0.9)(copy_nano(model))
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "hello", "max_tokens": 2}\n')
    done = subprocess.run(
        [sys.executable, "-m", "engine", "batch", "--model", str(model), "-i", str(tmp_path / "in.jsonl"), "-o", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4 and done.stdout == ""
    assert f"{model}/model.safetensors is not a readable safetensors file" in done.stderr
    assert "Traceback" not in done.stderr


async def test_ranks_with_other_pages_refuse_each_other_and_requests_say_why() -> None:
    rng = random.Random(fresh_seed())
    digests = [plan_layout(load_nano()[0], page_tokens).digest for page_tokens in (32, 64)]
    async with open_duo("memory", page_tokens=64, prefill_page_tokens=32) as duo:
        request = duo.make_request(random_ids(rng, 100), max_tokens=4)
        await duo.complete([request])
    assert request.finished is None and request.tokens == []
    failed = request.failed
    assert failed is not None and failed.code == "rank_lost" and failed.definite
    assert f"KV layout {digests[0]}, not {digests[1]}: model, page size or format differ" in failed.message
    assert not duo.prefill.chunks and not duo.decode.rows, "nothing was computed for it"
