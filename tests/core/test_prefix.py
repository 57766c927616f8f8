"""PrefixTree against a plain dictionary of all that was ever put into it, and Fingerprints' bounded memory."""

from __future__ import annotations

import itertools
import random
from array import array
from operator import eq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.fingerprint import Fingerprints, SeenPages
from engine.core.prefix import Cut, PrefixTree

T = 4


def pack(ids: list[int]) -> memoryview:
    return memoryview(array("i", ids).tobytes())


class Model:
    """The tree, and beside it what a plain reading of the rules says that it holds."""

    def __init__(self) -> None:
        self.tree = PrefixTree(T, half_life_us=1_000_000)
        self.fingerprints = Fingerprints(T)
        self.cuts: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        """(salt, ids) of a cut to all its pages, as they were handed over."""
        self.slabs: dict[tuple[str, tuple[int, ...]], int] = {}
        self.places: dict[tuple[str, tuple[int, ...]], Cut] = {}
        self.held: set[int] = set()
        self.held_slabs: set[int] = set()
        self.next_page = self.next_slab = 0
        self.now_us = 0

    def find(self, salt: str, ids: list[int], most: int) -> tuple[Cut | None, int]:
        cut, known = self.tree.find(self.fingerprints.digest(pack(ids), salt), pack(ids), most)
        fitting = [key for key in self.cuts if key[0] == salt and len(key[1]) <= most]
        fitting = [key for key in fitting if list(key[1]) == ids[: len(key[1])]]
        deepest = max(fitting, key=lambda key: len(key[1]), default=None)
        if deepest is None:
            assert cut is None
        else:
            assert cut is self.places[deepest]
            assert (cut.slab, cut.position) == (self.slabs[deepest], len(deepest[1]))
            # Full pages may be any prompt's with the same ids up to their end; the last, open one is its own.
            pages = self.tree.pages_of(cut)
            assert len(pages) == -(-cut.position // T) and set(pages) <= self.held
            if cut.position % T:
                assert pages[-1] == self.cuts[deepest][-1]
        same = [sum(1 for _ in itertools.takewhile(bool, map(eq, key[1], ids))) for key in self.cuts if key[0] == salt]
        assert known == max((count // T for count in same), default=0)
        return cut, known

    def put(self, salt: str, ids: list[int], positions: list[int]) -> None:
        """A prompt that goes on from what is found, and leaves cuts."""
        self.now_us += 1000
        digests = self.fingerprints.digest(pack(ids), salt)
        base, _ = self.find(salt, ids, len(ids) - 1)
        pages: list[int] = []
        if base is not None:
            self.tree.pin(base)
            self.tree.use(base, self.now_us)
            pages = list(self.tree.pages_of(base)[: base.position // T])
        first = len(pages)
        while len(pages) < -(-len(ids) // T):
            pages.append(self.next_page)
            self.next_page += 1
        for position in positions:
            key = (salt, tuple(ids[:position]))
            taken = self.tree.insert(digests, pack(ids), position, self.next_slab, pages, self.now_us)
            if taken is None:
                assert key in self.cuts
                continue
            assert key not in self.cuts
            assert taken.start >= first or not taken
            new = {pages[at] for at in taken}
            assert not new & self.held
            self.held |= new
            self.cuts[key], self.slabs[key] = tuple(pages[: -(-position // T)]), self.next_slab
            self.held_slabs.add(self.next_slab)
            self.next_slab += 1
            place, _ = self.tree.find(digests, pack(ids), position)
            assert place is not None
            self.places[key] = place
        if base is not None:
            self.tree.unpin(base)
        self.check()

    def evict(self, is_for_pages: bool) -> bool:
        before = dict(self.places)
        loose = [place for place in before.values() if not place.pins and not (is_for_pages and place.children)]
        scores = {place: place.score for place in loose}
        given_up = self.tree.evict(is_for_pages=is_for_pages)
        if given_up is None:
            assert not loose
            return False
        pages, slab = given_up
        assert set(pages) <= self.held and slab in self.held_slabs
        self.held -= set(pages)
        self.held_slabs.discard(slab)
        key = next(key for key, own in self.slabs.items() if own == slab)
        assert scores[before[key]] == min(scores.values())
        del self.cuts[key], self.slabs[key], self.places[key]
        self.check()
        return True

    def check(self) -> None:
        self.tree.check()
        holdings = list(self.tree.holdings())
        pages = [page for own, _ in holdings for page in own]
        slabs = [slab for _, slab in holdings if slab >= 0]
        assert len(pages) == len(set(pages)) == self.tree.num_pages and set(pages) == self.held
        assert len(slabs) == len(set(slabs)) == self.tree.num_cuts and set(slabs) == self.held_slabs
        # Only what some cut needs is held.
        needed = {page for place in self.places.values() for page in self.tree.pages_of(place)}
        assert needed == self.held


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_is_a_dictionary_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    model, texts = Model(), [[rng.randrange(3) for _ in range(rng.randrange(1, 40))]]
    pinned: list[Cut] = []
    for _ in range(120):
        choice = rng.random()
        if choice < 0.6:
            # Goes on from an earlier text or leaves it, anywhere.
            old = rng.choice(texts)
            ids = old[: rng.randrange(len(old) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
            texts.append(ids)
            positions = sorted({len(ids), *([rng.randrange(1, 1 + len(ids) // T) * T] if len(ids) > T else [])})
            model.put(rng.choice(["", "", "salt"]), ids, rng.choice([positions, positions[-1:], positions[:1]]))
        elif choice < 0.8:
            while pinned and rng.random() < 0.7:
                model.tree.unpin(pinned.pop())
            model.evict(rng.random() < 0.5)
        elif choice < 0.9 and model.places:
            cut = rng.choice(list(model.places.values()))
            model.tree.pin(cut)
            pinned.append(cut)
            paths = {page for each in pinned for page in model.tree.pages_of(each)}
            assert model.tree.count_pinned_pages() == len(paths)
        else:
            ids = rng.choice(texts)
            model.find(rng.choice(["", "salt"]), ids, rng.randrange(len(ids) + 1))
    for cut in pinned:
        model.tree.unpin(cut)
    while model.evict(is_for_pages=True):
        pass
    assert model.tree.num_pages == model.tree.num_cuts == model.tree.num_pinned == 0 and not model.held


def test_what_may_go_for_pages_makes_room_for_all_but_pinned_paths() -> None:
    rng = random.Random(1)
    model = Model()
    texts = [[rng.randrange(2) for _ in range(rng.randrange(5, 40))] for _ in range(30)]
    for ids in texts:
        model.put("", ids, [len(ids)])
    for cut in rng.sample(list(model.places.values()), 4):
        model.tree.pin(cut)
    while model.evict(is_for_pages=True):
        pass
    assert model.tree.num_pages == model.tree.count_pinned_pages()


def test_the_tip_of_a_conversation_outlives_its_earlier_turns_and_what_many_use_outlives_both() -> None:
    model = Model()
    system = list(range(100, 100 + 3 * T))
    model.put("", [*system, 1], [len(system)])
    turns: list[list[int]] = []
    for talk in range(5):
        ids = [*system, *[talk] * 5]
        turns.append(ids)
        model.put("", ids, [len(ids)])
    first = turns[0]
    second = [*first, 7, 7, 7]
    model.put("", second, [len(second)])
    third = [*second, 8, 8, 8]
    model.put("", third, [len(third)])
    scores = {len(key[1]): place.score for key, place in model.places.items() if list(key[1]) == third[: len(key[1])]}
    assert scores[len(first)] < scores[len(second)] < scores[len(third)] < scores[len(system)]
    model.evict(is_for_pages=False)
    assert ("", tuple(first)) not in model.places


def test_half_a_life_later_a_use_counts_half() -> None:
    tree, fingerprints = PrefixTree(T, half_life_us=100), Fingerprints(T)
    ids = pack([1, 2, 3])
    tree.insert(fingerprints.digest(ids, ""), ids, 3, 0, [0], 0)
    cut, _ = tree.find(fingerprints.digest(ids, ""), ids, 3)
    assert cut is not None and cut.score == 0
    tree.use(cut, 50)
    assert cut.score == 0, "the first one that goes on from it leaves a cut further on"
    tree.use(cut, 100)
    assert 2**cut.score == pytest.approx(1 + 2)


def test_many_uses_do_not_make_the_heap_long() -> None:
    tree, fingerprints = PrefixTree(T), Fingerprints(T)
    ids = pack([1, 2, 3])
    tree.insert(fingerprints.digest(ids, ""), ids, 3, 0, [0], 0)
    cut, _ = tree.find(fingerprints.digest(ids, ""), ids, 3)
    assert cut is not None
    for now in range(1000):
        tree.use(cut, now)
    assert len(tree._heap) <= 70
    assert tree.evict(is_for_pages=True) == ((0,), 0) and tree.evict(is_for_pages=False) is None


ids_of = st.lists(st.integers(0, 3), max_size=30)


@settings(deadline=None)
@given(st.lists(st.tuples(ids_of, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "x", "y", "z"])), max_size=20))
def test_a_remembered_conversation_has_the_digests_of_a_new_one(asked: list[tuple[list[int], str, str]]) -> None:
    remembering = Fingerprints(T, most_texts=3, most_bytes=4 * 60)
    for ids, salt, conversation in asked:
        again = [*ids, 1, 2, 3, 1, 2]
        for text in (ids, again, ids):
            assert remembering.digest(pack(text), salt, conversation) == Fingerprints(T).digest(pack(text), salt)
        assert len(remembering) <= 3 and 0 <= remembering.num_bytes <= 4 * 60


def test_digests_of_a_new_prompt_are_made_as_far_as_they_are_asked_for() -> None:
    tree, fingerprints, seen = PrefixTree(T), Fingerprints(T), SeenPages()
    known, new = pack(list(range(100 * T))), pack([7] * 100 * T)
    seen.add(fingerprints.digest(known, ""))
    tree.insert(fingerprints.digest(known, ""), known, 100 * T, 0, range(100), 0)
    lazy = fingerprints.digest(new, "")
    assert tree.find(lazy, new, 100 * T) == (None, 0) and seen.count(lazy) == 0
    assert len(lazy) == 101 and len(lazy._made) <= 2
    mixed = pack([*range(30 * T), *[7] * 70 * T])
    lazy = fingerprints.digest(mixed, "")
    assert tree.find(lazy, mixed, 100 * T)[1] == seen.count(lazy) == 30
    assert len(lazy._made) <= 33
    lazy.reach(50)
    assert len(lazy._made) == 51 and lazy.follow(mixed) == fingerprints.digest(mixed, "")
    assert lazy[-1] == [*lazy][100] == lazy[98:200][2] and lazy[::-50] == [lazy[100], lazy[50], lazy[0]]


def test_a_salt_makes_all_pages_others() -> None:
    one, other = (Fingerprints(T).digest(pack(list(range(3 * T))), salt) for salt in ("", "a"))
    assert len(one) == len(other) == 4 and not set(one) & set(other)


def test_pages_ever_seen_are_bounded_and_the_first_pages_stay_longest() -> None:
    seen, fingerprints = SeenPages(6), Fingerprints(T)
    digests = fingerprints.digest(pack(list(range(5 * T))), "")
    seen.add(digests)
    assert seen.count(digests) == 5 and seen.count(digests[:3]) == 2
    seen.add(fingerprints.digest(pack([99] * 3 * T), ""))
    assert len(seen) == 6 and seen.count(digests) == 3
    assert seen.count(fingerprints.digest(pack(list(range(5 * T))), "salt")) == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=12), st.integers(1, 8))
def test_pages_seen_lately_are_remembered_in_order(prompts: list[list[int]], most: int) -> None:
    seen, fingerprints, order = SeenPages(most), Fingerprints(T), list[bytes]()
    for prompt in prompts:
        digests = fingerprints.digest(pack([token for token in prompt for _ in range(T)]), "")
        seen.add(digests)
        for digest in reversed(digests[1:]):
            order = [other for other in order if other != digest] + [digest]
        order = order[-most:]
        assert [*seen._seen] == order
