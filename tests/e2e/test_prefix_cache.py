"""Conversations over HTTP with real ranks: the same texts with the prefix cache and without, and what it spares."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from tests.cli.test_commands import engine
from tests.e2e.prompts import random_ids
from tests.e2e.talker import Engine, Talk, common, running
from transport.nixl_fabric import is_available

FABRIC = "fabric=auto" if is_available() else "fabric=tcp"
COMMON = (FABRIC, "num_slabs=40", "max_model_tokens=2048", "limits.decode_rows=8")
SYSTEM = (
    "You are a careful assistant in a repository of programs. You read files before you change them, you say what you"
    " are going to do, and you run the tests afterwards. Answers are short. Files are named with their folders. Never"
    " invent a name of a function: look for it first. When a test fails, say which one and why before you repair it. "
) * 2
WORDS = [
    "List the files of the folder and say what each of them owns.",
    "Read the first one. " + "It says that a page holds so many tokens of each family, one plane after another. " * 4,
    "Now run the tests of that folder, and tell me which of them fail.",
    "Repair it, and say what was wrong with the order of the two calls that you found there.",
    "Thank you. Write one line for the change log, in the words that the others have.",
]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("cold"), *COMMON, "num_pages=100", "prefix_cache.enabled=false") as started:
        yield started


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("warm"), *COMMON, "num_pages=400") as started:
        yield started


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("two"), *COMMON, "num_pages=200", "pools.prefill.ranks=2") as started:
        yield started


def begin(name: str) -> Talk:
    return Talk(name, [{"role": "system", "content": SYSTEM}])


def check_cached(talk: Talk) -> None:
    """Every turn after the first begins with the whole prompt of the one before, and that was not computed again."""
    for before, turn in zip(talk.turns, talk.turns[1:], strict=False):
        assert common(before.prompt, turn.prompt) == len(before.prompt)
        assert turn.cached == len(before.prompt), talk.name


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2}])
def test_turns_have_the_texts_that_they_have_without_a_cache(
    cold: Engine, warm: Engine, sampling: dict[str, float]
) -> None:
    name = f"talk {len(sampling)}"
    talks = {place: begin(name) for place in (cold, warm)}
    for words in WORDS:
        turns = [talk.say(place, words, cache_salt=name, **sampling) for place, talk in talks.items()]
        assert turns[0].ids == turns[1].ids and turns[0].prompt == turns[1].prompt
        assert turns[0].cached == 0
    check_cached(talks[warm])
    assert len(talks[warm].turns[-1].prompt) > 350
    if not sampling:
        done = engine("cache", "reset", "--yes", "--dir", warm.directory)
        assert done.returncode == 0 and "1 prefill ranks give up" in done.stdout, done.stderr
        turns = [talk.say(place, "And now?", cache_salt=name) for place, talk in talks.items()]
        assert turns[0].ids == turns[1].ids and turns[1].cached == 0
    # Another salt shares nothing, though it says the same.
    stranger = begin(name)
    assert stranger.say(warm, WORDS[0], cache_salt="x" + name, **sampling).cached == 0


def test_few_pages_cost_hits_and_no_text(cold: Engine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Four conversations whose prompts do not fit together, in turns."""
    settings = (FABRIC, "max_model_tokens=1024", "num_pages=20", "num_slabs=6", "limits.decode_rows=2")
    with running(tmp_path_factory.mktemp("few"), *settings) as few:
        talks = {place: [begin(f"few {at}") for at in range(4)] for place in (cold, few)}
        for at in range(4):
            for place in talks:
                talks[place][at].messages[0]["content"] = f"{at}. {SYSTEM}"
        for words in WORDS[:4]:
            for at in range(4):
                turns = [talks[place][at].say(place, words) for place in (cold, few)]
                assert turns[0].ids == turns[1].ids
        hits = [turn.cached for talk in talks[few] for turn in talk.turns]
        assert few.await_metric("engine:prefix_cache_evicted_pages_total", 1) > 0
        few.await_idle()
        for rank in few.ranks().values():
            snapshot = rank["snapshot"]
            assert snapshot["pages_free"] + snapshot["pages_cached"] == snapshot["pages_total"] == 20
        # Who says two turns in a row finds the first of them, whatever had to go for it.
        talk = talks[few][0]
        turn = talk.say(few, "And now?")
        again = talk.say(few, "And now?")
        assert again.cached == len(turn.prompt)
        assert sum(hits) < sum(len(turn.prompt) for talk in talks[few] for turn in talk.turns[:-1])


def test_conversations_stay_with_their_rank_and_outlive_it(cold: Engine, two: Engine) -> None:
    talks = {place: [begin(f"two {at}") for at in range(4)] for place in (cold, two)}
    for place in talks:
        for at, talk in enumerate(talks[place]):
            talk.messages[0]["content"] = f"{at}. {SYSTEM}"

    def say(at: int, words: str):  # type: ignore[no-untyped-def]
        turns = [talks[place][at].say(place, words) for place in (cold, two)]
        assert turns[0].ids == turns[1].ids
        return turns[1]

    for words in WORDS[:2]:
        for at in range(4):
            say(at, words)
    for talk in talks[two]:
        assert len({turn.prefill for turn in talk.turns}) == 1
        check_cached(talk)
    # Killed between turns: the next one is computed anew, by whoever is there, and the one after finds that.
    talk = talks[two][0]
    lost = talk.turns[0].prefill
    generation = two.ranks()[lost]["generation"]
    os.kill(two.ranks()[lost]["pid"], signal.SIGKILL)
    two.wait(rf"rank\.start rank={lost} .*generation=({generation + 1})")
    colder, after = say(0, WORDS[2]), say(0, WORDS[3])
    assert colder.cached < len(talk.turns[1].prompt)
    assert (after.cached, after.prefill) == (len(colder.prompt), colder.prefill)
    # Drained between turns: they go elsewhere, and come back to nothing that they had there before.
    two.wait(rf"rank\.ready rank={lost} .*generation=({generation + 1})")
    done = engine("drain", str(after.prefill), "--yes", "--dir", two.directory)
    assert done.returncode == 0, done.stderr
    moved = say(0, WORDS[4])
    assert moved.prefill != after.prefill and moved.cached < len(after.prompt)
    again = say(0, "And now?")
    assert (again.prefill, again.cached) == (moved.prefill, len(moved.prompt))
    assert engine("undrain", str(after.prefill), "--yes", "--dir", two.directory).returncode == 0
    assert say(0, "And then?").prefill == moved.prefill


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    settings = (*COMMON, "num_pages=400", "prefix_cache.hand_back_tokens=2")
    with running(tmp_path_factory.mktemp("back"), *settings) as started:
        yield started


@pytest.mark.parametrize("hands_back", [False, True], ids=["prompts", "answers"])
def test_what_could_be_spared_is_spared(request: pytest.FixtureRequest, hands_back: bool) -> None:
    """Eight agents of one kind, six turns each, one after the other: prompts that grow by what a tool said. Their short
    answers stay on decode ranks, or are handed back."""
    engine: Engine = request.getfixturevalue("back" if hands_back else "warm")
    rng = random.Random(7)
    names = (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "engine:prefix_hit_possible_tokens_total",
    )
    before = [engine.metric(name) for name in names]
    system = random_ids(rng, 200)
    prompts = [[*system, *random_ids(rng, 30)] for _ in range(8)]
    sent: list[list[int]] = []
    seen: list[list[int]] = []
    asked = served = by_prompts = by_all = 0
    for _ in range(6):
        for at, prompt in enumerate(prompts):
            body = {
                "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "seed": 3, "return_token_ids": True,
            }  # fmt: skip
            answer, _ = engine.post("/v1/completions", body, X_Session_ID=f"agent {at}")
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            most = len(prompt) - 1
            possible = min(most, max((common(prompt, other) for other in sent), default=0))
            possible_of_all = min(most, max((common(prompt, other) for other in seen), default=0))
            assert cached <= (possible_of_all if hands_back else possible)
            asked, served, by_prompts = asked + len(prompt), served + cached, by_prompts + possible
            by_all += possible_of_all
            told = answer["choices"][0]["token_ids"]
            sent.append(prompt)
            seen.append([*prompt, *told])
            prompts[at] = [*prompt, *told, *random_ids(rng, rng.choice([10, 40, 120]))]
    print(
        f"{asked} ids asked, {served} served; {served / by_prompts:.4f} of what prompts held,"
        f" {served / by_all:.4f} of what prompts and answers held"
    )
    assert served / by_prompts >= (1.0 if hands_back else 0.97)
    assert served / by_all >= (0.97 if hands_back else 0.9)
    engine.await_metric(names[0], before[0] + asked)
    after = [engine.metric(name) for name in names]
    queried, hit, possible_by_pages = (b - a for a, b in zip(before, after, strict=True))
    assert (queried, hit) == (asked, served)
    assert served <= possible_by_pages <= (by_all if hands_back else by_prompts)
