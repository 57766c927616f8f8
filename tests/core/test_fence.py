"""When a writer has to go: late, needed, and once; and never for a quarantine that ends by itself."""

from __future__ import annotations

from engine.core.arena import Arena
from engine.core.fence import Fence
from engine.core.handoff import DecodePhase
from engine.core.request import Sequence
from transport.messages import ReservePages, Sampling

CAP_US, ROOM_US = 1_000, 5_000


def quarantine(arena: Arena, number: int, rank: int, num_pages: int, generation: int = 1) -> Sequence:
    sequence = Sequence((number, 1), ReservePages(number, 1, rank, 8, 0, Sampling()), 4, 0, number)
    sequence.prefill_generation, sequence.phase = generation, DecodePhase.QUARANTINED
    sequence.pages, sequence.slab = arena.allocate(num_pages)
    arena.grant(sequence.pages, sequence.slab)
    arena.quarantine(sequence.pages, sequence.slab)
    return sequence


def look(
    fence: Fence, arena: Arena, epochs: list[Sequence], *, is_short: bool = False, now_us: int, linked: bool = True
) -> list[tuple[tuple[int, int], int]]:
    return fence.look(arena, epochs, is_short=is_short, is_linked=lambda rank: linked, now_us=now_us)


def make_fence() -> Fence:
    return Fence(share=0.5, cap_us=CAP_US, room_us=ROOM_US)


def test_below_the_cap_nobody_is_accused_while_there_is_room() -> None:
    arena, fence = Arena(10, 10), make_fence()
    epochs = [quarantine(arena, 1, 0, 4)]
    assert look(fence, arena, epochs, now_us=10) == []
    assert look(fence, arena, epochs, now_us=10**9) == [] and fence.next_us is None


def test_at_the_cap_the_late_writer_is_accused_once() -> None:
    arena, fence = Arena(10, 10), make_fence()
    epochs = [quarantine(arena, 1, 0, 3)]
    look(fence, arena, epochs, now_us=10)
    epochs.append(quarantine(arena, 2, 1, 2))
    assert look(fence, arena, epochs, now_us=500) == [] and fence.next_us == 10 + CAP_US
    assert look(fence, arena, epochs, now_us=10 + CAP_US) == [((0, 1), 3)]
    assert fence.next_us == 500 + CAP_US
    assert look(fence, arena, epochs, now_us=11 + CAP_US) == []
    assert look(fence, arena, epochs, now_us=500 + CAP_US) == [((1, 1), 2)]


def test_a_request_that_waits_for_room_has_more_patience() -> None:
    arena, fence = Arena(10, 10), make_fence()
    epochs = [quarantine(arena, 1, 3, 1, generation=7), quarantine(arena, 2, 3, 1, generation=7)]
    assert look(fence, arena, epochs, is_short=True, now_us=10) == [] and fence.next_us == 10 + ROOM_US
    assert look(fence, arena, epochs, is_short=True, now_us=10 + ROOM_US) == [((3, 7), 2)]


def test_quarantined_slabs_reach_the_cap_too() -> None:
    arena, fence = Arena(100, 2), make_fence()
    epochs = [quarantine(arena, 1, 0, 1)]
    look(fence, arena, epochs, now_us=10)
    assert look(fence, arena, epochs, now_us=10 + CAP_US) == [((0, 1), 1)]


def test_the_next_life_of_a_writer_may_be_accused_again() -> None:
    arena, fence = Arena(100, 2), make_fence()
    for generation in (1, 2):
        sequence = quarantine(arena, generation, 0, 1, generation)
        look(fence, arena, [sequence], now_us=10)
        assert look(fence, arena, [sequence], now_us=10**6) == [((0, generation), 1)]
        sequence.phase = DecodePhase.CLOSED
        arena.pages.free(sequence.pages, arena.pages.state_of(sequence.pages[0]))
        arena.slabs.free((sequence.slab,), arena.slabs.state_of(sequence.slab))
        assert look(fence, arena, [], now_us=10**6) == []


def test_a_writer_without_a_link_is_accused_though_there_is_room() -> None:
    arena, fence = Arena(10, 10), make_fence()
    epochs = [quarantine(arena, 1, 2, 1)]
    assert look(fence, arena, epochs, now_us=10, linked=False) == [] and fence.next_us == 10 + ROOM_US
    assert look(fence, arena, epochs, now_us=10 + ROOM_US) == []
    assert look(fence, arena, epochs, now_us=10 + ROOM_US, linked=False) == [((2, 1), 1)]
