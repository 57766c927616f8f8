"""Opens what a batch reads and writes, and checks that the files can be used together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import sys
import tempfile

from engine.batch.options import STDIO, BatchOptions
from engine.batch.output import RecordFile, errors_path, open_output, open_stdout
from engine.batch.resume import Earlier
from engine.errors import ConfigError

SPOOL_BYTES = 1 << 20


@dataclasses.dataclass(slots=True)
class InputFile:
    """The open input.

    Attributes:
        fd: read from here on.
        path: to open it once more for counting; None if it has no name.
        regular: it has an end, and can be read twice.
        start: offset of the first byte that is ours.
    """

    fd: int
    path: str | None
    regular: bool
    start: int

    @property
    def is_terminal(self) -> bool:
        """Whether somebody types it."""
        return os.isatty(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: equal for two names of one file."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def rewind(self) -> None:
        """Goes back to the first byte. Only for regular files."""
        os.lseek(self.fd, self.start, os.SEEK_SET)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFiles:
    """All files of a run. `errors` is None if error records go into the output."""

    input: InputFile
    output: RecordFile
    errors: RecordFile | None


def open_files(options: BatchOptions, closing: contextlib.ExitStack) -> BatchFiles:
    """Opens and locks everything; `closing` closes it.

    Raises:
        ConfigError: a file can not be opened, or two of them are the same.
        OutputBusy: another run writes one of them.
    """
    source = _open_input(options.input, closing)
    for name, path in ((options.output, options.output), (f"--errors {options.errors}", options.errors)):
        # First of all: "exists already, remove it" would be bad advice about an input.
        if source.regular and path not in (None, STDIO) and _identity(path) == source.identity:
            raise ConfigError(f"{name}: is the input too; name another file")
    if options.output == STDIO:
        if options.resume:
            raise ConfigError("--resume needs an output file: pass -o FILE")
        output = open_stdout()
        path = options.errors
    else:
        output = closing.enter_context(open_output(options.output, resume=options.resume))
        path = options.errors or errors_path(options.output)
    if source.regular and output.identity == source.identity:
        raise ConfigError("the output is the input too; name another file with -o")
    errors = None
    if path is not None:
        if _identity(path) == output.identity:
            raise ConfigError(f"--errors {path}: is the output too; leave --errors out or name another file")
        errors = open_output(path, resume=options.resume)
        closing.push(errors.__exit__)
        closing.callback(errors.remove_if_empty)
        if source.regular and errors.identity == source.identity:
            raise ConfigError(f"{path}: is for errors, and is the input too; name another file with --errors")
    if options.resume:
        for file in (output, errors):
            if file is not None:
                file.cut_torn_line()
    return BatchFiles(source, output, errors)


def _identity(path: str | None) -> tuple[int, int] | None:
    try:
        status = os.stat(path or "")
    except OSError:
        return None
    return status.st_dev, status.st_ino


def read_earlier(options: BatchOptions, files: BatchFiles) -> Earlier:
    """What an earlier run has done, if this one continues it. Blocks.

    Raises:
        ConfigError: a file is not one that `engine batch` wrote.
    """
    earlier = Earlier()
    if options.resume:
        files.output.read_earlier(earlier, keep_errors=options.keep_errors)
        if options.keep_errors and files.errors is not None:
            files.errors.read_earlier(earlier, keep_errors=True)
    return earlier


def open_spool() -> int:
    """A nameless file on disk for an input that has to be read twice and can not be."""
    with tempfile.TemporaryFile(prefix="engine-batch-") as file:
        return os.dup(file.fileno())


def copy_some(source: int, target: int) -> bool:
    """Copies one piece; False at the end of the source. Blocks."""
    data = os.read(source, SPOOL_BYTES)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return bool(data)


def _open_input(path: str, closing: contextlib.ExitStack) -> InputFile:
    if path == STDIO:
        try:
            fd = sys.stdin.fileno()
        except (AttributeError, OSError, ValueError) as error:  # AttributeError: started with stdin closed
            raise ConfigError("there is no standard input; pass -i FILE") from error
    else:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{path}: can not be read ({os.strerror(error.errno or 0)})") from error
        closing.callback(os.close, fd)
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{path}: is a directory")
    regular = stat.S_ISREG(mode)
    start = os.lseek(fd, 0, os.SEEK_CUR) if regular else 0
    return InputFile(fd, None if path == STDIO or not regular else path, regular, start)
