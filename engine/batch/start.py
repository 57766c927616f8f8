"""run_batch: opens the files of a batch, runs it, and says what kept it from beginning."""

from __future__ import annotations

import contextlib
import os

import trio

from engine.actors.client import ClientRefused
from engine.batch.ending import exit_code_of
from engine.batch.files import open_files, read_earlier
from engine.batch.options import STDIO, BatchOptions
from engine.batch.reporter import Reporter
from engine.batch.runner import Batch
from engine.batch.source import EngineSource
from engine.errors import EngineError, PeerGone


async def run_batch(options: BatchOptions, source: EngineSource, reporter: Reporter | None = None) -> int:
    """Runs a batch; errors are said on stderr.

    Returns:
        The exit code: 0 done, 1 some lines failed, 2 usage, 3 stopped and resumable, 4 engine not reachable, 5 refused,
        130 second signal.
    """
    if reporter is None:
        # Where requests are typed, a line that is rewritten would be in the way.
        is_typed = options.input == STDIO and os.isatty(0)
        reporter = Reporter("line" if is_typed and options.progress == "auto" else options.progress)
    with contextlib.ExitStack() as closing:
        try:
            files = open_files(options, closing)
            earlier = await trio.to_thread.run_sync(read_earlier, options, files)
            return await Batch(options, source, reporter, files, earlier).run()
        except EngineError as error:
            is_absent = source.shared and isinstance(error, PeerGone) and not isinstance(error, ClientRefused)
            reporter.note(f"engine batch: no engine answers ({error})" if is_absent else f"engine batch: {error}")
            if is_absent and source.advice:
                reporter.note(source.advice)
            return exit_code_of(error)
