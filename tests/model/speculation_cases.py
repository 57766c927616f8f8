"""Requests on a device as the step loop runs them, with drafts and without; a drafter that knows what will be said."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.core.plan import DecodeRow, DecodeRows, PrefillChunk, Scores, StepPlan, StepResult
from engine.core.request import sampling_at
from engine.model.device import TorchDevice
from engine.model.drafting import Pick, Proposal, Proposer
from engine.model.grammars import Grammars
from engine.model.proposers import make_proposer
from engine.model.transformer import PagedTransformer
from engine.ports import DeviceInfo
from tests.model.paged_cases import Source, make_model
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass
class Request:
    """What is asked for, and where it is kept.

    Attributes:
        limit: completion tokens at most.
        text: what came of it.
        scored: by place in the completion, what was told of a token.
    """

    slab: int
    pages: tuple[int, ...]
    prompt: Ints
    sampling: Sampling
    limit: int
    text: list[int] = dataclasses.field(default_factory=list)
    scored: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    computed: int = 0
    flying: list[int] = dataclasses.field(default_factory=list)
    is_over: bool = False

    @property
    def end(self) -> int:
        """Where the last token would stand."""
        return len(self.prompt) + self.limit - 1

    def again(self) -> Request:
        """The same, not begun."""
        return Request(self.slab, self.pages, self.prompt, self.sampling, self.limit)


def ends_text(token: int, request: Request, eos: Sequence[int]) -> bool:
    settings = request.sampling
    return token in settings.stop_ids or (token in eos and not settings.ignore_eos)


class Knowing:
    """A proposer that says what the target will say up to a place, each place in its turn, and then something else.

    Attributes:
        inner: keeps and proposes too, so that its passes run; its drafts are thrown away.
    """

    max_drafts = 7

    def __init__(self, requests: Sequence[Request], vocab: int, seed: int, inner: Proposer | None = None) -> None:
        """`requests`: as they came out without drafts."""
        self._lines = {request.slab: [*request.prompt.tolist(), *request.text] for request in requests}
        self._vocab = vocab
        self._rng = random.Random(seed)
        self._turns = collections.Counter[int]()
        self._inner = inner

    def keep(self, counts: Ints | None, nexts: Ints, *, reopens: bool = False) -> None:
        if self._inner is not None:
            self._inner.keep(counts, nexts, reopens=reopens)

    def propose(
        self, slabs: Ints, anchors: Ints, positions: Ints, count: int, *, pick: Pick | None = None, rounds: int = 0
    ) -> Proposal:
        if self._inner is not None:
            self._inner.propose(slabs, anchors, positions, count, rounds=rounds)
        tokens = np.zeros((len(slabs), count), np.int64)
        for row, (slab, position) in enumerate(zip(slabs.tolist(), positions.tolist(), strict=True)):
            line = self._lines[slab][position + 1 : position + 1 + count]
            right = self.choose_place(count)
            for place in range(count):
                truth = line[place] if place < len(line) else 3
                wrong = (truth + 1 + self._rng.randrange(self._vocab - 1)) % self._vocab
                tokens[row, place] = truth if place < right else wrong
        return Proposal(tokens)

    def choose_place(self, count: int) -> int:
        """How many of the next drafts are right."""
        self._turns[count] += 1
        return self._turns[count] % (count + 1)


def open_device(
    source: Source,
    requests: Sequence[Request],
    proposer: Proposer | str | None,
    eos: int,
    *,
    page_tokens: int | None = None,
    rejects: bool = False,
    grammars: Grammars | None = None,
) -> TorchDevice:
    """A device for these requests, with no proposer, the model's own ("own") or another one; `rejects`: see there."""
    pages = 1 + max(max(request.pages) for request in requests)
    slabs = 1 + max(request.slab for request in requests)
    model = make_model(source, page_tokens=page_tokens, pages=pages, slabs=slabs, chunk=320, max_tokens=512)
    return wrap(model, source, proposer, eos, rejects=rejects, grammars=grammars)


def wrap(
    model: PagedTransformer,
    source: Source,
    proposer: Proposer | str | None,
    eos: int,
    *,
    rejects: bool = False,
    grammars: Grammars | None = None,
) -> TorchDevice:
    layout = model.arena.layout
    info = DeviceInfo(
        name="cpu",
        layout_digest=layout.digest,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        num_pages=model.arena.num_pages,
        slab_bytes=layout.slab_bytes,
        num_slabs=model.arena.num_slabs,
        vocab_size=source.shape.vocab_size,
        max_model_tokens=512,
        eos_ids=(eos,),
    )
    own = make_proposer(model, source.weights)
    if isinstance(proposer, Knowing):
        proposer._inner = own
    chosen = own if isinstance(proposer, str) else proposer
    return TorchDevice(model, info, proposer=chosen, rejects=rejects, grammars=grammars)


@dataclasses.dataclass
class Figures:
    """What steps brought.

    Attributes:
        accepted: (drafts verified, drafts that held) to how often.
        steps: with decode rows.
    """

    accepted: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)
    steps: int = 0


class Host:
    """Plans steps for requests and takes their results: two in the queue, places and tokens left to the device."""

    def __init__(
        self, requests: Sequence[Request], eos: Sequence[int], drafts: Sequence[int], seed: int, *, begin: int = 3
    ) -> None:
        """Args:
        drafts: what each step may draft; one is drawn for each step.
        begin: requests that begin at once; the others follow while those generate.
        """
        self.requests = list(requests)
        self.figures = Figures()
        self._eos = eos
        self._drafts = drafts
        self._rng = random.Random(seed)
        self._waiting = self.requests[begin:]
        self._prompts = self.requests[:begin]
        self._running: list[Request] = []
        self._flights: collections.deque[tuple[list[tuple[Request, bool]], list[Request], int]] = collections.deque()
        self._step = 0
        self._unsure: set[int] = set()

    @property
    def is_done(self) -> bool:
        return not self._flights and all(request.is_over for request in self.requests)

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can be planned."""
        rng = self._rng
        if self._waiting and rng.random() < 0.3:
            self._prompts.append(self._waiting.pop(0))
        rows = [request for request in self._running if not request.is_over]
        chunks, told = [], []
        for request in self._prompts[: rng.choice([1, 1, 2])]:
            start = request.computed
            count = min(rng.choice([1, 3, 8, 9, 16, 40]), len(request.prompt) - start)
            last = start + count == len(request.prompt)
            request.computed += count
            ids = memoryview(request.prompt[start : start + count].astype("<i4").tobytes())
            settings = request.sampling if last else None
            seen = memoryview(request.prompt.astype("<i4").tobytes()) if last and settings.needs_seen else None
            chunks.append(PrefillChunk(1 + request.slab, request.slab, start, ids, request.pages, settings, seen))
            told.append((request, last))
        drafts = rng.choice(self._drafts)
        # Most of those that run take part: one that sits a step out goes on from its last drafts.
        picked = [request for request in rows if rng.random() < 0.9]
        decode = [self._row(request) for request in picked]
        decode = [row for row in decode if row is not None]
        by_slab = {row.slab: row for row in decode}
        picked = [request for request in picked if request.slab in by_slab]
        if not chunks and not decode:
            return None
        self._step += 1
        columns = DecodeRows.of(decode)
        ends = np.array([request.end for request in picked], np.int64)
        roster = dataclasses.replace(columns.roster, ends=ends if drafts or self._is_unsure(picked) else None)
        for request in picked:
            request.flying.append(1 if drafts == 0 else 0)
        for request, last in told:
            if last:
                self._prompts.remove(request)
                self._running.append(request)
        self._flights.append((told, picked, drafts))
        rows_of = DecodeRows(roster, columns.positions, columns.tokens) if decode else ()
        return StepPlan(self._step, tuple(chunks), rows_of, drafts=drafts)

    def _is_unsure(self, picked: Sequence[Request]) -> bool:
        return any(0 in request.flying for request in picked)

    def _row(self, request: Request) -> DecodeRow | None:
        """A row that says no more than the host knows; none where it knows that the end is planned."""
        planned = len(request.text) + len(request.flying) + (not request.text and request.computed > 0)
        sampling = sampling_at(request.sampling, planned)
        if 0 in request.flying and not sampling.min_tokens:
            return DecodeRow(1 + request.slab, request.slab, -1, None, request.pages, sampling)
        position = len(request.prompt) + planned - 1
        if position >= request.end:
            return None
        token = request.text[-1] if request.text and not request.flying and self._rng.random() < 0.7 else None
        return DecodeRow(1 + request.slab, request.slab, position, token, request.pages, sampling)

    def apply(self, result: StepResult) -> None:
        """Takes the oldest step's result."""
        told, picked, drafts = self._flights.popleft()
        for (request, last), token in zip(told, result.chunk_tokens, strict=True):
            assert (token is not None) == last
            if token is not None:
                self._add(request, [token])
        counts = [1] * len(picked) if result.row_counts is None else list(result.row_counts)
        proposed = [0] * len(picked) if result.row_proposed is None else list(result.row_proposed)
        assert len(counts) == len(proposed) == len(picked) and sum(counts) == len(result.row_tokens)
        assert drafts == 0 or not picked or result.row_counts is not None
        scores = read_scores(result.row_scores)
        self.figures.steps += bool(picked)
        at = 0
        for request, count, tried in zip(picked, counts, proposed, strict=True):
            request.flying.pop(0)
            assert 0 <= count <= tried + 1 <= drafts + 1
            if count:
                self.figures.accepted[tried, count - 1] += 1
            self._add(request, list(result.row_tokens[at : at + count]), scores, at)
            at += count

    def _add(
        self, request: Request, tokens: list[int], scores: dict[int, tuple[float, ...]] | None = None, at: int = 0
    ) -> None:
        for place, token in enumerate(tokens):
            if request.is_over:
                return
            if scores is not None and request.sampling.logprobs >= 0:
                request.scored[len(request.text)] = scores[at + place]
            request.text.append(token)
            request.is_over = ends_text(token, request, self._eos) or len(request.text) == request.limit


def read_scores(scores: Scores | None) -> dict[int, tuple[float, ...]]:
    """By row: log-probability, place, likeliest ids, theirs."""
    found: dict[int, tuple[float, ...]] = {}
    if scores is not None:
        assert (np.diff(scores.rows) > 0).all()
        at = 0
        for index, row in enumerate(scores.rows.tolist()):
            below = slice(at, at + int(scores.counts[index]))
            at = below.stop
            found[row] = (
                float(scores.logprobs[index]), int(scores.places[index]),
                *scores.top_ids[below].tolist(), *scores.top_logprobs[below].tolist(),
            )  # fmt: skip
    return found


async def run_host(device: TorchDevice, host: Host, *, queued: int = 2) -> None:
    """All requests to their ends, with so many steps in the queue."""
    tickets = collections.deque()
    idle = 0
    while not host.is_done:
        while len(tickets) < queued:
            plan = host.plan()
            if plan is None:
                break
            tickets.append(device.submit(plan))
        if tickets:
            idle = 0
            host.apply(await device.wait(tickets.popleft()))
        else:
            idle += 1
            assert idle < 200, "nothing is planned and not all requests are over"
