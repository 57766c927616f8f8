"""What the supervisor makes of ranks' drafts: totals over lives, and a prefill rank whose KV drafts badly."""

from __future__ import annotations

import trio

from tests.actors.test_supervisor import World, settle
from transport.messages import DraftCounts, DraftOrigin, PrefixCounts, RankSnapshot

BAD = DraftOrigin(1, 1, 64, 6_400, 64, 640_000, 64, 6_400)
GOOD = DraftOrigin(0, 1, 64, 6_400, 3_200, 640_000, 160_000, 320_000)
COUNTS = DraftCounts(100, 300, 120, (60, 40, 20))


def make_snapshot(rank: int, generation: int, drafted: DraftCounts, *origins: DraftOrigin) -> RankSnapshot:
    return RankSnapshot(rank, generation, *[0] * 21, drafted=drafted, draft_origins=origins)


async def test_totals_go_on_over_lives_and_a_bad_prefill_rank_is_named(nursery, autojump_clock):
    world = World(nursery, {0: "prefill", 1: "prefill", 2: "decode", 3: "decode"})
    world.on_spawn = lambda process: process.ready()
    supervisor = world.supervisor
    nursery.start_soon(supervisor.run)
    await settle()
    assert supervisor.drafted() == DraftCounts() and supervisor.degraded() == ()
    world.now(2).link.post(make_snapshot(2, 1, COUNTS, GOOD))
    await settle()
    assert supervisor.drafted().accepted_at[:3] == (60, 40, 20)
    assert supervisor.degraded() == ()
    world.now(3).link.post(make_snapshot(3, 1, COUNTS, BAD))
    await settle()
    assert supervisor.drafted().proposed == 600
    (sentence,) = supervisor.degraded()
    assert sentence.startswith("1% of 6,400 drafts on KV of prefill rank 1 were accepted, 50% of 6,400")

    await world.now(2).die(-9)
    await trio.sleep(1)
    assert world.now(2).generation == 2
    assert supervisor.drafted().proposed == 600  # the old life's figures stay
    world.now(2).link.post(make_snapshot(2, 2, COUNTS, GOOD))
    await settle()
    assert supervisor.drafted().proposed == 900 and len(supervisor.degraded()) == 1
    await world.now(1).die(-9)
    await trio.sleep(1)
    assert world.now(1).generation == 2
    assert supervisor.degraded() == ()  # what the dead one pushed says nothing of the next
    await supervisor.stop()


async def test_prefix_caches_are_counted_over_lives(nursery, autojump_clock):
    world = World(nursery, {0: "prefill", 1: "prefill", 2: "decode"})
    world.on_spawn = lambda process: process.ready()
    supervisor = world.supervisor
    nursery.start_soon(supervisor.run)
    await settle()
    assert supervisor.prefix() == PrefixCounts()

    def post(rank: int, generation: int, *counts: int) -> None:
        world.now(rank).link.post(RankSnapshot(rank, generation, *[0] * 21, prefix=PrefixCounts(*counts)))

    post(0, 1, 100, 50, 60, 2)
    post(1, 1, 10, 5, 6, 0)
    await settle()
    assert supervisor.prefix() == PrefixCounts(110, 55, 66, 2)
    post(0, 1, 200, 150, 170, 3)
    await settle()
    assert supervisor.prefix() == PrefixCounts(210, 155, 176, 3)
    await world.now(0).die(-9)
    await trio.sleep(1)
    assert world.now(0).generation == 2 and supervisor.prefix() == PrefixCounts(210, 155, 176, 3)
    post(0, 2, 1, 0, 0, 0)
    await settle()
    assert supervisor.prefix() == PrefixCounts(211, 155, 176, 3)
    await supervisor.stop()
