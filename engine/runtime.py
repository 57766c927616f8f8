"""The runtime directory: where a head and its clients of one host meet, and the lock that keeps a second head out.

    requests.sock (0600)  read.sock (0660)  admin.sock (0600)  rank-<n>-<life>.sock  head.json  head.lock  engine.log

The lock is a `flock`, so it ends with its holder however that dies: whatever else lies here then is stale by
definition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError, EngineError
from engine.version import VERSION


class HeadRuns(EngineError):
    """Another head owns the directory."""


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeDirectory:
    """Paths within the directory. Making one of these touches nothing."""

    path: str

    @property
    def requests_socket(self) -> str:
        return os.path.join(self.path, "requests.sock")

    @property
    def read_socket(self) -> str:
        return os.path.join(self.path, "read.sock")

    @property
    def admin_socket(self) -> str:
        return os.path.join(self.path, "admin.sock")

    @property
    def log_file(self) -> str:
        return os.path.join(self.path, "engine.log")

    @property
    def head_file(self) -> str:
        return os.path.join(self.path, "head.json")

    def rank_socket(self, rank: int, generation: int) -> str:
        """Where a decode rank listens in one of its lives; a new life never meets the socket of the one before."""
        return os.path.join(self.path, f"rank-{rank}-{generation}.sock")

    def prepare(self) -> None:
        """Creates the directory (0700), or checks that an existing one is safe to use.

        Raises:
            ConfigError: it belongs to somebody else, others may write to it, or it is not a directory.
        """
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            found = os.lstat(self.path)
        except OSError as error:
            raise ConfigError(f"runtime directory {self.path}: {error.strerror}; choose another with --dir") from error
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"runtime directory {self.path} is not a directory; choose another with --dir")
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"runtime directory {self.path} belongs to uid {found.st_uid}, not to you; choose another with --dir"
            )
        if found.st_mode & 0o022:
            raise ConfigError(f"runtime directory {self.path} can be written by others; run chmod go-w {self.path}")

    @contextlib.contextmanager
    def own(self, *, is_private: bool = False) -> Iterator[None]:
        """Holds the directory as its head: clears what a dead head left, writes head.json, removes it at the end.

        Args:
            is_private: nobody else uses the directory, so it goes too; its maker may have been killed before it could.

        Raises:
            HeadRuns: another head is alive.
        """
        lock = os.open(os.path.join(self.path, "head.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HeadRuns(f"an engine is running in {self.path} ({self._owner()}); engine down ends it") from None
            self._clear()
            Path(self.head_file).write_text(
                json.dumps({"schema": 1, "pid": os.getpid(), "version": VERSION}), encoding="utf-8"
            )
            try:
                yield
            finally:
                self._clear()
                if is_private:
                    os.unlink(os.path.join(self.path, "head.lock"))
                    with contextlib.suppress(OSError):  # somebody put something else into it
                        os.rmdir(self.path)
        finally:
            os.close(lock)

    def _clear(self) -> None:
        for name in os.listdir(self.path):
            is_socket = name.endswith(".sock") and stat.S_ISSOCK(os.lstat(os.path.join(self.path, name)).st_mode)
            if is_socket or name == "head.json":
                os.unlink(os.path.join(self.path, name))

    def _owner(self) -> str:
        try:
            return f"pid {int(json.loads(Path(self.head_file).read_text(encoding='utf-8'))['pid'])}"
        except (OSError, ValueError, KeyError, TypeError):
            return "it is just starting"
