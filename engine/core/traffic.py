"""Traffic: totals of the head's requests and tokens since it started, and the latencies that clients have seen.

Pure: times are passed in. The frame with the tokens of a step is the only thing here that comes thousands of times a
second; it costs a few additions, whatever the number of its rows.

How an interval between tokens is known without a look at rows. A decode rank says RequestStarted right before the
frame with a request's first token. So of a frame's rows, as many are first ones as starts came since the rank's frame
before; the others were there before, and that frame brings their next token. What they have waited is the time since
the rank's last *turn*: since it last had rows that were there before, or since it began to have any. The second half
is for a rank that was idle: then all rows of a frame are first ones, nothing is counted, and the clock begins. A frame
with first ones only, between two steps of a busy rank, moves no clock: the others have got nothing.

That is exact for every row that was in the turn before. A request's second token counts with the rank's interval,
whenever its first came; what is between these two is measured apart, as the hand-off.
"""

from __future__ import annotations

import dataclasses

from engine.core.latency import LatencyCounts
from engine.core.slo import LatencyWatch
from engine.core.stages import StageTimes
from transport.messages import RequestEnds, RequestFinished, RequestStarted, TrafficReport


@dataclasses.dataclass(slots=True, eq=False)
class Turns:
    """The turns of one life of a decode rank.

    Attributes:
        starts: RequestStarted since its last frame.
        first_waits_from: when those of them were accepted that are first attempts somebody waits for, seconds.
        turn_at: see the module, seconds; None before the first frame.
        streams: requests that have started there and are not off it.
    """

    starts: int = 0
    first_waits_from: list[float] = dataclasses.field(default_factory=list)
    turn_at: float | None = None
    streams: set[int] = dataclasses.field(default_factory=set)


class Traffic:
    """See the module.

    Args:
        ttft_limit_us, itl_limit_us: what an operator wants, for 90 % of first tokens and 99 % of intervals; 0: nothing.

    Attributes:
        accepted: submissions that were taken; each is finished, failed, cancelled, or still here.
        refused: answered without being taken.
        cancelled: given up by their clients, also by leaving, or by operators; complete ones among them.
        stages: how long those took that were answered whole by their first attempt.
        prompt_tokens, cached_tokens: of started attempts, the cached ones among the others.
        generated_tokens: that reached somebody who waited for them.
        push_failures: attempts that were lost on the way from the prefill rank to the decode rank.
    """

    def __init__(self, *, ttft_limit_us: int = 0, itl_limit_us: int = 0) -> None:
        self.accepted = self.refused = self.finished = self.failed = self.cancelled = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.push_failures = 0
        self.stages = StageTimes()
        self._reasons = {"stop": 0, "length": 0}
        self._complete = 0
        self.ttft, self.itl, self.handoff = LatencyCounts(), LatencyCounts(), LatencyCounts()
        self._ttft_limit_us, self._itl_limit_us = ttft_limit_us, itl_limit_us
        self._watches = (
            LatencyWatch("time to the first token, p90,", "slo.ttft_p90", 0.9, ttft_limit_us, self.ttft.counts),
            LatencyWatch("time between tokens, p99,", "slo.itl_p99", 0.99, itl_limit_us, self.itl.counts),
        )

    def note_start(self, turns: Turns, number: int, started: RequestStarted, first_wait_from: float | None) -> None:
        """A prompt is computed, and its first token comes next. `first_wait_from`: see Turns."""
        turns.starts += 1
        turns.streams.add(number)
        if first_wait_from is not None:
            turns.first_waits_from.append(first_wait_from)
        self.prompt_tokens += started.prompt_tokens
        self.cached_tokens += started.cached_tokens

    def note_turn(self, turns: Turns, num_rows: int, now: float) -> None:
        """A frame of a rank brought tokens for so many rows. `generated_tokens` is the caller's to count: it knows
        which of them somebody waits for."""
        again = num_rows - turns.starts
        if again > 0 and turns.turn_at is not None:
            self.itl.add(1e6 * (now - turns.turn_at), again)
        if again > 0 or len(turns.streams) <= turns.starts:
            turns.turn_at = now
        if turns.starts:
            for accepted_at in turns.first_waits_from:
                self.ttft.add(1e6 * (now - accepted_at))
            turns.first_waits_from.clear()
            turns.starts = 0

    def note_finish(self, finished: RequestFinished) -> None:
        """A request was answered whole, and somebody waited for it."""
        self.finished += 1
        self._reasons[finished.reason] += 1
        if finished.handoff_us > 0:
            self.handoff.add(finished.handoff_us)

    def note_complete(self) -> None:
        """One of the cancelled ones was complete: its requester had all that it wanted."""
        self._complete += 1

    def mark(self, now: float) -> None:
        """Lets the limits' minute go on; call it about every second."""
        for watch in self._watches:
            watch.mark(now)

    def missed_limits(self, now: float) -> tuple[str, ...]:
        """One sentence for each limit that was missed over the last minute."""
        return tuple(why for watch in self._watches if (why := watch.why_missed(now)) is not None)

    def report(self, now: float, *, waiting: int, waiting_tokens: int, running: int) -> TrafficReport:
        """All of it."""
        return TrafficReport(
            at_ms=int(1e3 * now),
            accepted=self.accepted,
            refused=self.refused,
            finished=self.finished,
            failed=self.failed,
            cancelled=self.cancelled,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            running=running,
            ttft=self.ttft.counts(),
            itl=self.itl.counts(),
            handoff=self.handoff.counts(),
            ttft_limit_us=self._ttft_limit_us,
            itl_limit_us=self._itl_limit_us,
            push_failures=self.push_failures,
            ends=RequestEnds(
                stop=self._reasons["stop"] + self._complete,
                length=self._reasons["length"],
                abort=self.cancelled - self._complete,
                error=self.failed,
            ),
            times=self.stages.told(),
        )
