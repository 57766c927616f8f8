"""The export: a run's masters to a folder that the engine serves (configuration, weights, folding, tokenizer)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.model.quantise import save_checkpoint
from engine.nano.build import TOKENIZER, fold
from engine.nano.loop import Loop
from engine.nano.plan import FILE_BUDGET, narrow_stores

# What counts against the budget, and what a copy of the model needs beside its config.json.
BUDGETED = ("model.safetensors", "tokenizer.json", "engram.safetensors")


def export(loop: Loop, config: dict[str, Any], tokenizer: Tokenizer, out: Path, *, budget: int = FILE_BUDGET) -> int:
    """Write the quantised checkpoint and read it back as the engine does.

    Args:
        loop: a run; its masters are borrowed.
        config: of its shape.
        tokenizer: the vocabulary that `config` was made for.
        out: made if missing; the four files are replaced.
        budget: most bytes.

    Returns:
        bytes of the budgeted files.

    Raises:
        ConfigError: the files do not load, or are larger than the budget.
    """
    save_checkpoint(out, config, loop.weights(), narrow_stores(loop.shape))
    (out / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    token_map = torch.from_numpy(fold(tokenizer)).to(torch.int32)
    save_file({"token_map": token_map}, str(out / "engram.safetensors"))
    shape, _ = load_checkpoint(out)
    load_tables(out, shape)
    total = sum((out / name).stat().st_size for name in BUDGETED)
    if total > budget:
        raise ConfigError(f"{', '.join(BUDGETED)} take {total:,} bytes; the budget is {budget:,}")
    print(f"exported {total:,} bytes, {total / budget:.1%} of the budget", flush=True)
    return total
