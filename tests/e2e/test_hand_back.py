"""Turns that are handed back, by real ranks over the real fabric: what the next turn spares, what deaths leave."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.e2e.prompts import random_ids
from tests.e2e.talker import Engine, running
from transport.nixl_fabric import is_available

FABRIC = "fabric=auto" if is_available() else "fabric=tcp"
COMMON = (FABRIC, "num_slabs=20", "num_pages=100", "max_model_tokens=1024", "limits.decode_rows=4")
PAGES = "engine:hand_back_pages_total"


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("cold"), *COMMON, "prefix_cache.enabled=false") as started:
        yield started


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # A stopped rank is to be found by nobody, and deaths are on purpose.
    settings = (*COMMON, "prefix_cache.hand_back_tokens=2", "limits.heartbeat_s=20", "limits.restarts=100")
    with running(tmp_path_factory.mktemp("warm"), *settings) as started:
        yield started


def say(engine: Engine, prompt: list[int], tokens: int, **fields: object) -> tuple[list[int], int]:
    """The tokens, and ids of the prompt that were cached."""
    body = {"prompt": prompt, "max_tokens": tokens, "seed": 3, "return_token_ids": True, **fields}
    answer, _ = engine.post("/v1/completions", body, X_Session_ID="one")
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "presence_penalty": 0.5}])
def test_a_turn_computes_only_what_is_new(cold: Engine, warm: Engine, sampling: dict[str, float]) -> None:
    rng = random.Random(str(sampling))
    prompt, spared, pages = random_ids(rng, 90), 0, warm.metric(PAGES)
    for tokens, more in ((70, 20), (30, 40), (5, 10)):
        told, cached = say(warm, prompt, tokens, ignore_eos=True, **sampling)
        assert say(cold, prompt, tokens, ignore_eos=True, **sampling) == (told, 0)
        assert cached == spared and len(told) == tokens
        spared = len(prompt) + tokens - 1
        pages += -(-spared // 64) - len(prompt) // 64
        assert warm.await_metric(PAGES, pages) == pages
        prompt = [*prompt, *told, *random_ids(rng, more)]
    assert warm.metric("engine:hand_back_bytes_total") > 0
    warm.await_idle()


def test_the_end_of_a_text_does_no_harm_though_a_step_behind_it_ran(cold: Engine, warm: Engine) -> None:
    """The step behind an end wrote beyond it when that was seen."""
    rng = random.Random(1)
    prompt, pages = random_ids(rng, 100), warm.metric(PAGES)
    free, _ = say(cold, prompt, 40, ignore_eos=True, temperature=0.9)
    end = free[20]
    told, _ = say(warm, prompt, 40, ignore_eos=True, temperature=0.9, stop_token_ids=[end])
    assert told == free[: free.index(end) + 1] and len(told) > 2
    spared = len(prompt) + len(told) - 1
    warm.await_metric(PAGES, pages + -(-spared // 64) - len(prompt) // 64)
    prompt = [*prompt, *told, *random_ids(rng, 30)]
    again, cached = say(warm, prompt, 40, ignore_eos=True, temperature=0.9)
    assert cached == spared and say(cold, prompt, 40, ignore_eos=True, temperature=0.9) == (again, 0)


def _let_sleep(warm: Engine, source: int, sink: int, prompt: list[int]) -> None:
    """The prefill rank sleeps from the middle of an answer until the decode rank, which has offered it, is dead."""
    answer = threading.Thread(target=say, args=(warm, prompt, 80), kwargs={"ignore_eos": True})
    started = warm.metric("vllm:generation_tokens_total")
    answer.start()
    warm.await_metric("vllm:generation_tokens_total", started + 5)
    os.kill(source, signal.SIGSTOP)
    try:
        answer.join(60)
        assert not answer.is_alive(), "the client waits for the hand-back"
        time.sleep(0.05)
        os.kill(sink, signal.SIGKILL)
    finally:
        os.kill(source, signal.SIGCONT)


def count_turns(engine: Engine, what: str) -> float:
    """Finished turns of which that became, of all lives."""
    with urllib.request.urlopen(engine.url + "/metrics", timeout=10) as answer:
        found = re.search(rf'hand_back_turns_total{{what="{what}"}} (\S+)', answer.read().decode())
    assert found is not None
    return float(found[1])


def test_a_decode_rank_that_dies_while_it_hands_back_leaves_nothing_behind(warm: Engine) -> None:
    rng = random.Random(2)
    ranks = warm.ranks()
    (source,) = (rank for rank in ranks.values() if rank["role"] == "prefill")
    granted = count_turns(warm, "granted")
    for how in ("asleep", "at once"):
        (sink,) = (rank for rank in warm.ranks().values() if rank["role"] == "decode")
        if how == "asleep":
            _let_sleep(warm, source["pid"], sink["pid"], random_ids(rng, 100))
        else:  # after the last token, when the push may run
            say(warm, random_ids(rng, 300), 60, ignore_eos=True)
            os.kill(sink["pid"], signal.SIGKILL)
        warm.wait(rf"rank\.ready rank={sink['rank']} .*generation={sink['generation'] + 1}")
    warm.await_idle()
    assert count_turns(warm, "granted") > granted, "no offer was heard"
    snapshot = warm.ranks()[source["rank"]]["snapshot"]
    assert snapshot["pages_granted"] == snapshot["pages_quarantined"] == 0
    assert snapshot["pages_free"] + snapshot["pages_cached"] == snapshot["pages_total"] == 100
    assert warm.ranks()[source["rank"]]["generation"] == 1
    # And turns come back from the next life.
    pages, prompt = warm.metric(PAGES), random_ids(rng, 64)
    told, _ = say(warm, prompt, 10, ignore_eos=True)
    warm.await_metric(PAGES, pages + 1)
    assert say(warm, [*prompt, *told, 5], 2)[1] == 73
