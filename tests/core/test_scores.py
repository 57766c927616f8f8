"""Log-probabilities on their way: columns keep their rows, and what is told of a token goes before the token."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from engine.core.decode import DecodeSide
from engine.core.effects import ToHead, ToPeer
from engine.core.plan import Scores, StepResult
from engine.core.prefill import PrefillSide
from engine.core.request import find_unfit_sampling
from engine.core.scores import PIECE_IDS, ScoreBuffer, find_score, keep_rows, split_prompt
from tests.core.test_cancel import EPOCH, IDS, LINK, NOTHING, sizes, told
from transport.messages import (
    Abort,
    LogprobsEmitted,
    PagesGranted,
    PagesPushed,
    PeerHello,
    PeerWelcome,
    PrefillCommitted,
    PromptScored,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ReservePages,
    Sampling,
    StartPrefill,
    Timings,
    TokenScored,
    TokensEmitted,
)
from transport.wire import BLOB_LIMITS

ASKS = Sampling(max_tokens=6, logprobs=2, prompt_logprobs=1)


def make_scores(rows: list[int], counts: list[int]) -> Scores:
    """Row r has logprob -r, place r + 1 and the likeliest ids 10 r, 10 r + 1, ..."""
    tops = [10 * row + at for row, count in zip(rows, counts, strict=True) for at in range(count)]
    return Scores(
        np.array(rows, np.int64),
        -np.array(rows, np.float32),
        np.array(rows, np.int32) + 1,
        np.array(counts, np.int32),
        np.array(tops, np.int32),
        -np.array(tops, np.float32),
    )


def rows_of(blob: bytes, rows: int, tops: int) -> list[tuple[int, int, int, float, int, list[int]]]:
    """(request, attempt, index, logprob, place, likeliest ids)."""
    requests = np.frombuffer(blob, "<i8", rows)
    attempts, indices, counts = (np.frombuffer(blob, "<i4", rows, at * rows) for at in (8, 12, 16))
    logprobs, places = np.frombuffer(blob, "<f4", rows, 20 * rows), np.frombuffer(blob, "<i4", rows, 24 * rows)
    ids, values = np.frombuffer(blob, "<i4", tops, 28 * rows), np.frombuffer(blob, "<f4", tops, 28 * rows + 4 * tops)
    assert (values == -ids).all()
    ends = counts.cumsum()
    return [
        (*(int(column[row]) for column in (requests, attempts, indices)), float(logprobs[row]), int(places[row]),
         ids[end - counts[row] : end].tolist())
        for row, end in enumerate(ends)
    ]  # fmt: skip


def test_rows_that_are_gone_take_their_columns_along() -> None:
    scores = make_scores([0, 2, 3, 6], [2, 0, 1, 3])
    kept = keep_rows(scores, np.array([1, 2, 3, 5, 6]))
    assert kept.rows.tolist() == [1, 2, 4]
    assert kept.logprobs.tolist() == [-2, -3, -6] and kept.places.tolist() == [3, 4, 7]
    assert kept.counts.tolist() == [0, 1, 3] and kept.top_ids.tolist() == [30, 60, 61, 62]
    assert not len(keep_rows(scores, np.array([], np.int64)).rows)


def test_one_score_is_found_by_its_row() -> None:
    scores = make_scores([1, 4], [2, 1])
    assert find_score(scores, 4) == TokenScored(-4.0, 5, (40,), (-40.0,))
    assert find_score(scores, 1) == TokenScored(-1.0, 2, (10, 11), (-10.0, -11.0))
    assert find_score(scores, 0) is find_score(scores, 5) is find_score(None, 1) is None


def test_a_frame_has_all_since_the_last_in_order() -> None:
    buffer = ScoreBuffer()
    assert buffer.take(1) is None
    buffer.add((7, 2), 5, TokenScored(-1.5, 3, (9,), (-9.0,)))
    columns = np.array([20, 21, 22]), np.array([1, 1, 3], np.int32), np.array([0, 4, 6], np.int32)
    buffer.extend(*columns, make_scores([0, 2], [0, 2]))
    buffer.extend(*columns, make_scores([], []))
    frame = buffer.take(8)
    assert frame is not None and frame[0] == LogprobsEmitted(8, 3, 3)
    assert rows_of(frame[1], 3, 3) == [(7, 2, 5, -1.5, 3, [9]), (20, 1, 0, 0.0, 1, []), (22, 3, 6, -2.0, 3, [20, 21])]
    assert buffer.take(9) is None


def test_a_long_prompt_is_told_in_pieces_that_fit() -> None:
    count = PIECE_IDS + 5
    columns = np.arange(1, count + 1)
    scores = Scores(
        columns,
        -columns.astype(np.float32),
        columns.astype(np.int32),
        np.full(count, 20, np.int32),
        np.arange(20 * count, dtype=np.int32),
        np.zeros(20 * count, np.float32),
    )
    pieces = list(split_prompt((3, 1), 9, scores))
    assert [(word.first, word.count, word.tops) for word, _ in pieces] == [(1, PIECE_IDS, 20), (1 + PIECE_IDS, 5, 20)]
    assert all(len(blob) <= BLOB_LIMITS[PromptScored] for _, blob in pieces)
    blob = pieces[1][1]
    assert np.frombuffer(blob, "<f4", 5).tolist() == (-columns[PIECE_IDS:]).tolist()
    assert np.frombuffer(blob, "<i4", 100, 40).tolist() == list(range(20 * PIECE_IDS, 20 * count))


def test_a_prefill_rank_tells_its_peer_of_each_chunk_and_of_the_first_token() -> None:
    side = PrefillSide(sizes())
    side.on_link_up(LINK, PeerWelcome(1, 1, 1, "x", 16, 2), 0)
    ids = memoryview(array("i", range(2, 2 + IDS)).tobytes())
    side.on_head(StartPrefill(1, 1, 1, 3, ASKS, 0), ids, 0)
    side.on_peer(LINK, PagesGranted(1, 1, EPOCH, 0, 5), memoryview(array("i", range(5)).tobytes()), 0)
    side.settle(0)
    targets = []
    for step, is_last in enumerate((False, False, True), 1):
        plan = side.plan(0)
        assert plan is not None
        chunk = plan.chunks[0]
        assert chunk.targets is not None and chunk.target_tops == 1 and chunk.seen is None
        targets.append(memoryview(chunk.targets).cast("B").cast("i").tolist())
        rows = list(range(chunk.start + 1, chunk.start + 1 + len(targets[-1])))
        scores = ((0, make_scores(rows, [1] * len(rows))),) if rows else ()
        first = make_scores([0], [2]) if is_last else None
        side.apply(StepResult(step, (9 if is_last else None,), (), 1, chunk_scores=first, target_scores=scores), 0)
    # Of 20 ids the last 3 are generated: 17 of the prompt, of which the first has nothing that predicts it.
    assert targets == [list(range(3, 11)), list(range(11, 19)), []]
    words = told(side.take_outbox(), ToPeer)
    assert [(word.first, word.count) for word in words if isinstance(word, PromptScored)] == [(1, 8), (9, 8)]
    for first, count in ((0, 2), (2, 2), (4, 1)):
        side.on_push_done((1, 1), first, count, 10, 1, 0)
    words = told(side.take_outbox(), ToPeer)
    assert isinstance(words[-1], PrefillCommitted)
    assert words[-1].first_scored == TokenScored(0.0, 1, (0, 1), (0.0, -1.0))


def decode_side(sampling: Sampling = ASKS) -> DecodeSide:
    side = DecodeSide(sizes())
    side.on_link_up(LINK, PeerHello(1, 0, 1, "x"), 0)
    side.on_head(ReservePages(1, 1, 0, IDS, 0, sampling), NOTHING, 0)
    side.settle(0)
    side.take_outbox()
    return side


def commit(side: DecodeSide, scored: TokenScored | None) -> None:
    side.on_peer(LINK, PagesPushed(1, EPOCH, 0, 5, 10), NOTHING, 0)
    side.on_peer(LINK, PrefillCommitted(1, EPOCH, IDS, 5, 9, 20, 2, 1, Timings(), scored), NOTHING, 0)


def test_a_decode_rank_tells_of_a_token_before_the_token() -> None:
    side = decode_side()
    word, blob = PromptScored(1, 1, EPOCH, 1, 1, 0), memoryview(bytes(8))
    side.on_peer(LINK, word, blob, 0)
    commit(side, TokenScored(-0.5, 1, (9, 4), (-9.0, -4.0)))
    effects = [effect for effect in side.take_outbox() if isinstance(effect, ToHead)]
    assert [type(effect.message) for effect in effects] == [
        PromptScored,
        RequestStarted,
        LogprobsEmitted,
        TokensEmitted,
    ]
    assert rows_of(effects[2].blob, 1, 2) == [(1, 1, 0, -0.5, 1, [9, 4])]
    for step in range(1, 6):
        assert side.plan(0) is not None
        side.apply(StepResult(step, (), (30 + step,), 1, row_scores=make_scores([0], [1])), 2)
        effects = [effect for effect in side.take_outbox() if isinstance(effect, ToHead)]
        kinds = [type(effect.message) for effect in effects]
        assert kinds == [LogprobsEmitted, TokensEmitted, *([RequestFinished] if step == 5 else [])]
        assert rows_of(effects[0].blob, 1, 1) == [(1, 1, step, 0.0, 1, [0])]


def test_scores_of_a_request_that_left_are_dropped_with_its_tokens() -> None:
    side = decode_side()
    commit(side, None)
    assert side.plan(0) is not None
    side.take_outbox()
    side.on_head(Abort(1, 1), NOTHING, 1)
    side.take_outbox()
    side.apply(StepResult(1, (), (30,), 1, row_scores=make_scores([0], [1])), 2)
    assert not told(side.take_outbox(), ToHead)


def test_whoever_does_not_ask_is_told_nothing() -> None:
    side = decode_side(Sampling(max_tokens=6))
    commit(side, None)
    assert [type(message) for message in told(side.take_outbox(), ToHead)] == [RequestStarted, TokensEmitted]
    side.plan(0)
    side.apply(StepResult(1, (), (30,), 1), 2)
    assert [type(message) for message in told(side.take_outbox(), ToHead)] == [TokensEmitted]


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling(bias_ids=(1, 2), biases=(0.5,)), "2 ids and 1 values"),
        (Sampling(bias_ids=(100,), biases=(0.5,)), "id 100 is outside the vocabulary (100 ids)"),
        (Sampling(bias_ids=(5, 6, 5), biases=(0.5, 1, 2)), "an id is there twice"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_both_ranks(sampling: Sampling, why: str) -> None:
    assert find_unfit_sampling(sampling, 100) is not None
    sides = PrefillSide(sizes()), DecodeSide(sizes())
    ids = memoryview(array("i", range(2, 2 + IDS)).tobytes())
    sides[0].on_head(StartPrefill(1, 1, 1, 0, sampling, 0), ids, 0)
    sides[1].on_head(ReservePages(1, 1, 0, IDS, 0, sampling), NOTHING, 0)
    for side in sides:
        (failed,) = told(side.take_outbox(), ToHead)
        assert isinstance(failed, RequestFailed) and failed.code == "bad_request" and not failed.retryable
        assert why in failed.message
