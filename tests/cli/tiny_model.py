"""A checkpoint that the real engine serves within seconds: the oracle's tiny weights beside a tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ORACLE = Path(__file__).resolve().parent.parent / "oracle" / "v41-tiny"


def write_tiny_model(directory: Path) -> Path:
    """Writes the model's folder; every id is a word of its own, so the n-gram memory has as many classes as ids."""
    config = json.loads((ORACLE / "config.json").read_text())
    vocab_size = config["text_config"]["vocab_size"]
    config["text_config"]["engram_compressed_vocab_size"] = vocab_size
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").symlink_to(ORACLE / "model.safetensors")
    words = {f"word{index}": index for index in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(directory / "tokenizer.json"))
    return directory
