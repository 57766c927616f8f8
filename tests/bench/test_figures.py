"""Figures: from times and snapshots that are known to numbers that are known."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec
import pytest
import trio

from engine.actors.client import Row
from engine.bench.arrivals import Arrivals, client_figures, find_window
from engine.bench.processor import ThreadTimes, read_thread_times
from engine.bench.prompts import make_prompts
from engine.bench.record import percentile, spread
from engine.bench.summary import summarise_serve
from engine.bench.watch import Sighting, Watch
from engine.errors import EngineError
from transport.messages import RankSnapshot, RankStatus, RequestFailed, RequestFinished, Sampling

EARLY = [1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0]
LATE = [1.9, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5]


def test_the_steady_state_is_while_all_sequences_decode():
    window = find_window([EARLY, LATE])
    assert (window.start, window.end) == (2.0, 3.0)
    figures = client_figures([0.5, 0.5], [EARLY, LATE], window)
    assert figures["steady_tokens"] == 8 and figures["tokens_per_s"] == 8.0
    assert figures["step_ms"] == 250.0
    assert figures["itl_ms_p50"] == figures["itl_ms_max"] == 250.0
    assert (figures["ttft_ms_min"], figures["ttft_ms_max"]) == (500.0, 1400.0)
    assert (figures["second_ms_p50"], figures["second_ms_p99"]) == (100.0, 500.0)


def test_without_a_steady_state_there_are_no_figures():
    with pytest.raises(EngineError, match="never decoded all at once"):
        find_window([[1.0, 1.1, 1.2], [1.2, 1.3]])
    with pytest.raises(EngineError, match="never decoded all at once"):
        find_window([[1.0, 1.1, 1.2], [1.05]])


def test_percentiles_and_spreads():
    assert percentile([], 0.5) == 0
    assert percentile([3, 1, 2], 0.5) == 2 and percentile(range(1, 101), 0.99) == 99 and percentile([7], 0.99) == 7
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_prompts_are_a_function_of_their_seed_and_have_no_special_ids():
    first = make_prompts(3, 50, 288, 4)
    assert first == make_prompts(3, 50, 288, 4) != make_prompts(3, 50, 288, 5)
    assert first[0] != first[1]
    assert all(16 <= token < 288 for prompt in first for token in prompt)


async def test_waiting_ends_with_the_last_answer_or_the_first_failure(autojump_clock):
    arrivals = Arrivals()
    rows = [Row(b"", Sampling(), label=label) for label in ("a", "b")]
    arrivals.begin(["a", "b"])
    ended = []

    async def wait():
        await arrivals.wait(arrivals.is_steady)
        ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for step in range(4):
            await trio.sleep(1)
            rows[step % 2].last_token_at = trio.current_time()
            arrivals.tokens_came([rows[step % 2]], [1])
    start = rows[0].last_token_at - 2
    assert ended == [start + 3]
    assert arrivals.times == {"a": [start, start + 2], "b": [start + 1, start + 3]}
    assert not arrivals.has_end()
    arrivals.row_failed(rows[0], RequestFailed(1, 1, "cancelled", "as asked", True, False))
    assert arrivals.has_end()
    arrivals.row_failed(rows[1], RequestFailed(2, 1, "rank_lost", "rank 1 died", True, True))
    with pytest.raises(EngineError, match="request b failed \\(rank_lost\\): rank 1 died"):
        await arrivals.wait()
    arrivals.begin([])
    await arrivals.wait()


def test_times_of_threads_that_ended_are_not_taken_back():
    before = ThreadTimes({1: (5_000_000, 1_000_000), 2: (900_000_000, 0)})
    after = ThreadTimes({1: (9_000_000, 2_000_000), 3: (2_000_000, 500_000)})
    assert after.since(before, 2) == {"cpu_ms_per_step": 3.0, "ready_ms_per_step": 0.75}
    assert read_thread_times(2**22 + 1).thread_to_ns == {}


def test_a_thread_that_computes_is_seen():
    before = read_thread_times(os.getpid())
    done = threading.Event()

    def burn():
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        done.set()
        release.wait(5)

    release = threading.Event()
    thread = threading.Thread(target=burn)
    thread.start()
    assert done.wait(20)
    spent = read_thread_times(os.getpid()).since(before, 1)
    release.set()
    thread.join()
    assert 40 < spent["cpu_ms_per_step"] < 5000


def snapshot(step: int, step_us: int, device_us: int) -> RankSnapshot:
    values = {field.name: 0 for field in msgspec.structs.fields(RankSnapshot) if field.required}
    values |= {"rank": 1, "generation": 1, "step": step, "step_us_sum": step_us, "device_us_sum": device_us}
    return RankSnapshot(**values)


def test_a_ranks_means_are_of_the_stretch_alone():
    watch = Watch(None)  # type: ignore[arg-type]  # nobody is asked here
    assert watch.figures(0, 10) == []
    for after, seen, step, step_us, device_us in [
        (0.9, 1.1, 10, 90_000, 1),  # may be older than the stretch
        (1.1, 1.3, 20, 100_000, 50_000),
        (1.3, 1.5, 30, 150_000, 97_000),
        (1.5, 1.7, 40, 200_000, 140_000),
        (1.9, 2.1, 50, 900_000, 900_000),  # seen too late
    ]:
        told = snapshot(step, step_us, device_us)
        rank = RankStatus(1, "decode", 1, 77, "ready", "", 0, 0, told)
        watch.add(Sighting(after, seen, rank, told))
    (figures,) = watch.figures(1.0, 2.0)
    assert (figures["steps"], figures["step_us_mean"], figures["device_us_mean"]) == (20, 5000.0, 4500.0)
    assert figures["overhead_share"] == 0.1
    (short,) = watch.figures(1.0, 1.4)
    assert "steps" not in short and short["role"] == "decode"


def served(repeat: int, sequences: int, step_ms: float, share: float) -> dict[str, Any]:
    return {
        "kind": "served", "repeat": repeat, "sequences": sequences, "step_ms": step_ms, "itl_ms_p50": step_ms,
        "tokens_per_s": sequences * 1e3 / step_ms,
        "processes": {"head": {"cpu_ms_per_step": 0.5}, "decode1": {"cpu_ms_per_step": 2 * step_ms}},
        "ranks": [{"rank": 0, "role": "prefill"}, {"rank": 1, "role": "decode", "overhead_share": share}],
    }  # fmt: skip


def test_ratios_compare_what_was_measured_in_the_same_repeat():
    runs: list[dict[str, Any]] = []
    # The machine is twice as slow in the second repeat: absolute figures move, ratios do not.
    for repeat, slow in enumerate((1, 2)):
        for sequences, bare_ms, served_ms in ((1, 10.0, 12.0), (8, 20.0, 22.0)):
            runs.append(
                {
                    "kind": "bare", "repeat": repeat, "sequences": sequences, "step_ms": slow * bare_ms,
                    "step_ms_p50": slow * bare_ms, "cpu_ms_per_step": slow * bare_ms,
                }
            )  # fmt: skip
            runs.append(served(repeat, sequences, slow * served_ms, 0.02 * (1 + repeat)))
    summary = summarise_serve(runs)
    ratios = summary["ratios"]
    assert ratios["ratio_step_at_1"] == {"median": 1.2, "min": 1.2, "max": 1.2}
    assert ratios["ratio_mean_step_at_8"] == {"median": 1.1, "min": 1.1, "max": 1.1}
    assert ratios["ratio_cpu_at_1"]["median"] == 2.4
    assert ratios["overhead_share_at_8"] == {"median": 0.03, "min": 0.02, "max": 0.04}
    assert ratios["ratio_rate_8_to_1"]["min"] == pytest.approx(8 * 12 / 22, abs=1e-4)
    assert "ratio_rate_1_to_1" not in ratios
    one, eight = summary["cases"]
    assert one["served"]["step_ms"] == {"median": 18.0, "min": 12.0, "max": 24.0}
    assert eight["bare"]["step_ms"]["max"] == 40.0
    assert eight["served"]["decode1_cpu_ms_per_step"]["min"] == 44.0
    assert eight["served"]["decode1_overhead_share"]["max"] == 0.04


def test_a_finished_row_keeps_its_account():
    arrivals = Arrivals()
    arrivals.begin(["a"])
    row = Row(b"", Sampling(), label="a")
    with pytest.raises(AssertionError):  # the engine never told that it started
        arrivals.row_finished(row, RequestFinished(1, 1, "length", 3, 40))
