"""ClusterView: what it makes of a head's messages. No terminal, no socket."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from console.view import ClusterView, LinkState, read_heat
from tests.console.stubhead import (
    Scene,
    make_event,
    make_heat,
    make_part,
    make_status,
    make_traffic,
)
from transport.messages import AskHeat, EventsHappened, HeatReport, LinksReport


def hear(view: ClusterView, scene: Scene, now: float) -> None:
    """One full set of answers."""
    view.begin_round(now)
    for message in (scene.status, scene.experts, scene.traffic, scene.requests):
        view.take(message, b"", now)
    view.take(*scene.links, now)
    for part in scene.experts.parts:
        view.take(*make_heat(AskHeat(part.pool, part.group, part.part, 4), part), now)
    view.end_round(now)


def watch(seconds: int = 10, scene: Scene | None = None) -> tuple[ClusterView, Scene]:
    view, scene = ClusterView(), scene or Scene()
    view.link = LinkState(phase="live")
    for second in range(seconds):
        scene.advance(1.0)
        hear(view, scene, 100.0 + second)
    return view, scene


def test_rates_come_from_totals():
    view, _ = watch()
    assert view.rate("req_s") == pytest.approx(182, rel=0.01)
    assert view.rate("tok_s") == pytest.approx(540_000, rel=0.01)
    assert view.rate("tok_s:25") == pytest.approx(5800 + 7 * 25, rel=0.01)
    assert view.rate("step:25") == pytest.approx(8900 + 1200, rel=0.01)
    assert view.rate("busy:prefill") == pytest.approx(0.81, rel=0.01)
    assert view.rate("kv:decode") == pytest.approx(0.7)
    assert view.rate("skew:25") == pytest.approx(1.1, rel=0.05)
    assert math.isnan(view.rate("nothing"))
    assert all(math.isnan(value) for value in view.window("nothing", 110, 5))


def test_a_rank_that_restarts_does_not_count_backwards():
    view, scene = watch()
    found = scene.status.ranks[25].snapshot
    assert found is not None
    scene.set_rank(25, generation=2, snapshot=msgspec.structs.replace(found, generation=2, generated_tokens=0, step=0))
    scene.advance(1.0)
    hear(view, scene, 110.0)
    scene.advance(1.0)
    hear(view, scene, 111.0)
    assert view.rate("tok_s:25") == pytest.approx(5975, rel=0.01)


def test_percentiles_are_of_the_stretch_that_was_asked_for():
    view = ClusterView()
    fast = tuple(1000 if n == 20 else 0 for n in range(65))
    slow = tuple(1000 if n == 20 else 500 if n == 40 else 0 for n in range(65))
    view.take(make_traffic(at_ms=0, ttft=()), b"", 100.0)
    view.take(make_traffic(at_ms=1000, ttft=fast), b"", 101.0)
    view.take(make_traffic(at_ms=60_000, ttft=fast), b"", 160.0)
    view.take(make_traffic(at_ms=61_000, ttft=slow), b"", 161.0)
    recent, whole = view.percentiles("ttft", 10.0), view.percentiles("ttft", 300.0)
    assert recent[0] > 100 * 1.25**38  # all of the last second was slow
    assert whole[0] < 100 * 1.25**21 < whole[2]


def test_nothing_counted_is_not_a_number():
    view = ClusterView()
    assert all(math.isnan(value) for value in view.percentiles("itl"))
    view.take(make_traffic(), b"", 100.0)
    assert all(math.isnan(value) for value in view.percentiles("itl"))


def test_pairs_have_rates_by_life():
    view, scene = watch(3)
    assert view.pairs is not None
    mine = (view.pairs.prefill == 3) & (view.pairs.decode == 9)
    assert view.pairs.rates[mine] == pytest.approx([0.4e9])
    assert int(view.pairs.failed[mine][0]) == 2
    assert view.rate("push_failed") == 2
    # Another life of the rank: nothing is known of its speed yet, although its total is smaller.
    report, blob = scene.links
    n = report.count
    raw = bytearray(blob)
    raw[4 * n : 8 * n] = np.full(n, 2, "<i4").tobytes()
    view.take(LinksReport(count=n), bytes(raw), 104.0)
    assert view.pairs is not None and not view.pairs.rates.any()


def test_heat_is_read_by_its_layout():
    part = make_part()
    report, blob = make_heat(AskHeat("decode", 0, "main", 4), part)
    heat = read_heat(report, blob, 1.0)
    assert heat.rank_load.shape == (32, 8) and heat.rank_load[17, 4] == np.float32(1.83)
    assert heat.hottest[17, 4] == 23
    assert heat.slots.shape == (32, 24) and heat.slots[0, 0] == 0 and (heat.next_slots == heat.slots).all()
    assert heat.load.shape == (64,) and heat.load[23] == np.float32(4.1)
    assert heat.moved.sum() == 1
    size = sum(array.nbytes for array in (heat.rank_load, heat.hottest, heat.slots, heat.next_slots, heat.load))
    assert size + heat.moved.nbytes == len(blob)


def test_the_fullest_layer_of_a_rank():
    view, _ = watch(2)
    hot = view.hot(25)
    assert hot is not None
    assert (hot.layer, hot.expert, hot.pool, hot.group) == (4, 23, "decode", 0)
    assert hot.load == pytest.approx(1.83)
    assert view.hot(99) is None


def test_loads_before_any_step_are_no_loads():
    view = ClusterView()
    scene = Scene()
    scene.set_part(steps=0)
    view.take(scene.experts, b"", 1.0)
    report, blob = make_heat(AskHeat("decode", 0, "main", 4), make_part(steps=0))
    assert isinstance(report, HeatReport)
    view.take(report, blob, 1.0)
    assert view.hot(25) is None and math.isnan(view.rate("skew:25"))


def test_events_are_numbered_and_gaps_are_told():
    view = ClusterView()
    view.take(EventsHappened(lost=0, events=(make_event(1), make_event(2))), b"", 1.0)
    view.take(EventsHappened(lost=0, events=(make_event(2), make_event(3))), b"", 1.0)
    assert [event.seq for event in view.events] == [1, 2, 3]
    view.take(EventsHappened(lost=6, events=(make_event(10),)), b"", 1.0)
    assert view.lost_events == 6 and view.last_seq == 10
    assert [event.name for event in view.events][-2:] == ["console.gap", "rank.ready"]
    # A gap that nobody announced.
    view.take(EventsHappened(lost=0, events=(make_event(13),)), b"", 1.0)
    assert view.lost_events == 8


def test_no_more_events_are_kept_than_said():
    view = ClusterView()
    for start in range(1, 5001, 250):
        events = tuple(make_event(n) for n in range(start, start + 250))
        view.take(EventsHappened(lost=0, events=events), b"", 1.0)
    assert len(view.events) == 4096 and view.events[-1].seq == 5000


def test_another_head_is_noticed_and_forgets_what_the_old_one_said():
    view, scene = watch()
    view.take(EventsHappened(lost=0, events=(make_event(1), make_event(2))), b"", 1.0)
    scene.status = msgspec.structs.replace(scene.status, head_pid=78, uptime_ms=50)
    view.take(scene.status, b"", 120.0)
    assert view.heads == 2
    assert view.traffic is None and view.experts is None and not view.heats and view.last_seq == 0
    assert len(view.events) == 2
    # The same process number, but it has just begun.
    view.take(msgspec.structs.replace(scene.status, uptime_ms=40), b"", 121.0)
    assert view.heads == 3


def test_stages():
    def stage(status):
        view = ClusterView()
        view.take(status, b"", 1.0)
        return view.stage()

    assert ClusterView().stage() == "unknown"
    assert stage(make_status()) == "serving"
    assert stage(make_status(ready=False)) == "starting"
    assert stage(make_status(is_stopping=True, ready=False)) == "draining"
    scene = Scene()
    scene.set_rank(12, state="lost", snapshot=None)
    assert stage(scene.status) == "partial"
    scene = Scene()
    scene.set_rank(12, age_ms=4000)
    assert stage(scene.status) == "partial"


def test_an_answer_that_is_due_too_long_makes_it_stale():
    view, _ = watch(1)
    view.begin_round(101.0)
    assert view.phase(102.9) == "live" and view.is_current(102.9)
    assert view.phase(103.1) == "stale" and not view.is_current(103.1)
    view.end_round(103.2)
    assert view.phase(200.0) == "live" and view.age(200.0) == pytest.approx(96.8)


def test_a_copy_stays_as_it_is():
    view, scene = watch(3)
    kept = view.copy()
    scene.advance(5.0)
    scene.status = msgspec.structs.replace(scene.status, running=1)
    hear(view, scene, 108.0)
    assert kept.status is not None and kept.status.running == 2911
    assert kept.window("running", 108.5, 9)[-1] != 1 and view.window("running", 108.5, 9)[-1] == 1
    assert kept.percentiles("ttft") != view.percentiles("ttft")


def test_names():
    view, _ = watch(1)
    assert (view.name(3), view.name(25), view.name(99)) == ("p03", "d25", "r99")
