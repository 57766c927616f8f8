"""What a device does beyond drawing: it counts what it has seen, and tells log-probabilities, of prompts too."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.plan import DecodeRow, PrefillChunk, Scores, StepPlan, StepResult
from engine.errors import DeviceError
from engine.model.device import TorchDevice, open_torch_device
from engine.model.passes import StepRunner, copy_plan
from engine.model.penalties import MOST, add_tokens, count_drafts, count_ids
from engine.model.rows import RowBatch
from engine.model.sampling import sample_tokens
from engine.model.scoring import score_tokens
from tests.model.paged_cases import random_ids, write_checkpoint
from tests.model.test_device import config_for, ignore
from transport.messages import Sampling

VOCAB = 320
PAGES = tuple(range(1, 15))
OTHERS = tuple(range(20, 34))
LOUD = Sampling(temperature=0.9, seed=4, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.9)
PENALISED = [
    LOUD,
    Sampling(frequency_penalty=1.5),
    Sampling(repetition_penalty=0.8, top_p=0.9, temperature=1.1, seed=8),
    Sampling(presence_penalty=2.0, bias_ids=(5, 17), biases=(3.0, -100.0)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


@pytest.fixture
async def device(checkpoint: Path) -> AsyncIterator[TorchDevice]:
    device = await open_torch_device(config_for(checkpoint), ignore, poison=True)
    yield device
    await device.aclose()


def words(ids: np.ndarray) -> memoryview:
    return memoryview(ids.astype("<i4").tobytes())


def cut_prompt(
    ids: np.ndarray,
    sampling: Sampling,
    *,
    slab: int = 0,
    pages: tuple[int, ...] = PAGES,
    generated: int = 0,
    size: int = 16,
    tops: int = -1,
) -> list[PrefillChunk]:
    """The chunks of a prompt, as `plan_step` cuts them."""
    own = len(ids) - generated
    chunks = []
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        last = end == len(ids)
        chunk = PrefillChunk(1, slab, start, words(ids[start:end]), pages, sampling if last else None)
        if last and sampling.has_penalties:
            chunk = dataclasses.replace(chunk, seen=words(ids), generated=generated)
        if tops >= 0:
            targets = words(ids[min(start + 1, own) : min(end + 1, own)])
            chunk = dataclasses.replace(chunk, targets=targets, target_tops=tops)
        chunks.append(chunk)
    return chunks


async def run(device: TorchDevice, *chunks: PrefillChunk, rows: tuple[DecodeRow, ...] = ()) -> StepResult:
    return await device.wait(device.submit(StepPlan(1, chunks, rows)))


async def complete(
    device: TorchDevice,
    ids: np.ndarray,
    sampling: Sampling,
    count: int,
    *,
    generated: int = 0,
    slab: int = 0,
    size: int = 16,
) -> list[int]:
    """`count` tokens after the ids."""
    pages = PAGES if slab == 0 else OTHERS
    for chunk in cut_prompt(ids, sampling, generated=generated, slab=slab, pages=pages, size=size):
        result = await run(device, chunk)
    tokens = [result.chunk_tokens[-1]]
    for at in range(len(ids), len(ids) + count - 1):
        result = await run(device, rows=(DecodeRow(1, slab, at, None, pages, sampling),))
        tokens += result.row_tokens
    assert None not in tokens
    return tokens  # type: ignore[return-value]


def whole_logits(device: TorchDevice, ids: np.ndarray) -> torch.Tensor:
    """What the model gives for all of a short text at once: float32[len(ids), vocab]."""
    batch = RowBatch(np.array([5]), np.array([0]), ids[None], np.array([OTHERS]))
    return device.model.forward(batch)


@pytest.mark.parametrize("sampling", PENALISED)
async def test_penalties_are_of_all_ids_before(device: TorchDevice, sampling: Sampling) -> None:
    ids = random_ids(12, VOCAB, seed=1)
    got = await complete(device, ids, sampling, 18)
    text = ids
    for token in got:
        counts = count_ids(text, len(text) - len(ids), VOCAB)[None] if sampling.has_penalties else None
        logits = whole_logits(device, text)[-1:]
        assert token == sample_tokens(logits, [sampling], [len(text)], device.info.eos_ids, counts)[0]
        text = np.append(text, token)
    plain = await complete(device, ids, Sampling(temperature=sampling.temperature, seed=sampling.seed), 18)
    assert plain != got, "penalties that change nothing test nothing"


@pytest.mark.parametrize("sampling", PENALISED[:2])
async def test_a_request_that_goes_on_elsewhere_is_penalised_alike(device: TorchDevice, sampling: Sampling) -> None:
    ids = random_ids(21, VOCAB, seed=2)
    whole = await complete(device, ids, sampling, 30)
    for done in (1, 9, 29):
        again = np.append(ids, whole[:done])
        for slab, size in ((0, 16), (3, 32)):
            rest = await complete(device, again, sampling, 30 - done, generated=done, slab=slab, size=size)
            assert rest == whole[done:]


async def test_what_a_slab_had_counted_before_does_not_matter(device: TorchDevice) -> None:
    ids, others = random_ids(14, VOCAB, seed=3), random_ids(20, VOCAB, seed=4)
    fresh = await complete(device, ids, LOUD, 12)
    await complete(device, others, PENALISED[1], 25)
    await complete(device, others, Sampling(), 5)
    assert await complete(device, ids, LOUD, 12) == fresh


async def test_without_penalties_no_count_is_touched(device: TorchDevice) -> None:
    device.model.arena.counts[0] = 77
    await complete(device, random_ids(14, VOCAB, seed=3), Sampling(temperature=1.0, logprobs=3), 6)
    assert (device.model.arena.counts[0] == 77).all()
    with pytest.raises(DeviceError, match="not the ids that they are for"):
        chunk = cut_prompt(random_ids(5, VOCAB), LOUD)[0]
        await run(device, dataclasses.replace(chunk, seen=None))


async def test_rows_have_their_tokens_and_scores_alone_and_together(device: TorchDevice) -> None:
    asks = [dataclasses_of(LOUD, logprobs=4), Sampling(logprobs=0), Sampling(temperature=1.0, seed=2)]
    texts = [random_ids(9, VOCAB, seed=place) for place in range(3)]
    pages = [tuple(range(1 + 5 * place, 6 + 5 * place)) for place in range(3)]

    async def begin() -> list[PrefillChunk]:
        return [
            chunk
            for place in range(3)
            for chunk in cut_prompt(texts[place], asks[place], slab=place, pages=pages[place])
        ]

    rows = [DecodeRow(1, place, 9, None, pages[place], asks[place]) for place in range(3)]
    first = await run(device, *await begin())
    together = await run(device, rows=tuple(rows))
    assert first.chunk_scores is not None and first.chunk_scores.rows.tolist() == [0, 1]
    assert together.row_scores is not None and together.row_scores.rows.tolist() == [0, 1]
    assert together.row_scores.counts.tolist() == [4, 0]
    for chunk in await begin():
        await run(device, chunk)
    alone = [await run(device, rows=(row,)) for row in rows]
    assert [result.row_tokens[0] for result in alone] == list(together.row_tokens)
    assert alone[2].row_scores is None
    for place in (0, 1):
        one = alone[place].row_scores
        assert one is not None
        assert one.logprobs[0] == together.row_scores.logprobs[place]
        assert one.places[0] == together.row_scores.places[place]
    assert alone[0].row_scores is not None
    np.testing.assert_array_equal(alone[0].row_scores.top_ids, together.row_scores.top_ids)
    np.testing.assert_array_equal(alone[0].row_scores.top_logprobs, together.row_scores.top_logprobs)


def dataclasses_of(sampling: Sampling, *, logprobs: int) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logprobs=logprobs,
    )


def check_scores(scores: Scores, logits: torch.Tensor, tokens: np.ndarray, tops: int) -> None:
    """Against the definition, by torch's own log-softmax."""
    wanted = logits.double().log_softmax(1).numpy()
    np.testing.assert_allclose(scores.logprobs, wanted[np.arange(len(tokens)), tokens], atol=1e-6)
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")
    np.testing.assert_array_equal(scores.top_ids.reshape(len(tokens), tops), order[:, :tops])
    places = [int(np.flatnonzero(line == token)[0]) + 1 for line, token in zip(order, tokens, strict=True)]
    assert scores.places.tolist() == places
    listed = np.take_along_axis(wanted, order[:, :tops], 1)
    np.testing.assert_allclose(scores.top_logprobs.reshape(len(tokens), tops), listed, atol=1e-6)


async def test_log_probabilities_are_of_the_distribution_before_processing(device: TorchDevice) -> None:
    ids = random_ids(12, VOCAB, seed=7)
    sampling = dataclasses_of(LOUD, logprobs=5)
    (chunk,) = cut_prompt(ids, sampling)
    result = await run(device, chunk)
    assert result.chunk_scores is not None
    check_scores(result.chunk_scores, whole_logits(device, ids)[-1:], np.array(result.chunk_tokens), 5)
    row = await run(device, rows=(DecodeRow(1, 0, 12, None, PAGES, sampling),))
    text = np.append(ids, result.chunk_tokens[0])
    assert row.row_scores is not None
    check_scores(row.row_scores, whole_logits(device, text)[-1:], np.array(row.row_tokens), 5)


@pytest.mark.parametrize("replay_rows", [0, 24])
async def test_a_prompt_is_scored_however_it_is_cut(checkpoint: Path, replay_rows: int) -> None:
    config = dataclasses.replace(config_for(checkpoint), replay_rows=replay_rows)
    device = await open_torch_device(config, ignore, poison=True)
    ids = random_ids(30, VOCAB, seed=9)
    found = []
    for size, generated in ((32, 0), (16, 0), (8, 7), (16, 13)):
        parts = []
        for chunk in cut_prompt(ids, Sampling(), size=size, generated=generated, tops=3):
            result = await run(device, chunk)
            parts += [scores for at, scores in result.target_scores if at == 0]
        rows = np.concatenate([part.rows for part in parts])
        np.testing.assert_array_equal(rows, np.arange(1, 30 - generated))
        found.append([np.concatenate([getattr(part, name) for part in parts]) for name in ("logprobs", "top_ids")])
    for logprobs, top_ids in found[1:]:
        np.testing.assert_array_equal(logprobs, found[0][0][: len(logprobs)])
        np.testing.assert_array_equal(top_ids, found[0][1][: len(top_ids)])
    logits = whole_logits(device, ids)[:-1]
    whole = score_tokens(logits, ids[1:], [3] * 29, np.arange(29))
    check_scores(whole, logits, ids[1:], 3)
    np.testing.assert_array_equal(found[0][0], whole.logprobs)
    await device.aclose()


async def test_a_pass_that_breaks_off_and_runs_again_counts_once(
    device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(12, VOCAB, seed=5)
    await complete(device, ids, LOUD, 3)
    rows = (DecodeRow(1, 0, 14, None, PAGES, LOUD),)
    arena, model = device.model.arena, device.model
    before = arena.slabs[0].clone()
    wanted = await run(device, rows=rows)
    counts = arena.counts[0].clone()
    arena.slabs[0] = before
    forward = model.forward

    def break_off(*arguments: object, **options: object) -> torch.Tensor:
        forward(*arguments, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(model, "forward", forward)
        raise ConnectionError("a member is lost")

    runner = StepRunner(model, device.info)
    progress = runner.begin(copy_plan(StepPlan(1, (), rows)))
    monkeypatch.setattr(model, "forward", break_off)
    with pytest.raises(ConnectionError):
        runner.run_next(progress, repeatable=True)
    runner.run_next(progress, repeatable=True)
    assert progress.row_tokens == tuple(wanted.row_tokens)
    assert torch.equal(arena.counts[0], counts)
    # The prompt's end makes its counts anew, so it may be repeated as often as it is.
    for _ in range(2):
        result = await run(device, *cut_prompt(ids, LOUD))
    once = count_ids(ids, 0, VOCAB)[None]
    add_tokens(once, np.array([0]), np.array(result.chunk_tokens))
    assert torch.equal(arena.counts[0], once[0])


def test_counts_tell_prompt_from_completion_and_stop_at_the_largest() -> None:
    ids = np.array([1, 2, 2, 3, 3, 4])
    counts = count_ids(ids, 3, 6)
    assert (counts.numpy().view(np.uint16) == [0, 0x8000, 0x8000, 2, 1, 0]).all()
    many = count_ids(np.full(40_000, 5), 40_000, 6)[None]
    assert int(many[0, 5]) == MOST
    add_tokens(many, np.array([0]), np.array([5]))
    assert int(many[0, 5]) == MOST
    both = count_ids(np.array([5, *[5] * MOST]), MOST, 6)[None]
    add_tokens(both, np.array([0]), np.array([5]))
    assert int(both[0, 5]) == -1


def test_counts_before_each_draft_have_the_drafts_before_it() -> None:
    line = count_ids(np.array([1, 2]), 1, 5)
    lines = count_drafts(line, [3, 3, 2])
    wanted = [line, *[count_ids(np.array([1, 2, *drafts]), 1 + len(drafts), 5) for drafts in ([3], [3, 3], [3, 3, 2])]]
    assert torch.equal(lines, torch.stack(wanted))


def test_of_equal_logits_the_lowest_id_is_the_likelier_one() -> None:
    logits = torch.zeros((3, 9))
    logits[:, 7] = logits[:, 2] = 1.0
    scores = score_tokens(logits, np.array([7, 0, 3]), [3, 0, 20], np.array([4, 5, 9]))
    assert scores.places.tolist() == [2, 3, 5] and scores.counts.tolist() == [3, 0, 9]
    assert scores.top_ids.tolist() == [2, 7, 0, 2, 7, 0, 1, 3, 4, 5, 6, 8]
    assert scores.rows.tolist() == [4, 5, 9] and scores.logprobs[0] == scores.top_logprobs[0]
    none = score_tokens(logits[:0], np.zeros(0, np.int64), [], np.zeros(0, np.int64))
    assert len(none.rows) == len(none.top_ids) == 0
