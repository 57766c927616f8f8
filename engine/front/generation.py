"""Generation: all choices of one request while they are computed: what was heard of them, and what ends them.

The head's words come in from the link's reading task; whoever writes the answer waits on `wait_news`. What has come and
was not taken yet waits here as text, at most `lag_limit` tokens of a choice: a reader who falls further behind is
dropped, and nobody else waits for him.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from engine.errors import Overflow, PeerGone
from engine.front.ask import Ask, Failure
from engine.front.choice import Choice
from engine.front.headlink import HeadLink


class Generation:
    """See the module.

    Attributes:
        choices: in order of their index.
        failure: why it is over without (the rest of) an answer; None while all is well.
        is_gone: the client hung up.
        is_stalled: the client reads too slowly; its connection was cut.
        began_at, first_token_at: `time.monotonic`; 0.0 before.
    """

    def __init__(
        self,
        link: HeadLink,
        choices: Sequence[Choice],
        *,
        lag_limit: float,
        first_came: Callable[[], None],
        stalled: Callable[[], None],
    ) -> None:
        self.choices = list(choices)
        self.failure: Failure | None = None
        self.is_gone = False
        self.is_stalled = False
        self.began_at = time.monotonic()
        self.first_token_at = 0.0
        self._link = link
        self._lag_limit = lag_limit
        self._first_came = first_came
        self._stalled = stalled
        self._ask_to_choice = {choice.ask: choice for choice in self.choices}
        for choice in self.choices:
            choice.ask.owner = self
        self._open = len(self.choices)
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self._open == 0 or self.failure is not None or self.is_gone or self.is_stalled

    @property
    def is_answered(self) -> bool:
        """Every choice has ended as it should."""
        return self._open == 0 and self.failure is None

    @property
    def stage(self) -> str:
        """Where it is, for the log: `queued` until the prompt is computed and its KV has arrived."""
        if self._open == 0:
            return "flush"
        return "decode" if self.first_token_at else "queued"

    async def submit(self) -> None:
        """Submits every choice. What goes wrong is in `failure`.

        `first_came` of the constructor is called with the first token, `stalled` to cut a connection.
        """
        for choice in self.choices:
            if self.is_over:
                return
            try:
                await self._link.submit(choice.ask)
            except PeerGone as error:
                self._end(Failure("engine_lost", str(error), retryable=True))
            except Overflow as error:
                self._end(Failure("bad_request", f"the prompt: {error}"))

    async def wait_news(self, timeout_s: float) -> bool:
        """Until something happened that is worth a look; False if the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def hang_up(self) -> None:
        """The client is gone: nobody wants the rest."""
        if not self.is_gone:
            self.is_gone = True
            self.withdraw()
            self._news.set()

    def stall(self) -> None:
        """The client reads too slowly, or not at all."""
        if not self.is_stalled:
            self.is_stalled = True
            self.withdraw()
            self._news.set()
            self._stalled()

    def withdraw(self) -> None:
        """Cancels at the head what has not ended."""
        for choice in self.choices:
            if choice.ask.owner is not None:
                self._link.cancel(choice.ask)

    # ------------------------------------------------------------ AskOwner

    def tokens_came(self, ask: Ask, count: int) -> None:
        choice = self._ask_to_choice[ask]
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
            self._first_came()
        if choice.reason is None and choice.feed():
            self._link.cancel(ask, is_complete=True)
            self._open -= 1
        elif choice.lag > self._lag_limit:
            self.stall()

    def ask_finished(self, ask: Ask, reason: str) -> None:
        choice = self._ask_to_choice[ask]
        ask.owner = None
        if choice.reason is None:
            choice.finish(reason)
            self._open -= 1

    def ask_failed(self, ask: Ask, failure: Failure) -> None:
        ask.owner = None
        if self._ask_to_choice[ask].reason is None:
            self._end(failure)

    def batch_over(self) -> None:
        self._news.set()

    def _end(self, failure: Failure) -> None:
        self.failure = self.failure or failure
        self.withdraw()
        self._news.set()
