"""A stub head in a thread of its own, for tests that are not a part of its loop."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from tests.console.stubhead import Scene, StubHead
from transport.link import FrameLink
from transport.messages import AskStatus, Message

Head = TypeVar("Head", bound=StubHead)


class NumberedHead(StubHead):
    """Each round has its number as the cluster's name, which the console shows in its first line.

    Attributes:
        asked_at: when each round's first question came; [0] is the greeting.
        unsent: bytes of the answers before that had not left by then.
    """

    def __init__(self, directory: str, scene: Scene) -> None:
        super().__init__(directory, scene)
        self.asked_at: list[float] = []
        self.unsent: list[int] = []

    def _answer(self, link: FrameLink, message: Message, is_admin: bool) -> None:
        if isinstance(message, AskStatus):
            name = f"c{len(self.asked_at):05d}"
            self.asked_at.append(time.monotonic())
            self.unsent.append(link.pending_bytes)
            self.scene.status = msgspec.structs.replace(self.scene.status, cluster=name)
        super()._answer(link, message, is_admin)


@contextlib.contextmanager
def serve_head(make: Callable[[str], Head]) -> Iterator[Head]:
    """A head of a directory answers until the block ends. What it has heard may be read by any thread; its scene's
    fields may be replaced, not changed."""
    with tempfile.TemporaryDirectory(prefix="stub-", dir="/tmp") as directory:
        head = make(directory)
        is_up = threading.Event()
        loop = asyncio.new_event_loop()
        end = asyncio.Event()

        async def serve() -> None:
            await head.start()
            is_up.set()
            await end.wait()
            await head.stop()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="stub head", daemon=True)
        thread.start()
        try:
            assert is_up.wait(10), "the stub head did not begin"
            yield head
        finally:
            loop.call_soon_threadsafe(end.set)
            thread.join(10)
            loop.close()


def serve_scene(scene: Scene) -> contextlib.AbstractContextManager[StubHead]:
    """The same for a scene."""
    return serve_head(lambda directory: StubHead(directory, scene))
