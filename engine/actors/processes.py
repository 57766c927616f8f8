"""A rank as a process: the port through which the supervisor sees it, and its row in the process table."""

from __future__ import annotations

import dataclasses
import signal
from typing import Protocol

import trio

from engine.actors.phases import PhaseReport
from engine.core.pushes import PairRows
from engine.errors import Overflow, PeerGone
from transport.messages import Message, RankReady, RankSnapshot, RankStarting, Role
from transport.stream import FrameStream


class RankProcess(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int: ...

    @property
    def control(self) -> trio.abc.Stream: ...

    async def run_output(self) -> None:
        """Carries its stderr to the log until its end."""
        ...

    async def wait(self) -> int:
        """Until the process is confirmed dead. Its status, negative for a signal; again at once when asked again."""
        ...

    def kill(self) -> None:
        """SIGKILL to the process and its children. No error if it is dead."""
        ...

    def last_lines(self) -> tuple[str, ...]:
        """The end of its stderr."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """One rank in the process table."""

    rank: int
    role: Role
    state: str = "starting"
    phase: str = ""
    generation: int = 0
    pid: int = 0
    restarts: int = 0
    heard_at: float = 0.0
    snapshot: RankSnapshot | None = None
    pairs: PairRows | None = None
    """What a prefill rank has pushed to whom, newest."""
    ready: RankReady | None = None
    link: FrameStream | None = None
    process: RankProcess | None = None
    phases: PhaseReport | None = None
    progress: RankStarting | None = None
    """The last word of a start-up phase of the present life, and when that phase began."""
    phase_at: float = 0.0
    scope: trio.CancelScope = dataclasses.field(default_factory=trio.CancelScope)
    """Of the present life, or of the pause before the next one."""
    why: str | None = None
    """First reason for the end of the present life."""

    def end(self, why: str) -> None:
        if self.why is None:
            self.why = why
        self.scope.cancel()

    def tell(self, message: Message, blob: bytes = b"") -> None:
        if self.link is None:
            return
        try:
            self.link.post(message, blob)
        except (Overflow, PeerGone) as error:
            self.end(f"does not take commands: {error}")


def describe_status(status: int) -> str:
    """`exited with status 1`, `killed by SIGKILL`."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exited with status {status}"
