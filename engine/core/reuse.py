"""PrefixCache: gives prompts their memory, with what earlier prompts left, and keeps what they leave.

A prompt that begins as an earlier one did goes on from the deepest cut of it: the cut's full pages are shared, its slab
and its open page are copied by the device. Each prompt leaves a cut at its end. One that agrees with cached pages well
beyond its cut leaves a *branch cut* where they part, so that what many prompts begin with is found from the third on.

A turn that a decode rank hands back goes on from the cut at its prompt's end, and becomes a cut at its own.

Nothing waits for the cache or fails by it: free memory is used first, then cuts are given up as far as one prompt
needs, its own among them; and slabs that are to keep a state are given back where a prompt has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from engine.core.arena import Arena, Holding
from engine.core.fingerprint import Digests, Fingerprints, SeenPages
from engine.core.pages import PageState
from engine.core.plan import Base
from engine.core.prefix import Cut, PrefixTree
from engine.core.recall import Recall, Told
from engine.core.request import Prompt, RequestKey, count_pages
from engine.core.runs import NO_UNITS, Runs
from engine.errors import LocalProtocolError
from transport.messages import DeclineReason, PrefixCounts

BRANCH_PAGES = 2
"""A branch cut spares later prompts at least so many pages."""
TRUST_TURNS = 8
"""So many prompts that could go on from a turn's end change the mind about whether they do."""


@dataclasses.dataclass(slots=True, eq=False)
class Turn:
    """A finished turn that is to become a cut, with memory for what lies behind its prompt.

    Attributes:
        ids: of prompt and completion, but for the last token, as bytes; digests: of them.
        first: the page that the first id behind the prompt is in, counted from 0; `pages` are those from there on.
        cut: at the prompt's end or behind it, pinned; None once it is let go.
    """

    ids: memoryview
    digests: Digests
    first: int
    pages: Runs
    slab: int
    cut: Cut | None

    @property
    def num_ids(self) -> int:
        return len(self.ids) // 4


class PrefixCache:
    """See the module.

    Args:
        arena: borrowed; all memory of prompts and of the cache is in it.
        is_on: else prompts get memory and nothing stays.
        takes_turns: prompts are remembered for the turns that go on from them.
    """

    def __init__(self, arena: Arena, page_tokens: int, *, is_on: bool, takes_turns: bool = False) -> None:
        self._arena = arena
        self._page_tokens = page_tokens
        self._is_on = is_on
        self._tree = PrefixTree(page_tokens)
        self._fingerprints = Fingerprints(page_tokens)
        self._seen = SeenPages()
        self._takes_turns = takes_turns
        self._trust = 1.0
        self._recall = Recall()
        self._keeping: dict[RequestKey, Prompt] = {}
        self._queried = self._hit = self._possible = self._evicted_pages = 0

    # ------------------------------------------------------------ a prompt's way

    def admit(self, prompt: Prompt, now_us: int) -> bool:
        """Gives a prompt its pages and slab, and says where it goes on from; False while there is no room."""
        num_pages = count_pages(prompt.num_ids, self._page_tokens)
        if not self._is_on:
            if self._arena.has_room(num_pages):
                self._allocate(prompt, num_pages)
            return prompt.slab >= 0
        assert prompt.start is not None
        if prompt.digests is None:
            prompt.digests = self._fingerprints.digest(prompt.ids, prompt.start.cache_salt, prompt.start.affinity)
        # Whoever asks for log-probabilities of the prompt needs all of it computed.
        may_use = prompt.start.sampling.prompt_logprobs < 0
        cut, known = None, 0
        if may_use:
            cut, known = self._tree.find(prompt.digests, prompt.ids, prompt.num_ids - 1)
        if cut is None or not self._take(prompt, cut, num_pages):
            if not self._make_room(num_pages):
                return False
            self._allocate(prompt, num_pages)
        if prompt.cut is not None:
            self._tree.use(prompt.cut, now_us)
            if prompt.cut.is_turn or prompt.cut.is_passed:
                self._trust += (prompt.cut.is_turn - self._trust) / TRUST_TURNS
        branch = min(known, (prompt.num_ids - 1) // self._page_tokens) * self._page_tokens
        if branch - prompt.cached >= BRANCH_PAGES * self._page_tokens:
            prompt.branch = branch
        if may_use:
            self._queried += prompt.num_ids
            self._hit += prompt.cached
            seen = self._seen.count(prompt.digests) * self._page_tokens
            self._possible += max(prompt.cached, min(seen, prompt.num_ids - 1))
        return True

    def reserve(self, prompts: Sequence[Prompt], budget: int) -> None:
        """Takes slabs for the states that `prompts` can come to within `budget` ids, as far as there are some to spare.

        Another slab is left, so that the next prompt does not wait for the end of a step.
        """
        if not self._is_on:
            return
        for prompt in prompts:
            if prompt.digests is not None:
                # Of what is computed by now: little for each chunk, where all at once would hold up a step.
                prompt.digests.reach(prompt.planned // self._page_tokens)
            for position in (prompt.branch, prompt.num_ids):
                if not prompt.planned < position <= prompt.planned + budget or position in prompt.keeps:
                    continue
                slabs = self._arena.slabs
                if slabs.num_free + self._tree.num_cuts - self._tree.num_pinned < 2:
                    return
                if not slabs.num_free:
                    self._evict(is_for_pages=False)
                units = slabs.allocate(1)
                assert units is not None
                prompt.keeps[position] = units[0]
                self._keeping[prompt.key] = prompt

    def donate(self, prompt: Prompt, now_us: int) -> None:
        """Everything of a prompt is computed, and nothing names its memory any more: what may be of use stays."""
        loose, at = NO_UNITS, prompt.cached // self._page_tokens
        for position in sorted(prompt.keeps):
            slab = prompt.keeps[position]
            assert prompt.digests is not None
            taken = self._tree.insert(prompt.digests, prompt.ids, position, slab, prompt.pages, now_us)
            if taken is None:
                self._arena.slabs.free((slab,), PageState.OWNED)
            else:
                self._arena.cache(prompt.pages[taken.start : taken.stop], slab)
                if taken:
                    loose, at = loose + prompt.pages[at : taken.start], taken.stop
        if prompt.digests is not None:
            self._seen.add(prompt.digests)
        if self._takes_turns and prompt.num_ids in prompt.keeps:
            assert prompt.digests is not None
            self._recall.add(prompt.key, Told(bytes(prompt.ids), prompt.digests))
        self._free(prompt, loose + prompt.pages[at:])

    def give_back(self, prompt: Prompt) -> None:
        """A prompt was given up, and nothing names its memory any more."""
        self._arena.slabs.free(prompt.keeps.values(), PageState.OWNED)
        self._free(prompt, prompt.pages[prompt.cached // self._page_tokens :])

    def give_up_all(self) -> None:
        """Everything that no prompt uses; what is used goes like all else, once room is wanted."""
        while (given_up := self._tree.evict(is_for_pages=False)) is not None:
            self._take_back(given_up)
        self._recall.clear()

    # ------------------------------------------------------------ a turn's way

    def open_turn(self, key: RequestKey, said: memoryview) -> Turn | DeclineReason:
        """Takes memory for a finished turn, owned; or why not.

        Args:
            key: of its request, whose prompt was computed here; it is recalled once.
            said: ids that were generated, int32 each, at least two.
        """
        told = self._recall.take(key)
        if told is None:
            return "gone"
        num_prompt = len(told.ids) // 4
        ids = memoryview(told.ids + bytes(said[:-4]))
        digests = told.digests.follow(ids)
        self._seen.add(digests)
        cut, _ = self._tree.find(digests, ids, len(ids) // 4)
        if cut is None or cut.position < num_prompt:
            return "gone"
        if cut.position == len(ids) // 4:
            return "known"
        first, end = num_prompt // self._page_tokens, count_pages(len(ids) // 4, self._page_tokens)
        # Another slab is left for the next prompt, as where states are kept.
        spare = self._arena.slabs.num_free + self._tree.num_cuts - self._tree.num_pinned - (cut.pins == 0)
        self._tree.pin(cut)
        if spare < 2 or not self._make_room(end - first):
            self._tree.unpin(cut)
            return "full"
        pages, slab = self._arena.allocate(end - first)
        return Turn(ids, digests, first, pages, slab, cut)

    def drop_turn(self, key: RequestKey) -> None:
        """The turn of this request will not come."""
        self._recall.take(key)

    def keep_turn(self, turn: Turn, now_us: int) -> None:
        """All of a turn is here, and owned: it becomes a cut."""
        pages = turn.pages
        taken = self._tree.insert(turn.digests, turn.ids, turn.num_ids, turn.slab, pages, now_us, first=turn.first)
        if taken is None:
            self._arena.free(pages, turn.slab, PageState.OWNED)
        else:
            first, end = (taken.start - turn.first, taken.stop - turn.first) if taken else (0, 0)
            self._arena.pages.free(pages[:first] + pages[end:], PageState.OWNED)
            self._arena.cache(pages[first:end], turn.slab)
            self._choose(turn)
        self.unpin_turn(turn)

    def _choose(self, turn: Turn) -> None:
        """Of the cuts at a turn's end and at its prompt's, the next turn goes on from one. The other one goes first,
        where something has to: which it is, prompts have shown lately, since some clients leave out what was thought.
        """
        end, _ = self._tree.find(turn.digests, turn.ids, turn.num_ids)
        assert end is not None and turn.cut is not None
        end.is_turn, turn.cut.is_passed = True, True
        self._tree.demote(turn.cut if self._trust >= 0.5 else end)

    def close_turn(self, turn: Turn, state: PageState) -> None:
        """A turn was given up, and nobody writes its memory any more, which is in `state`."""
        self._arena.free(turn.pages, turn.slab, state)
        self.unpin_turn(turn)

    def unpin_turn(self, turn: Turn) -> None:
        """A turn will not become a cut: the one before it may go."""
        if turn.cut is not None:
            self._tree.unpin(turn.cut)
            turn.cut = None

    # ------------------------------------------------------------ what others ask

    @property
    def num_cuts(self) -> int:
        return self._tree.num_cuts

    def count_pinned_pages(self) -> int:
        """Cached pages that running prompts use."""
        return self._tree.count_pinned_pages()

    def counts(self) -> PrefixCounts:
        """Of this life."""
        return PrefixCounts(self._queried, self._hit, self._possible, self._evicted_pages)

    def holdings(self, prompts: Sequence[Prompt]) -> Iterator[Holding]:
        """All memory of these prompts and of the cache, for `Arena.check`."""
        owned = PageState.OWNED
        for prompt in prompts:
            yield prompt.pages[prompt.cached // self._page_tokens :], prompt.slab, owned, (), owned
            for slab in prompt.keeps.values():
                yield (), slab, owned, (), owned
        for pages, slab in self._tree.holdings():
            yield pages, slab, PageState.CACHED, (), PageState.CACHED

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises LocalProtocolError unless the tree is sound and shared pages are those of their cuts."""
        self._tree.check()
        for prompt in prompts:
            if prompt.cut is not None:
                shared = prompt.cached // self._page_tokens
                if prompt.cut.slab < 0 or prompt.pages[:shared] != self._tree.pages_of(prompt.cut)[:shared]:
                    raise LocalProtocolError(f"request {prompt.key}: the cut that it went on from is not there")

    # ------------------------------------------------------------ inside

    def _allocate(self, prompt: Prompt, num_pages: int) -> None:
        prompt.pages, prompt.slab = self._arena.allocate(num_pages)

    def _take(self, prompt: Prompt, cut: Cut, num_pages: int) -> bool:
        """Has the prompt go on from this cut, if there is room for the rest."""
        shared, is_inside = divmod(cut.position, self._page_tokens)
        self._tree.pin(cut)
        if not self._make_room(num_pages - shared):
            self._tree.unpin(cut)
            return False
        pages = self._tree.pages_of(cut)
        own, prompt.slab = self._arena.allocate(num_pages - shared)
        prompt.pages = pages[:shared] + own
        prompt.cut, prompt.base = cut, Base(cut.slab, pages[shared] if is_inside else -1)
        prompt.cached = prompt.planned = prompt.computed = cut.position
        return True

    def _free(self, prompt: Prompt, pages: Runs) -> None:
        self._arena.free(pages, prompt.slab, PageState.OWNED)
        if prompt.cut is not None:
            self._tree.unpin(prompt.cut)
        self._keeping.pop(prompt.key, None)
        prompt.pages, prompt.slab, prompt.cut, prompt.cached = NO_UNITS, -1, None, 0
        prompt.keeps.clear()

    def _make_room(self, num_pages: int) -> bool:
        """Frees so many pages and a slab, if all that can be given up suffices; else nothing is given up."""
        arena, tree = self._arena, self._tree
        if arena.has_room(num_pages):
            return True
        missing = num_pages - arena.pages.num_free
        if missing > 0 and tree.num_pages - tree.count_pinned_pages() < missing:
            return False
        loose = None
        if arena.slabs.num_free == 0 and tree.num_cuts == tree.num_pinned:
            loose = self._find_loose()
            if loose is None:
                return False
        while arena.pages.num_free < num_pages:
            self._evict(is_for_pages=True)
        if arena.slabs.num_free == 0:
            if loose is None:
                self._evict(is_for_pages=False)
            else:
                prompt, position = loose
                arena.slabs.free((prompt.keeps.pop(position),), PageState.OWNED)
        return True

    def _find_loose(self) -> tuple[Prompt, int] | None:
        """A slab that is to keep a state, or does, and that no submitted step names."""
        for prompt in self._keeping.values():
            for position in prompt.keeps:
                if prompt.planned < position or prompt.computed >= position:
                    return prompt, position
        return None

    def _evict(self, *, is_for_pages: bool) -> None:
        given_up = self._tree.evict(is_for_pages=is_for_pages)
        if given_up is None:
            raise LocalProtocolError("prefix cache: nothing can be given up, though it was counted")
        self._take_back(given_up)

    def _take_back(self, given_up: tuple[Runs, int]) -> None:
        self._arena.evict(*given_up)
        self._evicted_pages += len(given_up[0])
