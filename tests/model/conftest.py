"""Fixtures of the model tests: the golden checkpoints and cases under tests/oracle.

They hold random-weight models of a few million parameters and what independent implementations compute from them in
float32. Loaded once per run and never written to.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model.checkpoint import load_checkpoint
from engine.model.engram import EngramTables, engram_tables
from engine.model.layers import Weights
from engine.model.shapes import ModelShape

ORACLE = Path(__file__).parent.parent / "oracle"


@dataclass(frozen=True)
class Golden:
    """One golden set: a checkpoint and its cases."""

    directory: Path
    config: dict[str, Any]
    shape: ModelShape
    weights: Weights
    tables: EngramTables | None
    cases: dict[str, Tensor]
    engram: dict[str, Tensor]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def oracle() -> Path:
    return ORACLE


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    loaded: dict[str, Golden] = {}

    def load(name: str) -> Golden:
        if name not in loaded:
            directory = ORACLE / name
            shape, weights = load_checkpoint(directory)
            engram = load_file(directory / "engram.safetensors") if shape.engram is not None else {}
            loaded[name] = Golden(
                directory=directory,
                config=json.loads((directory / "config.json").read_text()),
                shape=shape,
                weights=weights,
                tables=engram_tables(shape, engram["token_map"]) if engram else None,
                cases=load_file(directory / "cases.safetensors"),
                engram=engram,
            )
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def tiny(golden: Callable[[str], Golden]) -> Golden:
    return golden("v41-tiny")


@pytest.fixture(scope="session")
def quant(golden: Callable[[str], Golden]) -> Golden:
    return golden("v41-tiny-quant")
