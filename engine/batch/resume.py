"""Earlier: what an earlier run on the same output has already done, read back from its files."""

from __future__ import annotations

import msgspec

from engine.batch.identity import IdTable
from engine.batch.lines import LINE_LIMIT, LineReader
from engine.errors import ConfigError

_SLICE_LINES = 1024
_SLICE_BYTES = 8 << 20
RECORD_LIMIT = 4 * LINE_LIMIT
"""A record repeats labels and text of its line; JSON escapes may make them longer."""


class _Engine(msgspec.Struct):
    digest: str


class _Error(msgspec.Struct):
    type: str


class _Record(msgspec.Struct):
    custom_id: str
    engine: _Engine
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Record)


class Earlier:
    """Ids that need no work any more. Answers are known by id; failures by id and digest, so an edited one is tried."""

    def __init__(self) -> None:
        self._answered = IdTable()
        self._failed = IdTable()

    @property
    def num_answered(self) -> int:
        return len(self._answered)

    def answered(self, custom_id: str) -> str | None:
        """The digest of the line that was answered under this id, or None."""
        return self._answered.get(custom_id)

    def is_failed(self, custom_id: str, digest: str) -> bool:
        """Whether this line failed, and failures are kept."""
        return self._failed.get(custom_id) == digest

    def read(self, fd: int, name: str, *, keep_errors: bool) -> None:
        """Reads a file of records from its start. Blocks; memory is bounded but for the tables of ids.

        Args:
            fd: open for reading, positioned at the start, ends with a whole line.
            name: of the file, for errors.
            keep_errors: failures count as done.

        Raises:
            ConfigError: a line that is not a record of `engine batch`.
        """
        reader = LineReader(fd, line_limit=RECORD_LIMIT)
        while not reader.ended:
            for line in reader.read(_SLICE_LINES, _SLICE_BYTES):
                try:
                    record = _decoder.decode(line.data)
                    int(record.engine.digest, 16)
                except (msgspec.DecodeError, RecursionError, ValueError) as error:
                    raise ConfigError(
                        f"{name}:{line.number}: not a record of engine batch ({error});"
                        " --resume needs a file that it wrote"
                    ) from error
                if record.error is None:
                    self._answered.add(record.custom_id, record.engine.digest)
                elif keep_errors:
                    self._failed.add(record.custom_id, record.engine.digest)
