"""Bounded replay: prompt rows far from the end skip the layers past the last KV source, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.model.rows import RowBatch
from engine.model.transformer import PagedTransformer
from tests.model.paged_cases import Source, make_model, open_sequence, random_ids, random_model

LENGTH = 130


@pytest.fixture(scope="module")
def source() -> Source:
    return random_model(seed=5)


@pytest.fixture(scope="module")
def ids(source: Source) -> np.ndarray:
    return random_ids(LENGTH, source.shape.vocab_size, seed=6)


def run_prompt(model: PagedTransformer, ids: np.ndarray, chunk: int, wanted_back: int = 1) -> torch.Tensor:
    """Prefill in chunks; logits of the last `wanted_back` rows."""
    sequence = open_sequence(model, LENGTH + 20)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        last = start + chunk >= len(ids)
        rows = [len(part) - wanted_back + i for i in range(wanted_back)] if last else []
        logits = model.forward_prompt(sequence.batch(part, start), last=last, wanted=rows)
        assert last or logits.shape[0] == 0
    return logits


def exact_rows(source: Source) -> int:
    """Rows after which nothing is cut off: one window look-back per layer that is replayed."""
    replayed = source.shape.num_layers - max(source.shape.kv_sources)
    return replayed * (source.shape.window - 1) + 1


@pytest.mark.parametrize("chunk", [24, 50, LENGTH])
def test_enough_rows_make_the_replay_exact(source: Source, ids: np.ndarray, chunk: int) -> None:
    whole = open_sequence(make_model(source), LENGTH).run(ids)
    model = make_model(source, replay_rows=exact_rows(source))
    assert torch.equal(run_prompt(model, ids, chunk)[0], whole[-1])


def test_fewer_rows_approximate_and_more_rows_approximate_better(source: Source, ids: np.ndarray) -> None:
    whole = open_sequence(make_model(source), LENGTH).run(ids)[-1]
    window = source.shape.window
    errors = []
    for rows in (window, 2 * window - 1, exact_rows(source)):
        model = make_model(source, replay_rows=rows)
        errors.append(float((run_prompt(model, ids, 40)[0] - whole).abs().max()))
    assert errors[0] > errors[1] > errors[2] == 0


def test_how_a_prompt_is_cut_does_not_show(source: Source, ids: np.ndarray) -> None:
    rows = source.shape.window + 5
    results = [run_prompt(make_model(source, replay_rows=rows), ids, chunk) for chunk in (7, 24, 40, LENGTH)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_only_the_replayed_rows_enter_the_last_layers(source: Source, ids: np.ndarray) -> None:
    rows = source.shape.window
    model = make_model(source, replay_rows=rows)
    run_prompt(model, ids, 40)
    cut = max(source.shape.kv_sources)
    assert model.probe is not None
    assert model.probe.rows_entered == [LENGTH] * cut + [rows] * (source.shape.num_layers - cut)


def test_decode_goes_on_without_reading_what_was_skipped(source: Source, ids: np.ndarray) -> None:
    # The arena is poisoned: reading a window row that the replay did not write would give NaN.
    model = make_model(source, replay_rows=source.shape.window)
    run_prompt(model, ids, 40)
    sequence = open_sequence(model, LENGTH + 20)
    for at in range(LENGTH, LENGTH + 20):
        assert sequence.run(np.array([5 + at % 7]), at).isfinite().all()


def test_a_short_prompt_is_replayed_whole(source: Source, ids: np.ndarray) -> None:
    whole = open_sequence(make_model(source), LENGTH).run(ids[:9])
    model = make_model(source, replay_rows=source.shape.window)
    assert torch.equal(run_prompt(model, ids[:9], 4, wanted_back=1)[0], whole[8])


def test_a_new_prompt_on_a_used_slab_starts_afresh(source: Source, ids: np.ndarray) -> None:
    model = make_model(source, replay_rows=source.shape.window)
    expected = run_prompt(model, ids, 40)
    sequence = open_sequence(model, LENGTH)
    # A prompt that was given up after its first chunk.
    model.forward_prompt(sequence.batch(ids[40:80], 0), last=False)
    assert torch.equal(run_prompt(model, ids, 40), expected)


def test_row_counts_that_can_not_work_are_refused(source: Source) -> None:
    window = source.shape.window
    with pytest.raises(ConfigError, match=f"at least the window \\({window}\\), found {window - 1}"):
        make_model(source, replay_rows=window - 1)
    with pytest.raises(ConfigError, match="at most a chunk"):
        make_model(source, replay_rows=100, chunk=64)


def test_without_replay_a_prompt_pass_is_a_plain_pass(source: Source, ids: np.ndarray) -> None:
    one, two = make_model(source), make_model(source)
    batch: RowBatch = open_sequence(one, 40).batch(ids[:40], 0)
    assert torch.equal(one.forward_prompt(batch, last=True), two.forward(batch))
