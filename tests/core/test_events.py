"""EventRing: numbers without gaps, what is forgotten is counted, what is too long is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.events import NAME_BYTES, EventRing
from transport.messages import TEXT_LIMIT, EventsHappened
from transport.wire import encode_frame


@given(
    capacity=st.integers(1, 8), count=st.integers(0, 20), after=st.integers(0, 30), limit=st.none() | st.integers(1, 9)
)
def test_what_is_given_and_what_is_lost_add_up(capacity, count, after, limit):
    ring = EventRing(capacity)
    for number in range(count):
        ring.add("info", "n", str(number), number)
    lost, events = ring.after(after, limit)
    begin = after if after <= count else 0
    numbers = [event.seq for event in events]
    expected = list(range(max(begin, count - capacity) + 1, count + 1))
    assert numbers == (expected if limit is None else expected[:limit])
    assert lost == max(0, count - capacity - begin)
    assert [event.text for event in events] == [str(number - 1) for number in numbers]


def test_watchers_are_woken_until_they_end_it():
    ring, woken = EventRing(4), []
    end = ring.watch(lambda: woken.append(ring.last_seq))
    ring.add("info", "n", "", 0)
    ring.add("error", "n", "", 0)
    end()
    ring.add("info", "n", "", 0)
    assert woken == [1, 2]


@given(name=st.text(max_size=400), text=st.text(max_size=50) | st.sampled_from(["x" * 9000, "ü" * 4096, "𝄞" * 4000]))
def test_any_event_fits_its_message(name, text):
    ring = EventRing()
    ring.add("warning", name, text, 1)
    [event] = ring.after(0)[1]
    assert len(event.name.encode()) <= NAME_BYTES and len(event.text.encode()) <= TEXT_LIMIT
    assert event.text == text if len(text.encode()) <= TEXT_LIMIT else event.text.endswith(" ...")
    encode_frame(EventsHappened(0, (event,)))


def test_what_can_not_be_encoded_and_what_is_cut_is_seen():
    ring = EventRing()
    ring.add("info", "n", "file=\udc80.txt", 0)
    ring.add("info", "n", "x" * 5000, 0)
    ring.add("info", "n", "ü" * 5000, 0)
    odd, long, wide = (event.text for event in ring.after(0)[1])
    assert odd == "file=?.txt"
    assert long == "x" * 4092 + " ..." and wide == "ü" * 2046 + " ..."


def test_a_full_message_of_the_longest_events_is_within_the_limit():
    ring = EventRing(256)
    for _ in range(256):
        ring.add("info", "n" * 256, "𝄞" * 4096, 2**53 - 1)
    encode_frame(EventsHappened(0, ring.after(0)[1]))
