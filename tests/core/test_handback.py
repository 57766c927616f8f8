"""The hand-back: its tables, and both sides where the cluster seldom gets: bounds, stray words, deadlines."""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest

from engine.core.decode import DecodeSide
from engine.core.effects import Effect, StartPush, ToHead, ToPeer
from engine.core.handback import (
    GIVER,
    TAKER,
    Action,
    GiverEvent,
    GiverPhase,
    TakerEvent,
    TakerPhase,
    diagram,
)
from engine.core.pages import PageState
from engine.core.plan import StepResult
from engine.core.prefill import PrefillSide
from engine.core.recall import Recall, Told
from engine.core.request import Sequence
from engine.core.running import MOST_HISTORY, Running
from engine.core.schedule import HandBack, SideSizes, StepLimits
from engine.core.tables import Table
from engine.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import (
    Drain,
    EpochEnded,
    ForgetPrompts,
    GrantRevoked,
    Message,
    PagesGranted,
    PeerDown,
    PeerHello,
    PeerWelcome,
    ReservePages,
    Sampling,
    StartPrefill,
    TurnCommitted,
    TurnDeclined,
    TurnOffered,
    WriterOverdue,
)

REMOTE = {
    *(GiverEvent.DECLINED, GiverEvent.GRANT, GiverEvent.REVOKE),
    *(TakerEvent.OFFER, TakerEvent.REFUSE, TakerEvent.COMMIT, TakerEvent.COMMIT_UNREAD),
    *(TakerEvent.BAD_COMMIT, TakerEvent.EPOCH_ENDED),
}
"""What a message of another process causes directly."""

# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("phase", GiverPhase)
@pytest.mark.parametrize("event", GiverEvent)
def test_every_giver_pair_moves_or_raises(phase: GiverPhase, event: GiverEvent) -> None:
    check_pair(GIVER, phase, event)


@pytest.mark.parametrize("phase", TakerPhase)
@pytest.mark.parametrize("event", TakerEvent)
def test_every_taker_pair_moves_or_raises(phase: TakerPhase, event: TakerEvent) -> None:
    check_pair(TAKER, phase, event)


def check_pair(table: Table, phase, event) -> None:  # type: ignore[no-untyped-def]
    if (phase, event) in table:
        assert table.follow(phase, event, "turn 1") == table[(phase, event)]
    else:
        with pytest.raises(RemoteProtocolError if event in REMOTE else LocalProtocolError, match="turn 1"):
            table.follow(phase, event, "turn 1")


def test_quarantine_is_left_on_the_end_of_the_epoch_or_the_death_of_the_writer_only() -> None:
    leaving = {
        event
        for (phase, event), to in TAKER.items()
        if phase is TakerPhase.QUARANTINED and to.phase is not TakerPhase.QUARANTINED
    }
    assert leaving == {TakerEvent.EPOCH_ENDED, TakerEvent.COMMIT, TakerEvent.PEER_DOWN}
    freeing = {
        event for (phase, event), to in TAKER.items() if phase is TakerPhase.GRANTED and Action.FREE in to.actions
    }
    assert freeing == {TakerEvent.EPOCH_ENDED, TakerEvent.PEER_DOWN}


def test_an_epoch_is_ended_by_word_only_where_no_push_of_it_runs_or_may_land() -> None:
    over = {GiverEvent.PUSHED, GiverEvent.PUSH_VOID}
    for (phase, event), to in GIVER.items():
        if {Action.END_EPOCH, Action.COMMIT} & set(to.actions):
            assert event in over and phase in (GiverPhase.PUSHING, GiverPhase.ENDING)
        if phase is GiverPhase.BURNT:
            assert not to.actions


def test_memory_that_a_push_reads_is_free_when_that_is_over_and_not_before() -> None:
    pushing = (GiverPhase.PUSHING, GiverPhase.ENDING, GiverPhase.ORPHANED)
    over = {GiverEvent.PUSHED, GiverEvent.PUSH_VOID, GiverEvent.PUSH_FAILED}
    for (phase, event), to in GIVER.items():
        if phase in pushing:
            assert (Action.FREE in to.actions) == (event in over)


@pytest.mark.parametrize("table", [GIVER, TAKER])
def test_every_state_is_reached_and_can_be_left(table: Table) -> None:
    reached = {to.phase for to in table.values()}
    left = {phase for (phase, _), to in table.items() if to.phase is not phase}
    names = {phase.value for phase in reached | left}
    assert {phase.value for phase in reached} == names - {"new"}
    assert {phase.value for phase in left} == names - {"closed"}


def test_the_diagram_draws_every_transition_once() -> None:
    arrows = [line for line in diagram().splitlines() if "-->" in line]
    assert len(arrows) == len(set(arrows)) == len(GIVER) + len(TAKER)


# ---------------------------------------------------------------- a pair of sides

PAGE, EOS = 4, 1
PROMPT = [2, 3, 4, 5, 6, 7]
NOTHING = memoryview(b"")


def make_sizes(rank: int, **more: object) -> SideSizes:
    limits = StepLimits(chunk_tokens=16, page_tokens=PAGE, rows=4, eos_ids=frozenset({EOS}), prompts=2)
    fields: dict[str, object] = {
        "num_pages": 20, "num_slabs": 6, "hand_back": HandBack(tokens=2, share=0.5, wait_us=1_000), **more,
    }  # fmt: skip
    return SideSizes(
        rank=rank, vocab_size=30, max_model_tokens=200, max_waiting=10, grant_us=100_000, quarantine_share=1.0,
        cap_us=10_000, room_us=50_000, step=limits, prefix_cache=True, **fields,
    )  # type: ignore[arg-type]  # fmt: skip


class Duo:
    """One prefill and one decode rank with a link; words go over when told to, pushes end at once and well."""

    def __init__(self, *, prefill_pages: int = 20, **more: object) -> None:
        self.now_us = 1
        self.prefill = PrefillSide(make_sizes(0, **{**more, "num_pages": prefill_pages}))
        self.decode = DecodeSide(make_sizes(1, **more))
        self.decode_table = self.decode.sizes.num_pages, self.decode.sizes.num_slabs
        self.words: dict[str, list[ToPeer]] = {"prefill": [], "decode": []}
        self.pushes: list[StartPush] = []
        self.heads: list[Message] = []
        self.hello = PeerHello(1, 0, 1, "x", prefill_pages, self.prefill.sizes.num_slabs)
        self.link_up(1)

    def link_up(self, link: int) -> None:
        self.link = link
        self.decode.on_link_up(link, self.hello, self.now_us)
        self.prefill.on_link_up(link, PeerWelcome(1, 1, 1, "x", *self.decode_table), self.now_us)

    def collect(self) -> None:
        """Takes effects; everything of the hand-off goes over at once, what is of turns waits."""
        is_moving = True
        while is_moving:
            is_moving = False
            for name, side, other in (("prefill", self.prefill, self.decode), ("decode", self.decode, self.prefill)):
                side.settle(self.now_us)
                side.check()
                for effect in side.take_outbox():
                    is_moving = True
                    self.take(name, side, other, effect)

    def take(self, name: str, side: object, other: PrefillSide | DecodeSide, effect: Effect) -> None:
        match effect:
            case ToPeer(_, message, blob):
                if isinstance(message, TurnOffered | TurnDeclined | TurnCommitted) or self.is_of_turn(name, message):
                    self.words[name].append(effect)
                else:
                    other.on_peer(self.link, message, memoryview(blob), self.now_us)
            case StartPush():
                if name == "decode":
                    self.pushes.append(effect)
                else:
                    self.prefill.on_push_done(effect.key, effect.first, effect.count, 1, 1, self.now_us)
            case ToHead(message, _):
                self.heads.append(message)

    @staticmethod
    def is_of_turn(name: str, message: Message) -> bool:
        back = {"prefill": (PagesGranted, GrantRevoked), "decode": (EpochEnded,)}
        return isinstance(message, back[name])

    def deliver(self, name: str) -> Message:
        """The oldest word about turns of that side."""
        effect = self.words[name].pop(0)
        other = self.decode if name == "prefill" else self.prefill
        other.on_peer(self.link, effect.message, memoryview(effect.blob), self.now_us)
        self.collect()
        return effect.message

    def start(self, number: int, prompt: list[int], tokens: int, **sampling: object) -> None:
        ids, settings = array("i", prompt).tobytes(), Sampling(max_tokens=tokens, **sampling)  # type: ignore[arg-type]
        self.decode.on_head(ReservePages(number, 1, 0, len(prompt), 0, settings), NOTHING, self.now_us)
        self.prefill.on_head(StartPrefill(number, 1, 1, 0, settings, 0), memoryview(ids), self.now_us)
        self.collect()

    def compute(self, prompt: list[int], tokens: int, number: int = 1) -> None:
        """A request from its start to its last token, which are all 9."""
        self.start(number, prompt, tokens)
        self.run()

    def run(self) -> None:
        for side in (self.prefill, self.decode):
            while (plan := side.plan(self.now_us)) is not None:
                chunks = tuple(None if chunk.sample is None else 9 for chunk in plan.chunks)
                side.apply(StepResult(plan.step, chunks, tuple(9 for _ in plan.rows), 1), self.now_us)
                self.collect()

    def finish_push(self) -> None:
        self.decode.on_push_done(self.pushes.pop(0).key, 0, 1, 77, 1, self.now_us)
        self.collect()

    def counts(self) -> dict[str, int]:
        parts = (self.prefill.gauges().turns, self.decode.gauges().turns)
        names = parts[0].__struct_fields__
        return {name: n for name in names if (n := sum(getattr(part, name) for part in parts))}

    @property
    def cached(self) -> int:
        return self.prefill.arena.pages.count(PageState.CACHED)


def test_a_turn_becomes_a_cut_that_the_next_prompt_goes_on_from() -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    offer = duo.deliver("decode")
    # Six ids and six tokens, the last of which was no input; pages 1 and 2 of its three.
    assert offer == TurnOffered(1, 1, num_ids=11, num_pages=2)
    assert duo.decode.arena.pages.num_free == 18
    grant = duo.deliver("prefill")
    assert isinstance(grant, PagesGranted) and grant.num_pages == 2
    assert duo.pushes[0].slabs is not None and len(duo.pushes[0].pages) == 2
    duo.finish_push()
    assert duo.deliver("decode") == TurnCommitted(1, 1, 11, 2, 77)
    assert duo.counts() == {"offered": 1, "granted": 1, "kept": 1, "kept_pages": 2, "kept_bytes": 77}
    assert duo.decode.arena.pages.num_free == 20 and duo.decode.arena.slabs.num_free == 6
    # The prompt's open page is a page of its own, beside the turn's.
    assert duo.cached == 4 and duo.prefill.cache.num_cuts == 2
    again = [*PROMPT, 9, 9, 9, 9, 9, 9, 8, 8]
    duo.start(2, again, 3)
    plan = duo.prefill.plan(duo.now_us)
    assert plan is not None and plan.chunks[0].start == 11 and plan.chunks[0].base is not None


def test_where_the_last_token_is_an_end_one_step_more_may_have_written() -> None:
    duo = Duo()
    duo.start(1, PROMPT, 9)
    plan = duo.prefill.plan(duo.now_us)
    assert plan is not None
    duo.prefill.apply(StepResult(plan.step, (9,), (), 1), duo.now_us)
    duo.collect()
    plans = [duo.decode.plan(duo.now_us), duo.decode.plan(duo.now_us)]
    assert plans[0] is not None and plans[1] is not None
    duo.decode.apply(StepResult(plans[0].step, (), (EOS,), 1), duo.now_us)
    duo.collect()
    assert not duo.words["decode"]  # a step still names it
    duo.decode.apply(StepResult(plans[1].step, (), (5,), 1), duo.now_us)
    duo.collect()
    effect = duo.words["decode"][0]
    assert effect.message == TurnOffered(1, 1, num_ids=7, num_pages=1)
    assert array("i", effect.blob).tolist() == [9, EOS]


def test_short_turns_and_cancelled_ones_stay() -> None:
    duo = Duo()
    duo.compute(PROMPT, 1)
    assert duo.counts() == {}
    duo = Duo(hand_back=HandBack(tokens=5, share=0.5, wait_us=1_000))
    duo.compute(PROMPT, 4)
    assert duo.counts() == {} and duo.decode.arena.pages.num_free == 20
    duo.compute([5, *PROMPT], 5, number=2)
    assert duo.counts() == {"offered": 1}
    off = Duo(hand_back=None)
    off.compute(PROMPT, 6)
    assert off.counts() == {} and off.decode.arena.pages.num_free == 20


def test_an_offer_goes_when_a_request_needs_its_memory() -> None:
    duo = Duo(num_slabs=2)
    duo.compute(PROMPT, 6)
    assert duo.counts() == {"offered": 1} and duo.decode.arena.slabs.num_free == 1
    duo.start(2, [7, *PROMPT], 2)
    assert duo.counts() == {"offered": 1}
    duo.start(3, [8, *PROMPT], 2)
    assert duo.counts() == {"offered": 1, "withdrawn": 1}
    assert duo.decode.arena.slabs.num_free == 0
    # The offer and the grant for it were on their way.
    duo.deliver("decode")
    if isinstance(duo.deliver("prefill"), PagesGranted):
        ended = duo.deliver("decode")
        assert isinstance(ended, EpochEnded)
    assert duo.prefill.arena.pages.count(PageState.GRANTED) == 0


def test_an_offer_without_an_answer_goes_after_its_time() -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    assert duo.decode.next_deadline_us == 1_001
    duo.decode.expire(1_000)
    assert duo.counts() == {"offered": 1}
    duo.decode.expire(1_001)
    assert duo.counts() == {"offered": 1, "withdrawn": 1} and duo.decode.next_deadline_us is None
    duo.deliver("decode")
    duo.deliver("prefill")
    assert duo.prefill.arena.pages.count(PageState.GRANTED) == 2
    duo.deliver("decode")
    assert duo.prefill.arena.pages.count(PageState.GRANTED) == 0 and duo.prefill.taker.is_quiet


def test_a_share_of_the_memory_bounds_what_is_under_way() -> None:
    duo = Duo(hand_back=HandBack(tokens=2, share=0.2, wait_us=1_000))  # 4 pages, 1 slab
    duo.compute(PROMPT, 6)
    duo.compute([7, *PROMPT], 6, number=2)
    assert duo.counts() == {"offered": 1}
    long = Duo(hand_back=HandBack(tokens=2, share=0.2, wait_us=1_000))
    long.compute(PROMPT, 20)
    assert long.counts() == {} and long.decode.arena.pages.num_free == 20
    # The prefill rank has bounds of its own.
    duo.deliver("decode")
    duo.deliver("prefill")
    duo.finish_push()
    duo.compute([8, *PROMPT], 6, number=3)
    duo.words["decode"].reverse()
    duo.deliver("decode")  # the third's offer, while the first is not committed
    declined = duo.words["prefill"][-1].message
    assert declined == TurnDeclined(3, 1, reason="full")
    duo.deliver("prefill")
    assert duo.counts()["declined"] == duo.counts()["full"] == 1


@pytest.mark.parametrize("does_repeat", [True, False])
def test_where_slabs_are_short_the_cut_goes_that_next_turns_do_not_use(does_repeat: bool) -> None:
    """Whether prompts repeat answers as they were generated, or leave out a part."""
    duo = Duo(num_slabs=8, num_pages=100, prefill_pages=100)

    def have_turn(number: int, prompt: list[int]) -> None:
        duo.compute(prompt, 6, number=number)
        while duo.words["decode"] or duo.words["prefill"] or duo.pushes:
            if duo.pushes:
                duo.finish_push()
            else:
                duo.deliver("decode" if duo.words["decode"] else "prefill")

    said = [9] * 6 if does_repeat else []
    for number in range(12):
        have_turn(2 * number, [2, 2 + number, *PROMPT])
        have_turn(2 * number + 1, [2, 2 + number, *PROMPT, *said, 8])
    before = duo.prefill.gauges().prefix
    for number in range(5):  # five conversations leave ten cuts, and there are eight slabs
        have_turn(100 + number, [3, 2 + number, *PROMPT])
    for number in range(5):
        have_turn(200 + number, [3, 2 + number, *PROMPT, *said, 8])
    after = duo.prefill.gauges().prefix
    assert after.hit - before.hit == (5 * 13 if does_repeat else 5 * 8)


@pytest.mark.parametrize("what", ["forgotten", "twice", "draining"])
def test_turns_are_declined_with_the_reason(what: str) -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    if what == "forgotten":
        duo.prefill.on_head(ForgetPrompts(), NOTHING, duo.now_us)
    elif what == "draining":
        duo.prefill.on_head(Drain(), NOTHING, duo.now_us)
    else:
        duo.deliver("decode")
        duo.deliver("prefill")
        duo.finish_push()
        duo.deliver("decode")
        duo.compute(PROMPT, 6, number=2)
    duo.deliver("decode")
    reason = {"forgotten": "gone", "twice": "known", "draining": "draining"}[what]
    assert duo.deliver("prefill").reason == reason  # type: ignore[attr-defined]
    assert duo.decode.arena.pages.num_free == 20 and duo.counts()["declined"] == 1


def test_a_prompt_that_waits_for_room_has_the_grant_revoked_and_the_word_frees_it() -> None:
    duo = Duo(prefill_pages=8)
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    duo.deliver("prefill")
    assert duo.prefill.arena.pages.count(PageState.GRANTED) == 2
    duo.start(2, list(range(2, 29)), 2)  # seven pages
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 2
    assert isinstance(duo.deliver("prefill"), GrantRevoked)
    assert not duo.words["decode"]  # the push runs
    duo.finish_push()
    assert isinstance(duo.deliver("decode"), EpochEnded)
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 0 and duo.prefill.schedule.prompts
    assert duo.counts()["failed"] == 1


def test_where_the_word_does_not_come_the_writer_is_accused() -> None:
    duo = Duo(prefill_pages=8)
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    duo.deliver("prefill")
    duo.decode.on_push_failed((1, 1), "failed", "failed")  # may land yet, so no word ends it
    duo.start(2, list(range(2, 29)), 2)
    duo.deliver("prefill")
    assert not duo.words["decode"]
    duo.now_us += 50_001
    duo.collect()
    assert [word for word in duo.heads if isinstance(word, WriterOverdue)] == [WriterOverdue(1, 1, 2)]
    duo.prefill.on_head(PeerDown(1, 1), NOTHING, duo.now_us)
    duo.collect()
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 0
    # No more turns go to a life that a write to it failed.
    assert duo.decode.giver._broken == {(0, 1)}


def test_a_push_that_does_not_end_costs_its_target_where_a_request_needs_the_room() -> None:
    duo = Duo(num_slabs=3)
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    assert isinstance(duo.deliver("prefill"), PagesGranted)
    duo.decode.on_push_failed((1, 1), "late", "overdue")
    for number in (2, 3, 4):
        duo.decode.on_head(ReservePages(number, 1, 0, 6, 0, Sampling(max_tokens=2)), NOTHING, duo.now_us)
        duo.decode.settle(duo.now_us)
    words = [effect.message for effect in duo.decode.take_outbox() if isinstance(effect, ToHead)]
    assert words == [WriterOverdue(0, 1, 2)]
    duo.decode.settle(duo.now_us)
    assert not [effect for effect in duo.decode.take_outbox() if isinstance(effect, ToHead)]
    duo.decode.on_push_failed((1, 1), "the peer was forgotten", "failed")
    duo.decode.on_head(PeerDown(0, 1), NOTHING, duo.now_us)
    duo.decode.check()
    assert duo.decode.giver.is_quiet


def test_a_grant_that_is_never_committed_goes_to_quarantine() -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    assert duo.prefill.next_deadline_us == 100_001
    duo.prefill.expire(100_001)
    duo.collect()
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 2


def test_a_broken_link_ends_the_turn_and_the_new_one_asks_for_its_end() -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    duo.deliver("prefill")
    for side in (duo.prefill, duo.decode):
        side.on_link_lost(1)
        side.check()
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 2
    duo.link_up(2)
    duo.collect()
    assert isinstance(duo.deliver("prefill"), GrantRevoked)
    duo.finish_push()
    assert isinstance(duo.deliver("decode"), EpochEnded)
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 0
    assert duo.prefill.cache.num_cuts == 1


def test_a_commit_with_wrong_counts_is_not_believed() -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    word = TurnCommitted(1, 1, 12, 2, 77)
    duo.prefill.on_peer(1, word, NOTHING, duo.now_us)
    assert duo.prefill.arena.pages.count(PageState.QUARANTINED) == 2 and duo.counts().get("kept") is None


@pytest.mark.parametrize(
    ("name", "word", "blob", "why"),
    [
        ("decode", TurnCommitted(1, 5, 11, 2, 77), b"", "epoch 5 is not granted"),
        ("decode", EpochEnded(1, 5), b"", "never granted"),
        ("decode", TurnOffered(7, 1, 11, 2), b"", "0 bytes of ids"),
        ("decode", TurnOffered(7, 1, 11, 2), array("i", [9, 99]).tobytes(), "8 bytes of ids"),
        ("decode", TurnOffered(1, 1, 12, 2), array("i", [9] * 6).tobytes(), "they are 11 and 2"),
        ("prefill", PagesGranted(1, 1, 9, 0, 1), array("i", [3]).tobytes(), "1 pages and slab 0 granted"),
        ("prefill", PagesGranted(1, 1, 9, 0, 2), array("i", [3, 20]).tobytes(), "the peer has 20"),
        ("prefill", PagesGranted(1, 1, 9, 6, 2), array("i", [3, 4]).tobytes(), "slab 6"),
    ],
)
def test_who_breaks_the_protocol_loses_the_link(name: str, word: Message, blob: bytes, why: str) -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    other = duo.decode if name == "prefill" else duo.prefill
    with pytest.raises(RemoteProtocolError, match=why):
        other.on_peer(1, word, memoryview(blob), duo.now_us)
    other.check()


def test_a_second_grant_of_a_turn_breaks_the_protocol() -> None:
    duo = Duo()
    duo.compute(PROMPT, 6)
    duo.deliver("decode")
    duo.deliver("prefill")
    with pytest.raises(RemoteProtocolError, match="in state pushing"):
        duo.decode.on_peer(1, PagesGranted(1, 1, 2, 0, 2), memoryview(array("i", [3, 4]).tobytes()), duo.now_us)
    duo.finish_push()
    assert duo.deliver("decode") == TurnCommitted(1, 1, 11, 2, 77)


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(("beyond", "drafts", "is_worth"), [(0, 0, True), (4, 3, True), (5, 3, False)])
def test_a_slab_that_was_written_too_far_behind_the_end_stays(beyond: int, drafts: int, is_worth: bool) -> None:
    sizes = make_sizes(1)
    side = DecodeSide(dataclasses.replace(sizes, step=dataclasses.replace(sizes.step, drafts=drafts)))
    sequence = Sequence((1, 1), ReservePages(1, 1, 0, 6, 0, Sampling()), 9, 0, 0)
    sequence.reason, sequence.history, sequence.beyond, sequence.steps = "stop", bytes(40), beyond, 1
    assert side.giver.is_worth(sequence) is is_worth


def test_tokens_are_those_up_to_the_end_and_what_lies_beyond_it_is_counted() -> None:
    duo = Duo()
    sizes = duo.decode.sizes
    drafting = dataclasses.replace(sizes.step, drafts=3, draft_rows=4)
    duo.decode = DecodeSide(dataclasses.replace(sizes, step=drafting))
    duo.link_up(2)
    duo.start(1, PROMPT, 30)
    plan = duo.prefill.plan(duo.now_us)
    assert plan is not None
    duo.prefill.apply(StepResult(plan.step, (9,), (), 1), duo.now_us)
    duo.collect()
    for tokens in ((5, 6, 7, 8), (5, EOS, 6, 7)):
        plan = duo.decode.plan(duo.now_us)
        assert plan is not None
        result = StepResult(plan.step, (), tokens, 1, row_counts=(4,), row_proposed=(3,))
        (sequence,) = duo.decode.sequences.values()
        duo.decode.apply(result, duo.now_us)
        duo.collect()
    assert sequence.beyond == 2
    assert array("i", sequence.history).tolist() == [9, 5, 6, 7, 8, 5, EOS]
    offer = duo.words["decode"][0].message
    assert isinstance(offer, TurnOffered) and offer.num_ids == len(PROMPT) + 6


def test_prompts_are_recalled_once_and_within_bounds() -> None:
    recall = Recall(most_prompts=3, most_bytes=100)
    for number in range(5):
        recall.add((number, 1), Told(bytes(8), []))
    assert len(recall) == 3 and recall.take((1, 1)) is None
    assert recall.take((4, 1)) is not None and recall.take((4, 1)) is None
    recall.add((9, 1), Told(bytes(90), []))
    assert len(recall) == 2 and recall.num_bytes == 98
    recall.clear()
    assert (len(recall), recall.num_bytes) == (0, 0)


def test_a_completion_is_remembered_up_to_a_bound() -> None:
    running = Running(remembers=True)
    slots = running._free[-1:]
    for count in range(MOST_HISTORY + 10):
        running._note(np.array(slots), np.array([count]), np.array([count % 1000], np.int32))
        running._count[slots] = count + 1
    assert running._history is not None and running._history.shape[1] == MOST_HISTORY + 1
    assert running._history[slots[0], :MOST_HISTORY].tolist() == [at % 1000 for at in range(MOST_HISTORY)]
