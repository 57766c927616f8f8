"""Batch: one run, from its first line to its exit code, with its files open.

Tasks: one reads and prepares lines, one keeps the connection to the head, one submits, one writes, one looks at the
clock, one listens for signals. What they share is `Flight` (the jobs), `RecordWriter` (the records) and `Meter` (the
counts). The run ends when no line is left anywhere, or a little after `stop` was called.
"""

from __future__ import annotations

import contextlib
import math
import signal
from pathlib import Path

import msgspec
import trio

from engine.actors.client import HeadClient
from engine.batch.connection import first_leaf, keep_connection
from engine.batch.ending import STOPPED, Ending, resume_hint
from engine.batch.files import BatchFiles
from engine.batch.flight import Flight
from engine.batch.intake import Intake
from engine.batch.meter import Meter, describe_summary
from engine.batch.options import BatchOptions
from engine.batch.prepare import InputChanged, Preparer
from engine.batch.reporter import Reporter
from engine.batch.resume import Earlier
from engine.batch.source import EngineSource, Served, load_served
from engine.batch.writer import RecordWriter
from engine.errors import EngineError, RequestRefused
from transport.messages import HeadHello

READY_BYTES = 64 << 20
"""What may wait to be submitted, whatever the window says in lines."""
TICK_S = 0.25
MARK_S = 1.0
LAST_WRITE_S = 1.0
"""After a stop, at least this long for records that are finished."""
LAST_READ_S = 1.0
"""After the loss of an engine that nothing waits for: for the end of the input to show."""


class SecondSignal(Exception):
    """The operator asked twice: nothing is waited for any more."""


class Batch:
    """A run with its files open. Made and run once by `run_batch`."""

    def __init__(
        self, options: BatchOptions, source: EngineSource, reporter: Reporter, files: BatchFiles, earlier: Earlier
    ) -> None:
        self._options = options
        self._source = source
        self._reporter = reporter
        self._files = files
        self._earlier = earlier
        self._meter = Meter()
        self._writer = RecordWriter(files.output, files.errors, ordered=options.order == "input", written=self._changed)
        self._flight = Flight(options, self._meter, self._writer, self._settled)
        self._intake: Intake
        self._served: Served | None = None
        self._begun = False
        self._is_waiting = False
        self._stopped: str | None = None
        self._deadline = math.inf
        self._grace_until = math.inf
        self._change = trio.Event()
        self._idle = trio.Event()
        self._starting = trio.CancelScope()
        self._reading = trio.CancelScope()

    # ------------------------------------------------------------ the whole run

    async def run(self) -> int:
        """Runs it; returns the exit code.

        Raises:
            EngineError: it could not begin.
        """
        problem: EngineError | None = None
        dropped = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen_for_signals)
                if not self._source.shared and self._reporter.form != "none":
                    self._reporter.note("engine batch: starting an engine")
                with self._starting:
                    async with self._source.open() as path:
                        await self._run_with(path)
                nursery.cancel_scope.cancel()
        except* SecondSignal:
            dropped = True
        except* EngineError as group:
            problem = first_leaf(group)
        if problem is not None and not dropped:
            if not self._begun:
                raise problem
            self._reporter.note(f"engine batch: {problem}")
            self._stopped = self._stopped or "engine lost"
        return self._finish(dropped=dropped)

    async def _run_with(self, path: str) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._keep_connection, path)
            self._begun = True
            self._files.output.fresh = False
            if self._files.input.is_terminal:
                self._reporter.note("engine batch: reading requests from the terminal, one a line; Ctrl-D ends them")
            if self._files.errors is not None and not self._options.keep_errors:
                self._files.errors.truncate()  # its lines are tried again
            self._meter.started_at = trio.current_time()
            self._deadline = trio.current_time() + (self._options.deadline or math.inf)
            for task in (self._write_records, self._read_lines, self._count_lines, self._watch_clock):
                nursery.start_soon(task)
            nursery.start_soon(self._flight.run_submissions)
            await self._idle.wait()
            self._writer.release()
            await self._drain_writer()
            nursery.cancel_scope.cancel()

    def _finish(self, *, dropped: bool) -> int:
        ending = Ending(
            stopped=self._stopped,
            dropped=dropped,
            all_read=self._begun and self._intake.all_read,
            complete=self._begun and self._is_complete() and not self._writer.backlog,
            failed=self._meter.num_errors > 0,
        )
        code = ending.exit_code()
        if self._begun:
            try:
                self._writer.sync()
            except OSError as error:
                self._reporter.note(f"engine batch: output: {error}")
                code = code or STOPPED
            if not ending.is_quiet:
                self._say_summary(code, "second signal" if dropped else self._stopped)
        if ending.can_resume:
            self._reporter.note(resume_hint(self._options))
        return code

    def _say_summary(self, code: int, stopped: str | None) -> None:
        model = self._flight.model
        summary = self._meter.summary(trio.current_time(), exit_code=code, stopped=stopped, model=model)
        self._reporter.summary(describe_summary(summary), summary)
        if self._options.summary is not None:
            try:
                Path(self._options.summary).write_bytes(msgspec.json.encode(summary) + b"\n")
            except OSError as error:
                self._reporter.note(f"engine batch: --summary {self._options.summary}: {error.strerror}")

    # ------------------------------------------------------------ stopping

    def stop(self, why: str, *, at_once: bool = False) -> None:
        """Reads no more and begins no more. What runs may finish within the grace, or is dropped now."""
        self._stopped = self._stopped or why
        self._reading.cancel()
        if not self._begun:
            self._starting.cancel()
            return
        self._flight.close()
        if at_once:
            self._flight.drop()
        self._grace_until = min(self._grace_until, trio.current_time() + self._options.grace)
        self._changed()

    def _is_complete(self) -> bool:
        """Whether every line of the input has its record, from this run or an earlier one."""
        return self._intake.all_read and self._meter.read == self._meter.skipped + self._meter.ended

    def _changed(self) -> None:
        """Something ended, was written or was read: there may be room, or nothing left."""
        self._change.set()
        self._flight.nudge()
        if self._begun and self._flight.num_pending == 0 and (self._intake.all_read or self._stopped is not None):
            self._idle.set()

    async def _wait_change(self) -> None:
        if self._change.is_set():
            self._change = trio.Event()
        await self._change.wait()

    def _settled(self) -> None:
        """A line has its record."""
        meter, budget = self._meter, self._options.max_errors
        if self._stopped is None and budget.is_spent(meter.num_errors, meter.ended, final=self._is_complete()):
            self._reporter.note(f"engine batch: {meter.num_errors} lines failed; --max-errors allows no more")
            self.stop("too many errors")
        self._changed()

    async def _listen_for_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) as signals:
            stops = 0
            async for number in signals:
                if number == signal.SIGUSR1:
                    self._show_status(asked=True)
                    continue
                stops += 1
                if stops > 1:
                    raise SecondSignal
                self._reporter.note(
                    f"stopping: {self._flight.num_begun} requests may finish within {self._options.grace:g} s;"
                    " once more to drop them"
                    if self._begun
                    else "stopping before the engine was ready"
                )
                self.stop("signal")

    async def _drain_writer(self) -> None:
        """Until everything is written; after a stop not for ever, since nobody may be reading."""
        deadline = math.inf
        if self._stopped is not None:
            deadline = max(self._grace_until, trio.current_time() + LAST_WRITE_S)
        with trio.move_on_at(deadline):
            while self._writer.backlog and self._stopped not in ("output closed", "output failed"):
                await self._wait_change()

    # ------------------------------------------------------------ tasks

    async def _read_lines(self) -> None:
        with self._reading:
            try:
                if self._options.strict:
                    await self._check_all_lines()
                while not self._intake.all_read:
                    room = self._read_room()
                    if room <= 0:
                        await self._wait_change()
                        continue
                    slice_ = await self._intake.read(room)
                    self._meter.read += len(slice_.items) + slice_.skipped
                    self._meter.skipped += slice_.skipped
                    for item in slice_.items:
                        self._flight.add(item)
                    self._changed()
            except InputChanged as error:
                self._reporter.note(f"engine batch: {error}")
                self.stop("input changed", at_once=True)
            except OSError as error:
                self._reporter.note(f"engine batch: input: {error}")
                self.stop("input failed")

    async def _check_all_lines(self) -> None:
        await self._intake.check_all(self._flight.add)
        if self._meter.num_errors:
            self._meter.read = self._meter.num_errors
            self._reporter.note(f"engine batch: --strict: {self._meter.num_errors} bad lines; nothing was run")
            self.stop("bad lines", at_once=True)
            await trio.lowlevel.checkpoint()  # `stop` has cancelled the reading

    def _read_room(self) -> int:
        """Lines that may be read now."""
        options, flight, writer = self._options, self._flight, self._writer
        if flight.ready_bytes >= READY_BYTES or writer.backlog > options.inflight + options.window:
            return 0
        if options.order == "input":
            return options.window + 1 - (self._intake.places - writer.next_place)
        return max(1, min(options.window, 2 * options.inflight)) - len(flight.ready)

    async def _count_lines(self) -> None:
        self._meter.total = await self._intake.count_lines()

    async def _write_records(self) -> None:
        try:
            await self._writer.run()
        except BrokenPipeError:
            self.stop("output closed", at_once=True)
        except OSError as error:
            self._reporter.note(f"engine batch: output: {error}")
            self.stop("output failed", at_once=True)

    async def _watch_clock(self) -> None:
        shown_at = trio.current_time()
        marked_at = -math.inf
        while True:
            now = trio.current_time()
            if now >= marked_at + MARK_S:
                self._meter.mark(now)
                marked_at = now
            if self._reporter.form != "none" and now >= shown_at + self._reporter.every_s:
                self._show_status()
                shown_at = now
            with contextlib.suppress(EngineError):  # the connection is going; its own task will say so
                self._flight.check_stalls(now)
            if now >= self._deadline:
                self._expire()
            if now >= self._grace_until:
                self._flight.drop()
                self._changed()
            await trio.sleep(TICK_S)

    def _expire(self) -> None:
        """The deadline is over: what has no answer gets its record, and so does what is still to be read."""
        self._deadline = math.inf
        self._reporter.note("engine batch: --deadline is over; lines without an answer are recorded as batch_expired")
        self._intake.expire()
        self._flight.expire()
        if self._intake.may_not_end:
            self.stop("deadline")
        self._changed()

    def _show_status(self, *, asked: bool = False) -> None:
        if not self._begun:
            self._reporter.note("engine batch: starting the engine")
            return
        now = trio.current_time()
        running, oldest = len(self._flight.flying), self._flight.oldest(now)
        self._reporter.status(
            self._meter.status(now, running=running, oldest=oldest),
            self._meter.progress(now, running=running, oldest=oldest) | {"all_read": self._intake.all_read},
            asked=asked,
        )

    # ------------------------------------------------------------ the connection

    async def _keep_connection(self, path: str, task_status: trio.TaskStatus[None]) -> None:
        problem = await keep_connection(
            path,
            self._flight,
            name=self._options.label,
            retry_for=self._options.retry_for if self._source.shared else 0.0,
            greeted=self._greeted,
            attach=self._attach,
            detach=self._detach,
            task_status=task_status,
        )
        # The input may just be at its end, without anything left to ask for.
        with trio.move_on_after(LAST_READ_S):
            while not self._is_complete() and not self._flight.num_pending:
                await self._wait_change()
        if not self._is_complete():
            self._reporter.note(f"engine batch: the engine is lost: {problem}")
            self.stop("engine lost", at_once=True)

    def _attach(self, client: HeadClient) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._reporter.note("engine batch: the engine is back")
        self._flight.attach(client)

    def _detach(self, client: HeadClient, problem: EngineError) -> None:
        self._flight.detach(client)
        if self._source.shared and self._flight.num_pending:
            self._is_waiting = True
            self._reporter.note(
                f"engine batch: the engine went away ({problem}); waiting for it up to {self._options.retry_for:g} s"
            )
        self._changed()

    async def _greeted(self, hello: HeadHello) -> None:
        """Takes what the head says of its model; the first time, makes what depends on it."""
        if self._served is not None:
            if hello.model != self._served.model:
                raise RequestRefused("bad_request", f"the engine serves {hello.model} now, not {self._served.model}")
            return
        options = self._options
        served = await trio.to_thread.run_sync(load_served, hello, options, self._source)

        def make_preparer() -> Preparer:
            return Preparer(
                served.codec,
                served.limits,
                defaults=options.defaults,
                earlier=self._earlier,
                seed=options.seed,
                any_model=options.any_model,
                priority=options.priority,
            )

        self._served = served
        self._flight.model, self._flight.eos_id = served.name, served.codec.eos_id
        self._intake = Intake(self._files.input, make_preparer)
