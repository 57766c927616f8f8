"""However tokens come in turns, a choice shows the same text, and never more than is settled."""

from __future__ import annotations

import array

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.actors.told import Told
from engine.faces.stops import StopSearch
from engine.front.ask import Ask
from engine.front.choice import Choice
from tests.front.rig import ids_of, served
from transport.messages import Sampling

CODEC = served().codec
TOKENS = st.lists(
    st.sampled_from([*ids_of("wörld 🌍 stop the end </thi"), *ids_of("</think>"), CODEC.named_id("</think>")])
    | st.integers(2, CODEC.vocab_size - 1),
    max_size=24,
)  # fmt: skip
STOPS = st.lists(st.sampled_from(["stop", "the end", "ö", "🌍 s", "</think>", "p t"]), max_size=2)


def whole(ids: list[int], stops: list[str]) -> tuple[str, int | None]:
    """The text of all ids by the parts that batches use, and how many ids it took if a stop string ended it."""
    search, detokenizer, text = StopSearch(stops), CODEC.detokenizer(), ""
    for count, token in enumerate(ids, 1):
        text += search.push(detokenizer.push((token,)))
        if search.matched is not None:
            return text, count
    text += search.push(detokenizer.finish())
    return (text, len(ids)) if search.matched is not None else (text + search.finish(), None)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(ids=TOKENS, stops=STOPS, cuts=st.lists(st.integers(1, 5), min_size=24, max_size=24), thinking=st.booleans(),
       ends=st.booleans(), takes=st.lists(st.booleans(), min_size=24, max_size=24))  # fmt: skip
def test_turns_do_not_matter(ids, stops, cuts, thinking, ends, takes):
    ask = Ask(b"\0\0\0\0", Sampling(max_tokens=100, logprobs=0), "", None)
    choice = Choice(0, ask, CODEC, stops=stops, skip_special=True, thinking=thinking, wants_scores=True)
    expected, stopped_at = whole(ids, stops)
    texts, thoughts, told = [], [], []

    def take() -> None:
        text, thought = choice.take_text()
        texts.append(text)
        thoughts.append(thought)
        told.extend(choice.take_scores()[0])

    rest, ended = list(ids), False
    for cut, takes_now in zip(cuts, takes, strict=True):
        turn, rest = rest[:cut], rest[cut:]
        ask.generated.extend(turn)
        _score(ask, len(turn))
        ended = choice.feed()
        if takes_now:
            take()
        if ended:
            break
    if not ended:
        if ends:
            ask.generated.append(CODEC.eos_id)
            _score(ask, 1)
            choice.feed()
        choice.finish("stop" if ends else "length")
    take()
    thought, text = "".join(thoughts), "".join(texts)
    if thinking:
        before, mark, after = expected.partition("</think>")
        assert (thought, text) == (before, after if mark else "")
    else:
        assert (thought, text) == ("", expected)
    if stopped_at is not None:
        assert choice.reason == "stop" and choice.tokens == stopped_at
    else:
        assert choice.tokens == len(ids) + ends and told == ids
    assert told == ids[: len(told)]


def _score(ask: Ask, count: int) -> None:
    told = ask.told = ask.told or Told()
    told.logprobs.extend([-1.0] * count)
    told.places.extend([1] * count)
    told.counts.extend([0] * count)


def test_ids_that_end_a_text_count_only_once_enough_are_there():
    eos, other = CODEC.eos_id, ids_of("x")[0]
    for sampling, ids, text in (
        (Sampling(max_tokens=9), [other, eos], "x"),
        (Sampling(max_tokens=9, stop_ids=(other,)), [other], ""),
        (Sampling(max_tokens=9, stop_ids=(other,), min_tokens=2), [other, other], "x"),
        (Sampling(max_tokens=9, ignore_eos=True), [eos, other], "x"),
    ):
        ask = Ask(b"\0\0\0\0", sampling, "", None, generated=array.array("i", ids))
        choice = Choice(0, ask, CODEC, stops=(), skip_special=True, thinking=False, wants_scores=False)
        choice.feed()
        choice.finish("stop")
        assert choice.take_text() == (text, "") and choice.tokens == len(ids)
