"""`draft.*` in the configuration: what each model gets by itself, what is refused, and that ranks must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import DRAFT_ROWS, DRAFT_TOKENS, DraftConfig, config_view
from engine.errors import ConfigError
from engine.settings import Resolved, resolve_config

ORACLE = Path(__file__).parent.parent / "oracle"


def resolve(*sets: str, model: str = "nano") -> Resolved:
    return resolve_config(None, flags={}, sets=[f"model={model}", *sets], environ={})


def without_drafter(place: Path) -> str:
    """A model of the same text without its drafter."""
    found = json.loads((ORACLE / "v41-tiny" / "config.json").read_text())
    text = found["text_config"]
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    place.mkdir()
    (place / "config.json").write_text(json.dumps(found))
    return str(place)


def test_the_bundled_model_drafts_by_itself() -> None:
    resolved = resolve()
    assert resolved.config.draft == DraftConfig(DRAFT_TOKENS, DRAFT_ROWS)
    assert resolved.origins["draft.tokens"].startswith("default (measured")
    view = config_view(resolved.config)
    assert (view["draft.tokens"], view["draft.max_rows"]) == (DRAFT_TOKENS, DRAFT_ROWS)
    assert resolved.config.rank_config(1).draft == resolved.config.draft
    assert resolve("draft.tokens=0").config.draft.tokens == 0


def test_all_ranks_must_agree() -> None:
    digests = {
        resolve(*sets).config.digest
        for sets in ((), ("draft.tokens=1",), ("draft.max_rows=1",), ("draft.acceptance=rejection",))
    }
    assert len(digests) == 4


def test_rejection_has_to_be_asked_for() -> None:
    assert resolve().config.draft.acceptance == "equal"
    config = resolve("draft.acceptance=rejection").config
    assert config.draft.acceptance == "rejection" and config.rank_config(1).draft == config.draft
    with pytest.raises(ConfigError, match=r"draft\.acceptance"):
        resolve("draft.acceptance=greedy")


def test_a_model_without_drafter_does_not_draft_and_is_not_asked_to(tmp_path: Path) -> None:
    model = without_drafter(tmp_path / "model")
    assert resolve(model=model).config.draft.tokens == 0
    assert resolve("draft.tokens=0", model=model).config.draft.tokens == 0
    with pytest.raises(ConfigError, match=r"--set draft.tokens: draft\.tokens: this model has no drafter"):
        resolve("draft.tokens=2", model=model)


def test_more_than_the_drafter_has_is_refused() -> None:
    assert resolve("draft.tokens=5").config.draft.tokens == 5
    with pytest.raises(ConfigError, match=r"6 is more than this model's drafter has \(5\)"):
        resolve("draft.tokens=6")
    with pytest.raises(ConfigError, match="out of range"):
        resolve("draft.tokens=-1")
    # A layer that predicts ahead goes on as long as rings have room.
    model = str(ORACLE / "v4-tiny")
    assert resolve("draft.tokens=7", model=model).config.draft.tokens == 7
    with pytest.raises(ConfigError, match=r"has \(7\)"):
        resolve("draft.tokens=8", model=model)


def test_a_bounded_replay_drafts_nothing_by_itself() -> None:
    resolved = resolve("replay_rows=64")
    assert resolved.config.draft.tokens == 0 and "replay_rows" in resolved.origins["draft.tokens"]
