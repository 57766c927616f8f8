"""A cancel in every state of both sides of the hand-off: acknowledged each time; memory comes back the right way."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from engine.core.decode import DecodeSide
from engine.core.effects import Effect, ToHead, ToPeer
from engine.core.handoff import DecodePhase, PrefillPhase
from engine.core.pages import PageState
from engine.core.plan import StepResult
from engine.core.prefill import PrefillSide
from engine.core.schedule import SideSizes, StepLimits
from transport.messages import (
    Abort,
    EpochEnded,
    GrantRevoked,
    Message,
    PagesGranted,
    PagesPushed,
    PeerDown,
    PeerHello,
    PeerWelcome,
    PrefillCommitted,
    RequestAborted,
    RequestFailed,
    RequestStarted,
    ReservePages,
    Sampling,
    StartPrefill,
    Timings,
    TokensEmitted,
)

LINK, EPOCH, IDS = 5, 1, 20
ABORT, ACK = Abort(1, 1), RequestAborted(1, 1)
NOTHING = memoryview(b"")
SUM = 77


def sizes(num_pages: int = 8, *, checksums: bool = False) -> SideSizes:
    return SideSizes(
        rank=0,
        num_pages=num_pages,
        num_slabs=2,
        vocab_size=100,
        max_model_tokens=64,
        max_waiting=4,
        grant_us=1_000,
        quarantine_share=1.0,
        cap_us=1_000,
        room_us=1_000,
        step=StepLimits(chunk_tokens=8, page_tokens=4, rows=2, eos_ids=frozenset({1})),
        checksums=checksums,
    )


def told(effects: list[Effect], kind: type[ToHead] | type[ToPeer]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, kind)]


# ---------------------------------------------------------------- prefill


def prefill_in(phase: PrefillPhase) -> PrefillSide:
    """A prefill rank whose only request is in that state; NEW and CLOSED: it is not there (any more)."""
    side = PrefillSide(sizes(4 if phase is PrefillPhase.QUEUED else 8))
    side.on_link_up(LINK, PeerWelcome(1, 1, 1, "x", 16, 2), 0)
    if phase is PrefillPhase.QUEUED:
        assert side.arena.allocate(4) != ()  # somebody else has all the room
    ids = memoryview(array("i", range(2, 2 + IDS)).tobytes())
    if phase not in (PrefillPhase.NEW, PrefillPhase.GRANTED):
        room = 1 if phase is PrefillPhase.QUEUED else IDS
        side.on_head(StartPrefill(1, 1, 1, 0, Sampling(), 0), ids[: 4 * room], 0)
    if phase not in (PrefillPhase.NEW, PrefillPhase.STARTED):
        count = 1 if phase is PrefillPhase.QUEUED else 5
        pages = memoryview(array("i", range(count)).tobytes())
        side.on_peer(LINK, PagesGranted(1, 1, EPOCH, 0, count), pages, 0)
        side.settle(0)
    working = (PrefillPhase.WORKING, PrefillPhase.ENDING, PrefillPhase.ORPHANED, PrefillPhase.TAINTED)
    if phase in (*working, PrefillPhase.BURNT):
        for _ in range(2 if phase is not PrefillPhase.BURNT else 1):
            assert side.plan(0) is not None
        side.apply(StepResult(1, (None,), (), 1), 0)
    if phase is PrefillPhase.ENDING:
        side.on_peer(LINK, GrantRevoked(1, EPOCH), NOTHING, 0)
    elif phase is PrefillPhase.ORPHANED:
        side.on_link_lost(LINK)
    elif phase in (PrefillPhase.TAINTED, PrefillPhase.BURNT):
        side.on_push_failed((1, 1), "failed", "failed")
    elif phase is PrefillPhase.CLOSED:
        side.on_peer(LINK, GrantRevoked(1, EPOCH), NOTHING, 0)
    side.take_outbox()
    present = {prompt.phase for prompt in side.prompts.values()}
    assert present == (set() if phase in (PrefillPhase.NEW, PrefillPhase.CLOSED) else {phase})
    return side


@pytest.mark.parametrize("phase", PrefillPhase)
def test_a_cancel_in_any_state_of_a_prefill_rank(phase: PrefillPhase) -> None:
    side = prefill_in(phase)
    side.on_head(ABORT, NOTHING, 1)
    effects = side.take_outbox()
    assert told(effects, ToHead) == [ACK]
    # Nothing that is still written, or may yet land, is declared over by a cancel.
    unwritten = (PrefillPhase.GRANTED, PrefillPhase.QUEUED)
    assert told(effects, ToPeer) == ([EpochEnded(1, EPOCH)] if phase in unwritten else [])
    lasting = {
        PrefillPhase.WORKING: PrefillPhase.ENDING,
        **{
            same: same
            for same in (PrefillPhase.ENDING, PrefillPhase.ORPHANED, PrefillPhase.TAINTED, PrefillPhase.BURNT)
        },
    }
    assert [prompt.phase for prompt in side.prompts.values()] == ([lasting[phase]] if phase in lasting else [])
    if phase is not PrefillPhase.QUEUED:
        side.check()
    # A second cancel is acknowledged as well, whatever is left.
    side.on_head(ABORT, NOTHING, 2)
    assert told(side.take_outbox(), ToHead) == [ACK]


@pytest.mark.parametrize("phase", [PrefillPhase.WORKING, PrefillPhase.ENDING, PrefillPhase.ORPHANED])
def test_a_cancelled_prompt_ends_its_epoch_when_nothing_of_it_is_in_flight(phase: PrefillPhase) -> None:
    side = prefill_in(phase)
    side.on_head(ABORT, NOTHING, 1)
    side.take_outbox()
    side.apply(StepResult(2, (None,), (), 1), 2)
    assert told(side.take_outbox(), ToPeer) == [] and side.arena.pages.num_free < 8
    side.on_push_done((1, 1), 0, 2, 64, 1, 3)
    ended = [] if phase is PrefillPhase.ORPHANED else [EpochEnded(1, EPOCH)]
    assert told(side.take_outbox(), ToPeer) == ended
    assert side.arena.pages.num_free == 8 and not side.prompts


def test_a_prefill_rank_without_a_tokenizer_refuses_grammars_and_nothing_else() -> None:
    side = PrefillSide(dataclasses.replace(sizes(), why_no_grammar="tokenizer.json is gone"))
    side.on_link_up(LINK, PeerWelcome(1, 1, 1, "x", 16, 2), 0)
    ids = memoryview(array("i", [2, 3]).tobytes())
    side.on_head(StartPrefill(1, 1, 1, 0, Sampling(grammar='start: "a"'), 0), ids, 0)
    side.on_head(StartPrefill(2, 1, 1, 0, Sampling(), 0), ids, 0)
    (refusal,) = told(side.take_outbox(), ToHead)
    assert isinstance(refusal, RequestFailed) and (refusal.request, refusal.code) == (1, "bad_request")
    assert refusal.message == "no text can follow a grammar here: tokenizer.json is gone" and not refusal.retryable
    assert list(side.prompts) == [(2, 1)]


# ---------------------------------------------------------------- decode


def decode_in(phase: DecodePhase) -> DecodeSide:
    """The same for a decode rank."""
    side = DecodeSide(sizes(checksums=phase is DecodePhase.CHECKING))
    if phase is not DecodePhase.WAITING:
        side.on_link_up(LINK, PeerHello(1, 0, 1, "x"), 0)
    if phase is not DecodePhase.NEW:
        side.on_head(ReservePages(1, 1, 0, IDS, 0, Sampling(max_tokens=6)), NOTHING, 0)
        side.settle(0)
    if phase is DecodePhase.QUARANTINED:
        side.on_head(ABORT, NOTHING, 0)
    if phase in (DecodePhase.CHECKING, DecodePhase.RUNNING):
        side.on_peer(LINK, PagesPushed(1, EPOCH, 0, 3, 10, SUM), NOTHING, 0)
        side.on_peer(LINK, PagesPushed(1, EPOCH, 3, 2, 10, SUM), NOTHING, 0)
        side.on_peer(LINK, PrefillCommitted(1, EPOCH, IDS, 5, 9, 20, 2, 1, Timings()), NOTHING, 0)
    if phase is DecodePhase.RUNNING:
        assert side.plan(0) is not None
    if phase is DecodePhase.CLOSED:
        side.on_peer(LINK, EpochEnded(1, EPOCH), NOTHING, 0)
    side.take_outbox()
    present = {sequence.phase for sequence in side.sequences.values()}
    assert present == (set() if phase in (DecodePhase.NEW, DecodePhase.CLOSED) else {phase})
    return side


def states(side: DecodeSide) -> dict[str, int]:
    pages = side.arena.pages
    counts = {state.name: pages.count(state) for state in (PageState.GRANTED, PageState.QUARANTINED)}
    return {**counts, "FREE": pages.num_free}


@pytest.mark.parametrize("phase", DecodePhase)
def test_a_cancel_in_any_state_of_a_decode_rank(phase: DecodePhase) -> None:
    side = decode_in(phase)
    side.on_head(ABORT, NOTHING, 1)
    effects = side.take_outbox()
    assert told(effects, ToHead) == [ACK]
    assert told(effects, ToPeer) == ([GrantRevoked(1, EPOCH)] if phase is DecodePhase.GRANTED else [])
    side.check()
    if phase in (DecodePhase.GRANTED, DecodePhase.QUARANTINED):
        # Granted memory waits for its writer, whoever cancels how often.
        side.on_head(ABORT, NOTHING, 2)
        assert told(side.take_outbox(), ToHead) == [ACK]
        assert states(side) == {"GRANTED": 0, "QUARANTINED": 5, "FREE": 3}
        side.on_peer(LINK, EpochEnded(1, EPOCH), NOTHING, 3)
    elif phase is DecodePhase.CHECKING:
        # It is still read: free only when the reading has ended, and nothing is said of what it found.
        assert side.arena.pages.num_free == 1
        side.on_pages_read((1, 1), (SUM, SUM + 1))
        assert side.take_outbox() == []
    elif phase is DecodePhase.RUNNING:
        assert side.arena.pages.num_free == 1
        side.apply(StepResult(1, (), (30,), 1), 2)
        assert told(side.take_outbox(), ToHead) == []
    assert states(side) == {"GRANTED": 0, "QUARANTINED": 0, "FREE": 8} and not side.sequences
    side.check()


# ---------------------------------------------------------------- reading back


def test_sound_pages_run() -> None:
    side = decode_in(DecodePhase.CHECKING)
    assert side.plan(0) is None, "no step before the pages were read back"
    side.on_pages_read((1, 1), (SUM, SUM))
    assert [type(message) for message in told(side.take_outbox(), ToHead)] == [RequestStarted, TokensEmitted]
    assert side.plan(0) is not None and side.gauges().corrupt_pushes == 0


def test_corrupt_pages_fail_their_request_by_name_and_never_become_a_token() -> None:
    side = decode_in(DecodePhase.CHECKING)
    side.on_pages_read((1, 1), (SUM, SUM + 1))
    effects = side.take_outbox()
    (failed,) = told(effects, ToHead)
    assert isinstance(failed, RequestFailed) and failed.code == "kv_corrupt" and failed.retryable and failed.definite
    assert "pages [3, +2) that prefill rank 0 pushed for request 1" in failed.message
    assert side.plan(0) is None and side.gauges().corrupt_pushes == 1
    assert side.arena.pages.num_free == 8 and not side.sequences


def test_a_reading_that_does_not_end_fails_its_request_in_time_and_keeps_the_memory() -> None:
    side = decode_in(DecodePhase.CHECKING)
    assert side.next_deadline_us is not None
    side.expire(999)
    assert not told(side.take_outbox(), ToHead)
    side.expire(1_000)
    (failed,) = told(side.take_outbox(), ToHead)
    assert isinstance(failed, RequestFailed) and failed.code == "timeout" and "transfer_s" in failed.message
    assert side.arena.pages.num_free == 1
    side.on_pages_read((1, 1), (SUM, SUM))
    assert side.arena.pages.num_free == 8 and not told(side.take_outbox(), ToHead)


def test_the_writers_death_after_its_commit_changes_nothing() -> None:
    side = decode_in(DecodePhase.CHECKING)
    side.on_link_lost(LINK)
    side.on_head(PeerDown(0, 1), NOTHING, 1)
    side.on_pages_read((1, 1), (SUM, SUM))
    assert [type(message) for message in told(side.take_outbox(), ToHead)] == [RequestStarted, TokensEmitted]
