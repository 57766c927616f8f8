"""Effects: what a rank's state machine asks of the world. Values only; the step actor carries them out in order."""

from __future__ import annotations

import dataclasses

from engine.core.request import RequestKey
from transport.messages import Message


@dataclasses.dataclass(frozen=True, slots=True)
class ToHead:
    """Send to the head."""

    message: Message
    blob: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class ToPeer:
    """Send over the pair stream `link`; a link that is gone meanwhile swallows it."""

    link: int
    message: Message
    blob: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class StartPush:
    """Write local blocks into a decode rank's blocks, then report with (key, first, count).

    `pages` and `remote_pages` pair up; `slabs` is (local, remote) for the last push of a prompt.
    """

    key: RequestKey
    link: int
    first: int
    count: int
    pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    slabs: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class DropLink:
    """Close the pair stream `link`: it can not be trusted any more. `why` is for the log."""

    link: int
    why: str


Effect = ToHead | ToPeer | StartPush | DropLink
