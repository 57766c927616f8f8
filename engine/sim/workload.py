"""Workload: who asks for what and when, and the requesters that ask. They use the production `HeadClient`.

A requester keeps each request until it is answered, submits prompt and generated ids again after a loss, and checks
every token against `text` as it comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import trio

from engine.actors.client import HeadClient, Row, run_head_client
from engine.actors.unanswered import Came
from engine.errors import EngineError, PeerGone, RemoteProtocolError
from engine.sim.meters import LogHistogram
from engine.sim.text import ExpectedText, Words, append_chains, draw_many, extend_chain, seed_mix
from engine.sim.violation import Violation
from engine.sim.wires import CableEnd, WireSpeed
from engine.sim.world import World
from transport.messages import RequestFailed, RequestFinished, Sampling

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """How requests come.

    Attributes:
        requests: how many, over all clients.
        clients: connections they are spread over.
        arrive_s: they come evenly at random within so long; 0 is all at once.
        inflight: not 0: they do not come at random; so many are in flight at any time for `arrive_s`, a new one for
            each that is answered, and `requests` is how many there may be at most.
        prompt, output: shortest and longest, in tokens, drawn evenly.
        cancel_share: of requests cancelled at a random time within `cancel_s` of their arrival.
        sample_share, end_share, minimum_share: of requests that sample with a seed, stop at ids, have a minimum.
        talk_share: of requests that begin as earlier ones did, see `talk`.
    """

    requests: int = 20
    clients: int = 1
    arrive_s: float = 1.0
    inflight: int = 0
    prompt: tuple[int, int] = (1, 100)
    output: tuple[int, int] = (1, 40)
    cancel_share: float = 0.0
    cancel_s: float = 2.0
    sample_share: float = 0.0
    end_share: float = 0.0
    minimum_share: float = 0.0
    talk_share: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One request. `cancel_at` is infinite for one that is never cancelled."""

    name: str
    client: int
    prompt: bytes
    sampling: Sampling
    arrive_at: float
    cancel_at: float


def draw_asks(load: Load, rng: random.Random, vocab_size: int) -> Iterator[Ask]:
    """The requests of a run, in order of arrival, each drawn when it is asked for."""
    times: Iterable[float] = itertools.repeat(0.0, load.requests)
    if not load.inflight:
        times = sorted(rng.random() * load.arrive_s for _ in range(load.requests))
    for number, arrive_at in enumerate(times):
        yield draw_ask(load, rng, vocab_size, number, arrive_at)


def draw_ask(load: Load, rng: random.Random, vocab_size: int, number: int, arrive_at: float) -> Ask:
    """One of them, the `number`th."""
    words = np.frombuffer(rng.randbytes(4 * rng.randint(*load.prompt)), "<u4")
    most = rng.randint(*load.output)
    sampling = Sampling(
        temperature=0.7 if rng.random() < load.sample_share else 0.0,
        seed=rng.randrange(1 << 30),
        max_tokens=most,
        min_tokens=rng.randint(0, most) if rng.random() < load.minimum_share else 0,
        stop_ids=tuple(rng.randrange(2, vocab_size) for _ in range(8)) if rng.random() < load.end_share else (),
    )
    is_cancelled = rng.random() < load.cancel_share
    return Ask(
        name=f"r{number}",
        client=number % load.clients,
        prompt=(2 + words % (vocab_size - 2)).astype("<i4").tobytes(),
        sampling=sampling,
        arrive_at=arrive_at,
        cancel_at=arrive_at + rng.random() * load.cancel_s if is_cancelled else math.inf,
    )


@dataclasses.dataclass(slots=True, eq=False)
class Try:
    """An ask on its way. `outcome` is empty until its answer: finished, cancelled, drained or left.

    `text` is what its tokens must be, up to those that came; `PlainTexts` keeps it while it is plain.
    """

    ask: Ask
    row: Row
    text: ExpectedText
    last_at: float
    retries: int = 0
    cancel_asked: bool = False
    is_sending: bool = False
    outcome: str = ""


class PlainTexts:
    """Expected texts as columns: of rows that had tokens before, are not near their end, and can end at no id.

    A text is at the place that its row has in the client's table.
    """

    def __init__(self, vocab_size: int, eos_share: float) -> None:
        self._vocab_size = vocab_size
        self._eos_share = eos_share
        self._tries: list[Try | None] = []
        self._is_kept = np.zeros(0, np.bool_)
        self._chain: Words = np.zeros(0, np.uint32)
        self._mix: Words = np.zeros(0, np.uint32)
        self._count = np.zeros(0, np.int64)
        self._most = np.zeros(0, np.int64)
        self._last_at = np.zeros(0)

    def add(self, attempt: Try) -> None:
        """Keeps its text from now on, if it is plain."""
        text, sampling = attempt.text, attempt.text.sampling
        if text.reason is not None or sampling.stop_ids or sampling.min_tokens or self._eos_share:
            return
        place = attempt.row.place
        if place >= len(self._tries):
            self._grow(place + 1)
        assert self._tries[place] is None
        self._tries[place], self._is_kept[place] = attempt, True
        self._chain[place], self._mix[place] = text.chain, seed_mix(sampling)
        self._count[place], self._most[place], self._last_at[place] = text.count, sampling.max_tokens, attempt.last_at

    def remove(self, attempt: Try) -> None:
        """Gives the text back as far as its tokens came; nothing happens if it is not kept here."""
        place = attempt.row.place
        if not 0 <= place < len(self._tries) or self._tries[place] is not attempt:
            return
        text = attempt.text
        text.chain, text.count = int(self._chain[place]), int(self._count[place])
        text.reason = "length" if text.count >= self._most[place] else None
        attempt.last_at = float(self._last_at[place])
        self._tries[place], self._is_kept[place] = None, False

    def find_kept(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these are kept here."""
        most = int(np.maximum.reduce(places))
        if most >= len(self._tries):
            self._grow(most + 1)
        return self._is_kept[places]

    def take(self, places: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], now: float) -> npt.NDArray[np.float64]:
        """A token for each of several rows; returns the time since the one before.

        Raises:
            Violation: one is not what it must be.
        """
        chain, count = self._chain[places], self._count[places]
        wanted, came = draw_many(chain, self._mix[places], self._vocab_size, 0.0), tokens.view(np.uint32)
        is_late = count >= self._most[places]
        is_wrong = (wanted != came) | is_late
        if b"\x01" in is_wrong.tobytes():  # a quarter of what `any` costs
            at = int(is_wrong.argmax())
            attempt = self._tries[places[at]]
            assert attempt is not None
            what = f"{attempt.ask.name}: token {int(count[at])}"
            if is_late[at]:
                raise Violation("stream", f"{what} after its end (length)")
            raise Violation("stream", f"{what} is {tokens[at]}, not {int(wanted[at])}")
        self._chain[places] = append_chains(chain, wanted)
        count += 1
        self._count[places] = count
        since: npt.NDArray[np.float64] = now - self._last_at[places]
        self._last_at[places] = now
        return since

    def _grow(self, size: int) -> None:
        more = max(64, size, 2 * len(self._tries)) - len(self._tries)
        self._is_kept = np.pad(self._is_kept, (0, more))
        self._chain, self._mix = np.pad(self._chain, (0, more)), np.pad(self._mix, (0, more))
        self._count, self._most = np.pad(self._count, (0, more)), np.pad(self._most, (0, more))
        self._last_at = np.pad(self._last_at, (0, more))
        self._tries += [None] * more


@dataclasses.dataclass(slots=True)
class Answers:
    """What all requesters of a run have seen."""

    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    first_token_s: LogHistogram = dataclasses.field(default_factory=LogHistogram)
    between_tokens_s: LogHistogram = dataclasses.field(default_factory=LogHistogram)
    handoff_s: LogHistogram = dataclasses.field(default_factory=LogHistogram)
    num_tokens: int = 0
    num_attempts: int = 0
    num_connections: int = 0
    most_attempts: int = 0


class Requester:
    """One client: its requests, over one connection after another. See the module.

    Its requests never end in a world that has an outside; people there may cancel some of them.
    """

    def __init__(self, world: World, number: int, asks: Iterable[Ask], answers: Answers, load: Load) -> None:
        self.name = f"c{number}"
        self.is_gone = False
        self.speeds: tuple[WireSpeed, WireSpeed] | None = None
        self._world = world
        self._answers = answers
        self._shape = world.shape
        self._texts = PlainTexts(world.shape.vocab_size, world.shape.eos_share)
        self._serial = itertools.count()
        self._tries: dict[Row, Try] = {}
        self._due: list[tuple[float, int, Try]] = []
        self._wake = trio.Event()
        self._client: HeadClient | None = None
        self._end: CableEnd | None = None
        self._num_open = 0
        self._is_endless = world.outside is not None
        self._more = iter(asks)
        self._more_until = load.arrive_s if load.inflight else math.inf
        for ask in itertools.islice(self._more, load.inflight // load.clients if load.inflight else None):
            self.take(ask)

    @property
    def num_open(self) -> int:
        """Requests without an answer."""
        return self._num_open

    def take(self, ask: Ask) -> None:
        """Has one more request."""
        text = ExpectedText(extend_chain(0, ask.prompt), ask.sampling, self._shape.vocab_size, self._shape.eos_share)
        attempt = Try(ask, Row(ask.prompt, ask.sampling, ask.name), text, ask.arrive_at)
        self._tries[attempt.row] = attempt
        self._num_open += 1
        if ask.cancel_at < math.inf:
            self._world.clock.at(ask.cancel_at, self._cancel, attempt)
        self._again(attempt, ask.arrive_at)

    def _take_next(self) -> None:
        """In place of one that was answered."""
        now = trio.current_time()
        ask = next(self._more, None) if now < self._more_until and not self.is_gone else None
        if ask is not None:
            self.take(dataclasses.replace(ask, arrive_at=now))

    # ------------------------------------------------------------ what others do to it

    def hang_up(self) -> None:
        """Its connection breaks; it comes back."""
        if self._end is not None:
            self._end.cut()

    def leave(self) -> None:
        """It goes away for good, without a word."""
        self.is_gone = True
        for attempt in list(self._tries.values()):
            self._settle(attempt, "left")
        self.hang_up()

    def open_asks(self) -> list[str]:
        """Names of requests without an answer, with what is known of them."""
        return [
            f"{attempt.ask.name} (attempt {attempt.row.attempt}, {len(attempt.row.generated)} of at most"
            f" {attempt.ask.sampling.max_tokens} tokens)"
            for attempt in self._tries.values()
        ]

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until every request is answered."""
        while self._num_open or self._is_endless:
            if self._world.is_over.is_set():
                for attempt in list(self._tries.values()):
                    self._settle(attempt, "drained")
                return
            try:
                self._end, self.speeds = self._world.connect(self.name)
            except OSError:
                await trio.sleep(FIRST_PAUSE_S)
                continue
            self._answers.num_connections += 1
            try:
                await self._converse(self._end)
            except* PeerGone:
                pass
            except* RemoteProtocolError as group:
                raise Violation("stream", f"{self.name}: {group.exceptions[0]}") from group
            self._recover()
            if self._num_open or self._is_endless:
                await trio.sleep(FIRST_PAUSE_S)

    async def _converse(self, stream: trio.abc.Stream) -> None:
        async with trio.open_nursery() as nursery:
            self._client = client = await nursery.start(
                functools.partial(run_head_client, stream, self, name=self.name)
            )
            await self._submit(client)
            client.close()
            nursery.cancel_scope.cancel()

    async def _submit(self, client: HeadClient) -> None:
        while self._num_open or self._is_endless:
            now = trio.current_time()
            is_full = client.num_unfinished >= client.hello.max_inflight
            if is_full or not self._due or self._due[0][0] > now:
                self._wake = trio.Event()
                with trio.move_on_at(math.inf if is_full or not self._due else self._due[0][0]):
                    await self._wake.wait()
                continue
            attempt = heapq.heappop(self._due)[2]
            if attempt.outcome:
                continue
            row = attempt.row
            attempt.is_sending = True
            try:
                await client.submit(row)
            except EngineError:
                self._again(attempt, 0.0)
                raise
            finally:
                attempt.is_sending = False
            if attempt.cancel_asked:
                self._cancel_at_head(client, attempt)
            self._answers.num_attempts += 1
            self._answers.most_attempts = max(self._answers.most_attempts, row.attempt)

    def _cancel(self, attempt: Try) -> None:
        if attempt.outcome:
            return
        attempt.cancel_asked = True
        if attempt.is_sending:
            return  # `_submit` cancels it once it is sent
        if self._client is not None and self._client.holds(attempt.row):
            self._cancel_at_head(self._client, attempt)
        else:
            self._settle(attempt, "cancelled")

    def _cancel_at_head(self, client: HeadClient, attempt: Try) -> None:
        with contextlib.suppress(PeerGone):  # then `_recover` sees to it
            client.cancel(attempt.row)

    def _recover(self) -> None:
        """After a connection: what had no answer is asked again on the next one."""
        client, self._client = self._client, None
        for row in client.unfinished() if client is not None else ():
            attempt = self._tries.get(row)
            if attempt is None:
                continue
            self._texts.remove(attempt)
            if attempt.cancel_asked:
                self._settle(attempt, "cancelled")
            elif attempt.text.reason is not None:
                self._settle(attempt, "finished")
            else:
                self._again(attempt, 0.0)

    def _again(self, attempt: Try, due: float) -> None:
        heapq.heappush(self._due, (due, next(self._serial), attempt))
        self._wake.set()

    def _settle(self, attempt: Try, outcome: str) -> None:
        if not attempt.outcome:
            self._texts.remove(attempt)
            attempt.outcome = outcome
            self._num_open -= 1
            del self._tries[attempt.row]
            if outcome != "left":
                self._take_next()
            self._answers.outcomes[outcome] = self._answers.outcomes.get(outcome, 0) + 1
            self._wake.set()
            self._world.trace.add(self._world.clock.now, "answer", f"{attempt.ask.name} {outcome}")

    # ------------------------------------------------------------ RequestSink

    def tokens_came(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        now, texts, answers = trio.current_time(), self._texts, self._answers
        if not isinstance(rows, Came):
            for row, count in zip(rows, counts, strict=True):
                self._take_tokens(row, count, now)
            return
        is_kept = texts.find_kept(rows.places)
        if b"\x00" not in is_kept.tobytes():
            answers.between_tokens_s.add_many(texts.take(rows.places, rows.ids, now))
            answers.num_tokens += len(rows)
            return
        kept = np.flatnonzero(is_kept)
        answers.between_tokens_s.add_many(texts.take(rows.places[kept], rows.ids[kept], now))
        answers.num_tokens += len(kept)
        for at in np.flatnonzero(~is_kept).tolist():
            self._take_tokens(rows[at], 1, now)

    def _take_tokens(self, row: Row, count: int, now: float) -> None:
        """Token by token: the first ones of a row, those of one that may stop, and several at once."""
        attempt = self._find(row)
        if attempt is None:
            return
        self._texts.remove(attempt)
        answers, text = self._answers, attempt.text
        have = len(row.generated)
        for token in row.generated[have - count :]:
            if text.reason is not None:
                raise Violation("stream", f"{attempt.ask.name}: token {text.count} after its end ({text.reason})")
            at = text.count
            wanted = text.next_token()
            if token != wanted:
                raise Violation("stream", f"{attempt.ask.name}: token {at} is {token}, not {wanted}")
        if have == count:
            answers.first_token_s.add(now - attempt.ask.arrive_at)
        else:
            answers.between_tokens_s.add((now - attempt.last_at) / count)
        attempt.last_at = now
        answers.num_tokens += count
        self._texts.add(attempt)

    def _find(self, row: Row) -> Try | None:
        """Whose news it is; None for a client that left. An answered request can have none."""
        attempt = self._tries.get(row)
        if attempt is None and not self.is_gone:
            raise Violation("answers", f"{row.label}: news after its answer")
        return attempt

    def row_finished(self, row: Row, fact: RequestFinished) -> None:
        attempt = self._find(row)
        if attempt is None:
            return
        self._texts.remove(attempt)
        if attempt.text.reason != fact.reason:
            raise Violation(
                "stream", f"{attempt.ask.name}: ends with {fact.reason}, wanted {attempt.text.reason or 'more tokens'}"
            )
        if fact.handoff_us:
            self._answers.handoff_s.add(fact.handoff_us / 1e6)
        self._settle(attempt, "finished")

    def row_failed(self, row: Row, fact: RequestFailed) -> None:
        attempt, failures = self._find(row), self._answers.failures
        failures[fact.code] = failures.get(fact.code, 0) + 1
        if attempt is None:
            return
        self._texts.remove(attempt)
        if not fact.definite:
            raise Violation("answers", f"{attempt.ask.name}: an indefinite failure: {fact.message}")
        if attempt.cancel_asked:
            self._settle(attempt, "cancelled")
        elif fact.code == "cancelled" and self._is_endless:
            self._settle(attempt, "cancelled")  # by an operator
        elif fact.code == "cancelled":
            raise Violation("answers", f"{attempt.ask.name}: cancelled, and nobody asked for that")
        elif attempt.text.reason is not None:
            self._settle(attempt, "finished")  # every token came; only the word of it was lost
        elif fact.code == "draining" and self._world.drained:
            self._settle(attempt, "drained")
        elif fact.retryable:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt.retries, 10))
            attempt.retries += 1
            self._again(attempt, trio.current_time() + pause)
        else:
            raise Violation("answers", f"{attempt.ask.name}: refused for good ({fact.code}): {fact.message}")
