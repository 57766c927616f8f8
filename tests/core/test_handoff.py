"""The hand-off's tables: complete, honest about who broke the protocol, and safe by inspection."""

from __future__ import annotations

import pytest

from engine.core.handoff import (
    DECODE,
    PREFILL,
    Action,
    DecodeEvent,
    DecodePhase,
    PrefillEvent,
    PrefillPhase,
    diagram,
)
from engine.core.tables import Table
from engine.errors import LocalProtocolError, RemoteProtocolError

REMOTE = {
    *(PrefillEvent.START, PrefillEvent.GRANT, PrefillEvent.REVOKE),
    *(DecodeEvent.RESERVE, DecodeEvent.PUSHED, DecodeEvent.COMMIT, DecodeEvent.COMMIT_UNREAD),
    *(DecodeEvent.BAD_COMMIT, DecodeEvent.EPOCH_ENDED),
}
"""What a message of another process causes directly."""


@pytest.mark.parametrize("phase", PrefillPhase)
@pytest.mark.parametrize("event", PrefillEvent)
def test_every_prefill_pair_moves_or_raises(phase: PrefillPhase, event: PrefillEvent) -> None:
    if (phase, event) in PREFILL:
        assert PREFILL.follow(phase, event, "request 1") == PREFILL[(phase, event)]
    else:
        kind = RemoteProtocolError if event in REMOTE else LocalProtocolError
        with pytest.raises(kind, match="request 1"):
            PREFILL.follow(phase, event, "request 1")


@pytest.mark.parametrize("phase", DecodePhase)
@pytest.mark.parametrize("event", DecodeEvent)
def test_every_decode_pair_moves_or_raises(phase: DecodePhase, event: DecodeEvent) -> None:
    if (phase, event) in DECODE:
        assert DECODE.follow(phase, event, "request 1") == DECODE[(phase, event)]
    else:
        kind = RemoteProtocolError if event in REMOTE else LocalProtocolError
        with pytest.raises(kind, match="request 1"):
            DECODE.follow(phase, event, "request 1")


def test_quarantine_is_left_on_the_end_of_the_epoch_or_the_death_of_the_writer_only() -> None:
    leaving = {
        event
        for (phase, event), to in DECODE.items()
        if phase is DecodePhase.QUARANTINED and to.phase is not DecodePhase.QUARANTINED
    }
    assert leaving == {DecodeEvent.EPOCH_ENDED, DecodeEvent.COMMIT, DecodeEvent.PEER_DOWN}


def test_granted_memory_is_freed_at_once_only_if_the_writer_can_write_no_more() -> None:
    freeing = {
        event for (phase, event), to in DECODE.items() if phase is DecodePhase.GRANTED and Action.FREE in to.actions
    }
    assert freeing == {DecodeEvent.EPOCH_ENDED, DecodeEvent.PEER_DOWN}


def test_an_epoch_is_never_ended_by_word_while_memory_is_in_use_or_after_a_failed_write() -> None:
    for (phase, event), to in PREFILL.items():
        if Action.END_EPOCH in to.actions:
            assert phase in (PrefillPhase.GRANTED, PrefillPhase.QUEUED) or event is PrefillEvent.QUIET
            assert phase not in (PrefillPhase.TAINTED, PrefillPhase.BURNT)


@pytest.mark.parametrize("table", [PREFILL, DECODE])
def test_an_abort_is_acknowledged_in_every_state(table: Table) -> None:
    abort = PrefillEvent.ABORT if table is PREFILL else DecodeEvent.ABORT
    phases = {phase for phase, _ in table}
    new = {PrefillPhase.NEW, DecodePhase.NEW}
    assert {phase for phase, event in table if event is abort} == phases - new
    assert all(Action.ACK in to.actions for (_, event), to in table.items() if event is abort)


@pytest.mark.parametrize("table", [PREFILL, DECODE])
def test_every_state_is_reached_and_can_be_left(table: Table) -> None:
    reached = {to.phase for to in table.values()}
    left = {phase for (phase, _), to in table.items() if to.phase is not phase}
    names = {phase.value for phase in reached | left}
    assert {phase.value for phase in reached} == names - {"new"}
    assert {phase.value for phase in left} == names - {"closed"}


def test_the_diagram_draws_every_transition_once() -> None:
    arrows = [line for line in diagram().splitlines() if "-->" in line]
    assert len(arrows) == len(set(arrows)) == len(PREFILL) + len(DECODE)
    assert "    quarantined --> [*]: EpochEnded / free the memory" in arrows
