"""PrefixTree: which prefixes of past prompts a prefill rank has kept, where, and which of them it gives up first.

Theory of operation. A *cut* is a position in some past ids at which the whole state is kept: all pages up to it (the
last may be partly filled) and a slab as it stood there. Cuts share pages where their ids agree: the tree's places are
cuts and *forks*, at which paths part and no state is kept. A place holds the pages from its parent's position on, and
parents end at a page's end. So a cut inside a page has no children; what goes on from it has a page of its own there.

Every full page is found by the digest at its end, and is in one place only. So pages that are known of some ids are
those up to the deepest known one, and a cut is found by the digest of its last full page and the ids behind it.

What is given up first has the lowest score: an exponentially decayed count of uses (LRFU), as a logarithm, so that the
order of two cuts does not change while time passes. The first prompt that goes on from a cut is no use of it: it leaves
a cut itself, further on, and in a conversation that is the one which is asked for next.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from engine.core.fingerprint import count_leading
from engine.core.runs import NO_UNITS, Runs
from engine.errors import LocalProtocolError

HALF_LIFE_US = 600_000_000


@dataclasses.dataclass(slots=True, eq=False)
class Cut:
    """A cut, or a fork (`slab` -1).

    Attributes:
        parent: the place before it; None for the root, and once it was given up.
        position: ids up to it.
        pages: from the parent's position on.
        digests: at the ends of the full ones.
        end: at the last page end up to `position`.
        tail: the ids from there on, as bytes; empty at a page's end.
        pins: prompts that use it.
        hits: prompts that went on from it.
        is_turn: it is at the end of a turn that was handed back. is_passed: at the end of such a turn's prompt.
    """

    parent: Cut | None
    position: int
    pages: Runs
    digests: tuple[bytes, ...]
    end: bytes
    tail: bytes = b""
    slab: int = -1
    children: dict[Cut, None] = dataclasses.field(default_factory=dict)
    pins: int = 0
    hits: int = 0
    score: float = 0.0
    is_turn: bool = False
    is_passed: bool = False


class PrefixTree:
    """See the module. It only says what is where; whoever asks moves pages and slabs.

    Ids are little-endian int32 as bytes, digests as `Fingerprints.digest` makes them.

    Attributes:
        num_pages: in all places. num_cuts: of them, which is also their slabs. num_pinned: cuts with pins.
    """

    def __init__(self, page_tokens: int, half_life_us: int = HALF_LIFE_US) -> None:
        self._page_tokens = page_tokens
        self._half_life_us = half_life_us
        self._root = Cut(None, 0, NO_UNITS, (), b"")
        self._page_to_place: dict[bytes, Cut] = {}
        self._tails: dict[bytes, dict[bytes, Cut]] = {}
        self._heap: list[tuple[float, int, Cut]] = []
        self._serial = itertools.count()
        self.num_pages = self.num_cuts = self.num_pinned = 0

    # ------------------------------------------------------------ finding

    def find(self, digests: Sequence[bytes], ids: memoryview, most: int) -> tuple[Cut | None, int]:
        """The deepest cut that `ids` go through at `most` or before, and how many of their pages are known."""
        page_tokens = self._page_tokens
        known = self._count_known(digests, len(digests) - 1)
        for index in range(min(known, most // page_tokens), -1, -1):
            tails = self._tails.get(digests[index])
            if tails is None:
                continue
            at = index * page_tokens
            for length in range(min(page_tokens - 1, most - at), -1, -1):
                cut = tails.get(bytes(ids[4 * at : 4 * (at + length)]))
                if cut is not None:
                    return cut, known
        return None, known

    def pages_of(self, cut: Cut) -> Runs:
        """All pages up to a cut, in order."""
        parts = []
        place: Cut | None = cut
        while place is not None:
            parts.append(place.pages)
            place = place.parent
        return Runs.join(reversed(parts))

    def count_pinned_pages(self) -> int:
        """Pages on the paths of pinned cuts: those that can not be given up now."""
        seen: set[Cut] = set()
        for cut in self._places() if self.num_pinned else ():
            place: Cut | None = cut if cut.pins else None
            while place is not None and place not in seen:
                seen.add(place)
                place = place.parent
        return sum(len(place.pages) for place in seen)

    # ------------------------------------------------------------ use

    def pin(self, cut: Cut) -> None:
        """It is not given up until it is unpinned as often."""
        self.num_pinned += cut.pins == 0
        cut.pins += 1

    def unpin(self, cut: Cut) -> None:
        cut.pins -= 1
        self.num_pinned -= cut.pins == 0

    def use(self, cut: Cut, now_us: int) -> None:
        """A prompt goes on from it."""
        cut.hits += 1
        if cut.hits > 1:
            one = now_us / self._half_life_us
            high, low = max(cut.score, one), min(cut.score, one)
            self._rank(cut, high + math.log2(1 + 2 ** (low - high)))

    def demote(self, cut: Cut) -> None:
        """It is worth a use less."""
        self._rank(cut, cut.score - 1.0)

    def insert(
        self,
        digests: Sequence[bytes],
        ids: memoryview,
        position: int,
        slab: int,
        pages: Sequence[int],
        now_us: int,
        *,
        first: int = 0,
    ) -> range | None:
        """A cut at `position`, with this slab. `pages` are the ids' from page `first` on; those before the tree has.

        Returns:
            Which pages, counted from the ids' first, are the tree's from now on; all before them it has already. None
            where the cut is there, and neither pages nor slab are taken.
        """
        whole, count = position // self._page_tokens, -(-position // self._page_tokens)
        tail = bytes(ids[4 * whole * self._page_tokens : 4 * position])
        if tail in self._tails.get(digests[whole], {}):
            return None
        known = self._count_known(digests, whole)
        if known < first:
            raise LocalProtocolError(f"prefix cache: {first} pages are not given, {known} of them are known")
        cut = self._place_at(digests, known)
        if tail or known < whole:
            path = tuple(digests[known + 1 : whole + 1])
            leaf = Cut(cut, position, Runs.of(pages[known - first : count - first]), path, digests[whole], tail)
            cut.children[leaf] = None
            self._page_to_place.update(dict.fromkeys(path, leaf))
            self.num_pages += len(leaf.pages)
            cut = leaf
        cut.slab, cut.hits, cut.is_turn, cut.is_passed = slab, 0, False, False
        self._tails.setdefault(cut.end, {})[tail] = cut
        self.num_cuts += 1
        self._rank(cut, now_us / self._half_life_us)
        return range(known, known + len(cut.pages)) if tail or known < whole else range(0)

    # ------------------------------------------------------------ giving up

    def evict(self, *, is_for_pages: bool) -> tuple[Runs, int] | None:
        """Gives up the unpinned cut with the lowest score: its pages, maybe none, and its slab. None: no such cut.

        Args:
            is_for_pages: only a cut that nothing goes on from, since the pages of others stay.
        """
        passed = []
        found: Cut | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            score, _, cut = entry
            if cut.slab < 0 or cut.score != score:
                continue  # given up, or ranked anew since
            if cut.pins or (is_for_pages and cut.children):
                passed.append(entry)
            else:
                found = cut
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return None if found is None else self._give_up(found)

    def _give_up(self, cut: Cut) -> tuple[Runs, int]:
        slab, cut.slab = cut.slab, -1
        self.num_cuts -= 1
        tails = self._tails[cut.end]
        del tails[cut.tail]
        if not tails:
            del self._tails[cut.end]
        if cut.children:
            self._join(cut)
            return NO_UNITS, slab
        for digest in cut.digests:
            del self._page_to_place[digest]
        self.num_pages -= len(cut.pages)
        parent, cut.parent = cut.parent, None
        assert parent is not None
        del parent.children[cut]
        self._join(parent)
        return cut.pages, slab

    # ------------------------------------------------------------ shape

    def _count_known(self, digests: Sequence[bytes], most: int) -> int:
        """Pages of these ids that are in the tree: with a page all before it are there."""
        return count_leading(most, lambda page: digests[page] in self._page_to_place)

    def _place_at(self, digests: Sequence[bytes], index: int) -> Cut:
        """The place at the end of known page `index`, counted from 1; a new fork if there is none."""
        if index == 0:
            return self._root
        place = self._page_to_place[digests[index]]
        position = index * self._page_tokens
        if place.position == position:
            return place
        parent = place.parent
        assert parent is not None
        count = index - parent.position // self._page_tokens
        fork = Cut(parent, position, place.pages[:count], place.digests[:count], digests[index])
        fork.children[place] = None
        del parent.children[place]
        parent.children[fork] = None
        place.parent, place.pages, place.digests = fork, place.pages[count:], place.digests[count:]
        self._page_to_place.update(dict.fromkeys(fork.digests, fork))
        return fork

    def _join(self, place: Cut) -> None:
        """A fork with one child becomes part of it."""
        parent = place.parent
        if place.slab >= 0 or parent is None or len(place.children) != 1:
            return
        child = next(iter(place.children))
        child.parent, child.pages, child.digests = parent, place.pages + child.pages, place.digests + child.digests
        self._page_to_place.update(dict.fromkeys(place.digests, child))
        del parent.children[place]
        parent.children[child] = None
        place.parent = None

    def _rank(self, cut: Cut, score: float) -> None:
        cut.score = score
        heapq.heappush(self._heap, (score, next(self._serial), cut))
        if len(self._heap) > 64 + 4 * self.num_cuts:
            cuts = [each for each in self._places() if each.slab >= 0]
            self._heap = [(each.score, next(self._serial), each) for each in cuts]
            heapq.heapify(self._heap)

    def _places(self) -> Iterator[Cut]:
        """All but the root."""
        waiting = list(self._root.children)
        while waiting:
            place = waiting.pop()
            yield place
            waiting.extend(place.children)

    # ------------------------------------------------------------ checks

    def holdings(self) -> Iterator[tuple[Runs, int]]:
        """Pages and slab (-1: none) of each place."""
        return ((place.pages, place.slab) for place in self._places())

    def check(self) -> None:
        """Raises LocalProtocolError unless the tree is as the module says. Costs O(pages)."""
        places = list(self._places())
        for place in places:
            parent = place.parent
            assert parent is not None
            first, whole = parent.position // self._page_tokens, place.position // self._page_tokens
            rules = (
                (place.position > parent.position, "does not lie behind its parent"),
                (parent.position % self._page_tokens == 0, "goes on from inside a page"),
                (len(place.pages) == -(-place.position // self._page_tokens) - first, "has other pages"),
                (len(place.digests) == whole - first, "has other digests"),
                (place.slab >= 0 or len(place.children) > 1, "is a fork of one path"),
                (place.slab >= 0 or not place.pins, "is pinned, and no cut"),
                ({*map(self._page_to_place.get, place.digests)} <= {place}, "is not found by its pages"),
                (place.slab < 0 or self._tails[place.end].get(place.tail) is place, "is not found by its ids"),
            )
            wrong = [what for holds, what in rules if not holds]
            if wrong:
                raise LocalProtocolError(f"prefix cache: the place at {place.position} ids {wrong[0]}")
        found = (
            sum(len(place.pages) for place in places),
            sum(place.slab >= 0 for place in places),
            sum(place.pins > 0 for place in places),
            len(self._page_to_place),
            sum(map(len, self._tails.values())),
        )
        counted = (
            self.num_pages,
            self.num_cuts,
            self.num_pinned,
            sum(len(place.digests) for place in places),
            self.num_cuts,
        )
        if found != counted:
            raise LocalProtocolError(f"prefix cache: pages, cuts, pinned, ends and tails are {found}, not {counted}")
