"""The head's real desk for operators in a thread, with answers of a test's choice behind it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import trio

from tests.faces.desk_rig import Desk, make_acts, make_answers, open_desk


class DeskThread:
    """What serves, and how a test reaches into its loop."""

    def __init__(self, directory: str, desk: Desk, token: trio.lowlevel.TrioToken) -> None:
        self.directory = directory
        self.answers = desk.answers
        self._token = token

    def add_event(self, name: str, text: str) -> None:
        trio.from_thread.run_sync(
            self.answers.events.add, "info", name, text, 1_700_000_000_123, trio_token=self._token
        )


@contextlib.contextmanager
def desk_thread(directory: object, acts: dict[str, Any] | None = None, **answers: Any) -> Iterator[DeskThread]:
    """Listens in `directory` until the end of the block."""
    started = threading.Event()
    made: list[DeskThread] = []
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:
            stop.append(lambda: token.run_sync_soon(scope.cancel))
            async with open_desk(directory, make_answers(**answers), make_acts(**(acts or {}))) as desk:  # type: ignore[arg-type]
                made.append(DeskThread(str(directory), desk, token))
                started.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert started.wait(10)
        yield made[0]
    finally:
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()
