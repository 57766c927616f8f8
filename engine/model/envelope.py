"""Envelope: host memory by which a launched step is told its rows and tells what it brought, with the events around it.

It is out from the launch of its step until what that brought has been read. Whoever launches another step meanwhile
takes another one, so nothing is overwritten that the device still reads, or that nobody has read yet. There are as many
as steps were ever under way at a time; on a CUDA device they are pinned, and made once.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.stream_calls import StreamCalls

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]


Use = Literal["told", "brought", "table"]
QUEUED = 2
"""Steps under way as a rule."""
WORDS = 4096
"""Of each use to begin with: more than steps of 64 sequences with drafts need. Pinning more takes the driver long."""


class Sheet(NamedTuple):
    """int32[lines, columns] without gaps: one memory as a tensor and as an array, and where it is."""

    tensor: Tensor
    words: Words
    address: int
    num_bytes: int


class Envelope:
    """See the module.

    Attributes:
        began, ended: events with timing; None on a CPU.
        calls: by which it is sent and brought back; None on a CPU.
    """

    def __init__(self, calls: StreamCalls | None = None, *, on_gpu: bool) -> None:
        """Args: `calls`: borrowed; where there are none, torch copies and records."""
        self.calls = calls
        self._on_gpu = on_gpu
        self._held: dict[Use, Tensor] = {use: self._make(WORDS) for use in ("told", "brought", "table")}
        self._sheets: dict[tuple[Use, int, int], Sheet] = {}
        self.began = torch.cuda.Event(enable_timing=True, blocking=True) if on_gpu else None
        self.ended = torch.cuda.Event(enable_timing=True, blocking=True) if on_gpu else None
        self._began_at = self._ended_at = 0
        if self.began is not None and self.ended is not None:
            # The first record makes them.
            self.began.record()
            self.ended.record()
            self._began_at, self._ended_at = self.began.cuda_event, self.ended.cuda_event

    def begin(self) -> None:
        """Records `began`."""
        if self.calls is not None:
            self.calls.record(self._began_at)
        elif self.began is not None:
            self.began.record()

    def end(self) -> None:
        """Records `ended`."""
        if self.calls is not None:
            self.calls.record(self._ended_at)
        elif self.ended is not None:
            self.ended.record()

    def sheet(self, use: Use, lines: int, columns: int) -> Sheet:
        """Sheets of one use are in one memory, whatever their size: a step has one of each."""
        found = self._sheets.get((use, lines, columns))
        if found is None:
            tensor = self._reach(use, lines * columns)[: lines * columns].view(lines, columns)
            found = Sheet(tensor, tensor.numpy(), tensor.data_ptr(), tensor.numel() * tensor.itemsize)
            self._sheets[use, lines, columns] = found
        return found

    def write_table(self, table: Ints) -> Tensor:
        """int32, a copy of a table of pages. There are too many sizes of them to keep a sheet for each."""
        placed = self._reach("table", table.size)[: table.size].view(table.shape)
        placed.numpy()[:] = table
        return placed

    def _reach(self, use: Use, words: int) -> Tensor:
        """The memory of a use, at least so large. The device reads an old one no more: nothing of this step is out."""
        if self._held[use].numel() < words:
            self._held[use] = self._make(2 * words)
            self._sheets = {key: sheet for key, sheet in self._sheets.items() if key[0] != use}
        return self._held[use]

    def _make(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=self._on_gpu)


class Envelopes:
    """Those that are not out. Belongs to the thread that launches."""

    def __init__(self, device: torch.device) -> None:
        """`device`: reads and writes them, on the stream that is its present one here."""
        self._device = device
        self._calls = None
        if device.type == "cuda":
            self._calls = StreamCalls(torch.cuda.current_stream(device).cuda_stream)
        self._free = [self._make() for _ in range(QUEUED)]

    def take(self) -> Envelope:
        """One that nobody has."""
        return self._free.pop() if self._free else self._make()

    def give(self, envelope: Envelope) -> None:
        """Back, once its step has ended and what it brought was read."""
        self._free.append(envelope)

    def _make(self) -> Envelope:
        if self._device.type != "cuda":
            return Envelope(on_gpu=False)
        # Events are of one device, and whoever makes a rank's may have another one as its present one.
        with torch.cuda.device(self._device):
            return Envelope(self._calls, on_gpu=True)
