"""Cases: what steps are measured on a device, and of which model, from the words of a command line.

A case is `NAME=[N*]Q[@K][c][:D]`, the grammar of vLLM's benchmark of the same name: N requests (1) with Q rows each, at
a length of K tokens, the rows included; `k` behind K multiplies by 1024. Without K the rows are all there is. `:D` says
how many of the Q rows are drafts under verification, and must be Q - 1; the step judges them and makes as many, if the
model has a layer that predicts ahead. Chunks of prompts (`c`, or more than 8 rows)
are refused: the step on a device decodes and verifies.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

SPAN_LIMIT = 8
"""Rows of a request in one step: the input row and 7 drafts."""
MOST_MEMORY_LINES = 1 << 25
MEMORY_SHARE = 64
"""Of the lines of larger n-gram tables one in so many is left."""
SPARE_MEMORY_LINES = 100_000
"""Room for primes, which lie further apart than the numbers that they are searched from."""
_CASE = re.compile(
    r"(?P<name>[^=]+)=(?:(?P<requests>\d{1,9})\*)?(?P<rows>\d{1,9})(?:@(?P<length>\d{1,9})(?P<kilo>k)?)?"
    r"(?P<chunk>c)?(?::(?P<drafts>\d{1,9}))?"
)
_GRAMMAR = "NAME=[N*]Q[@K][:D], as in decode=16*1@8k or verify=16*4@8k:3"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceCase:
    """One size of step.

    Attributes:
        name: as given.
        requests: sequences in the step.
        rows: of each; more than one in a verify step.
        length: tokens of a sequence, its rows included.
        drafts: of its rows that are drafts, and as many are made for the next step.
    """

    name: str
    requests: int
    rows: int
    length: int
    drafts: int = 0


def parse_case(text: str) -> DeviceCase:
    """One case.

    Raises:
        ConfigError: it is malformed, or asks for what is not measured.
    """
    found = _CASE.fullmatch(text)
    if found is None:
        if "," in text:
            raise ConfigError(f"case {text!r} mixes shapes; all requests of a step have the same: {_GRAMMAR}")
        raise ConfigError(f"case {text!r} is not {_GRAMMAR}")
    requests, rows = int(found["requests"] or 1), int(found["rows"])
    length = int(found["length"]) * (1024 if found["kilo"] else 1) if found["length"] else rows
    if found["chunk"] or rows > SPAN_LIMIT:
        raise ConfigError(f"case {text!r} is a prompt's; a step has 1 to {SPAN_LIMIT} rows of a request and no 'c'")
    if not requests or not rows or length < rows:
        raise ConfigError(f"case {text!r} must have at least one request and one row, and a length that holds its rows")
    if found["drafts"] and int(found["drafts"]) != rows - 1:
        raise ConfigError(f"case {text!r} must verify {rows - 1} drafts with {rows} rows, found {found['drafts']}")
    return DeviceCase(found["name"], requests, rows, length, int(found["drafts"] or 0))


def load_cases(path: Path) -> list[DeviceCase]:
    """Cases from a JSON file: a list of their texts, or an object from name to the text behind `=`.

    Raises:
        ConfigError: it can not be read, or a case is malformed.
    """
    found = _read_json(path)
    if isinstance(found, dict):
        found = [f"{name}={shape}" for name, shape in found.items()]
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f"{path} must hold a list of cases, or an object from name to case")
    return [parse_case(text) for text in found]


def gather_cases(texts: Iterable[str], path: Path | None) -> list[DeviceCase]:
    """Cases of a command line, then those of a file; refuses none at all, and equal names."""
    cases = [parse_case(text) for text in texts] + (load_cases(path) if path is not None else [])
    if not cases:
        raise ConfigError(f"no case to measure; give --case {_GRAMMAR}")
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two cases are named {name!r}")
    return cases


def load_model_config(name: str) -> dict[str, Any]:
    """A vendor's config.json: of a known model (`v4-flash`, `v4.1-flash`), of a file, or of a checkpoint's folder.

    Raises:
        ConfigError: there is none.
    """
    known = files("engine.bench") / "shapes" / f"{name}.json"
    if re.fullmatch(r"[a-z0-9.-]+", name) and known.is_file():
        config: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
        return config
    path = Path(name)
    config = _read_json(path / "config.json" if path.is_dir() else path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return config


def shrink_memory(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with n-gram tables of a share of their lines, where no machine has room for all.

    A row of a step reads as many lines, as far apart, as of the whole ones.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or max(text.get("engram_num_embeddings") or [0]) <= MOST_MEMORY_LINES:
        return config
    lines = [count // MEMORY_SHARE + SPARE_MEMORY_LINES for count in text["engram_num_embeddings"]]
    small = {"engram_vocab_size": text["engram_vocab_size"] // MEMORY_SHARE, "engram_num_embeddings": lines}
    return config | {"text_config": text | small}


def cut_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The configuration of the first layers of a model, without what drafts.

    Raises:
        ConfigError: there are not so many.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    ratios = text.get("compress_ratios")
    if not isinstance(ratios, list) or not 0 < layers <= int(text.get("num_hidden_layers", 0)):
        raise ConfigError(f"--layers must be at most the model's, found {layers}")
    cut = {key: value for key, value in text.items() if not key.startswith("dspark_")}
    cut |= {"num_hidden_layers": layers, "compress_ratios": ratios[:layers], "num_nextn_predict_layers": 0}
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        if name in cut:
            cut[name] = [layer for layer in cut[name] if layer < layers]
    if "engram_layer_ids" in cut:
        cut["engram_num_embeddings"] = cut["engram_num_embeddings"][: len(cut["engram_layer_ids"])]
    if cut.get("candidate_source_layer_id", 0) >= layers:
        del cut["candidate_source_layer_id"]
    return cut if text is config else config | {"text_config": cut}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can not be read as JSON: {error}") from error
