"""RecordFile: an append-only file of records that is never torn by us and never written by two runs.

Each record is one `write`. A regular file is locked for the run, a torn last line of an earlier run can be cut off, and
when a write fails in the middle (disk full) the half record is cut off too. Methods block; the writer calls them in a
thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from types import TracebackType
from typing import Self

from engine.batch.options import STDIO
from engine.batch.resume import Earlier
from engine.errors import ConfigError, RequestRefused

_TAIL_BYTES = 64 << 10


class OutputBusy(RequestRefused):
    """Another run writes this file."""

    def __init__(self, name: str) -> None:
        super().__init__("busy", f"{name}: another engine batch is writing this file")


class RecordFile:
    """An open output. Made by `open_output` or `open_stdout`.

    Attributes:
        name: for messages.
        dirty: something was written since the last `sync`.
        fresh: this run made the file and has not begun; a run that never begins leaves none behind.
    """

    def __init__(self, fd: int, name: str, *, regular: bool, owned: bool, fresh: bool = False) -> None:
        self.name = name
        self.dirty = False
        self.fresh = fresh
        self._fd = fd
        self._regular = regular
        self._owned = owned

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: equal for two names of one file."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def write(self, record: bytes) -> None:
        """Appends one record, which ends with a line end.

        Raises:
            BrokenPipeError: nobody reads any more.
            OSError: it could not be written; a regular file ends with a whole record all the same.
        """
        view = memoryview(record)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            if self._regular and len(view) < len(record):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - (len(record) - len(view)))
            raise
        self.dirty = True

    def sync(self) -> None:
        """Makes what was written survive a crash of the machine. Nothing to do for pipes and terminals."""
        if self._regular and self.dirty:
            self.dirty = False
            os.fdatasync(self._fd)

    def cut_torn_line(self) -> None:
        """Cuts off what follows the last line end: half a record of a run that crashed."""
        if not self._regular:
            return
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            place = os.pread(self._fd, end - start, start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._fd, end)

    def read_earlier(self, earlier: Earlier, *, keep_errors: bool) -> None:
        """Reads the file's records into `earlier`; its last line must be whole (see `cut_torn_line`).

        Raises:
            ConfigError: see `Earlier.read`.
        """
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            earlier.read(fd, self.name, keep_errors=keep_errors)
        finally:
            os.close(fd)

    def truncate(self) -> None:
        """Forgets every record in it."""
        if self._regular:
            os.ftruncate(self._fd, 0)

    def remove_if_empty(self) -> None:
        """Takes a file away that nothing was written to: an errors file without errors says nothing."""
        self.fresh = False
        if self._regular and self._owned and os.fstat(self._fd).st_size == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.name)

    def close(self) -> None:
        """Gives the lock up and closes; standard output stays open."""
        if self.fresh:
            self.remove_if_empty()
        if self._owned:
            os.close(self._fd)
            self._owned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_output(path: str, *, resume: bool) -> RecordFile:
    """Opens and locks an output file, which is not changed. Without `resume` it must be new or empty.

    Raises:
        ConfigError: it can not be opened, or has content and `resume` is not set.
        OutputBusy: another run holds it.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    fresh = False
    try:
        try:
            fd = os.open(path, flags | os.O_EXCL, 0o666)
            fresh = True
        except FileExistsError:
            fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: can not be opened for writing ({os.strerror(error.errno or 0)})") from error
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if regular:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputBusy(path) from None
            if os.fstat(fd).st_size and not resume:
                raise ConfigError(f"{path}: exists already; continue it with --resume, or remove it")
        elif resume:
            raise ConfigError(f"{path}: not a regular file, so there is nothing to resume")
        return RecordFile(fd, path, regular=regular, owned=True, fresh=fresh)
    except BaseException:
        os.close(fd)
        raise


def open_stdout() -> RecordFile:
    """Standard output as it is."""
    fd = sys.stdout.fileno()
    return RecordFile(fd, STDIO, regular=stat.S_ISREG(os.fstat(fd).st_mode), owned=False)


def errors_path(output: str) -> str:
    """Where error records go when nobody says: `out.jsonl` has `out.errors.jsonl` beside it."""
    root, extension = os.path.splitext(output)
    return f"{root}.errors{extension or '.jsonl'}"
