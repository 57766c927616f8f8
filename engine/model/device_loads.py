"""DeviceLoads: what gates have counted on a device, brought to the host now and then without waiting for it.

A gate's kernel adds its rows to `DeviceTables.counts`, so counting costs no launch. A snapshot is a copy behind the
steps that are enqueued, into pinned memory; it is looked at once its event has passed. A step that was void and runs
again counts its rows again.

How long experts took nobody measures: a graph has no clock inside, and events in it would cost what they measure. It is
reckoned by bytes instead: a step reads its dense weights, and the experts that its rows touch. So many are expected to
be touched as rows that choose for themselves would. What attention reads is left out, so at long contexts the figure is
too high by as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.model.device_slots import DevicePart
from engine.model.dispatch import Load

_WRAP = 1 << 32


class DeviceLoads:
    """Belongs to the thread that enqueues steps."""

    def __init__(
        self,
        parts: Sequence[DevicePart],
        *,
        dense_bytes: int,
        every_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        parts: of the model, borrowed.
        dense_bytes: that a step reads whatever its rows are.
        every_s: a snapshot is taken at most so often.
        now: a clock, seconds.
        """
        self._parts = tuple(parts)
        self._dense_bytes = dense_bytes
        self._every_s = every_s
        self._now = now
        self._on_gpu = bool(parts) and parts[0].tables.counts.device.type == "cuda"
        self._hosts = [
            torch.empty(part.tables.counts.shape, dtype=torch.int32, pin_memory=self._on_gpu) for part in parts
        ]
        self._before = [np.zeros(tuple(part.tables.counts.shape), np.int64) for part in parts]
        self._arrived = torch.cuda.Event() if self._on_gpu else None
        self._due = 0.0
        self._steps = self._device_us = 0
        self._pending: tuple[int, int] | None = None

    def note_step(self, *, device_us: int, has_rows: bool) -> None:
        """A step has ended: what it took, and whether it had rows of this rank."""
        if has_rows:
            self._steps += 1
        self._device_us += device_us

    def look(self) -> tuple[list[Load], int] | None:
        """Takes a snapshot if one is due and none is on its way. Never waits.

        Returns:
            Per part what experts did, and in how many steps; None if nothing has come since the last call.
        """
        taken = None
        if self._pending is not None and (self._arrived is None or self._arrived.query()):
            steps, device_us = self._pending
            self._pending = None
            taken = self._fold(steps, device_us), steps
        if self._pending is None and self._steps and self._now() >= self._due:
            for part, host in zip(self._parts, self._hosts, strict=True):
                host.copy_(part.tables.counts, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._pending = self._steps, self._device_us
            self._steps = self._device_us = 0
            self._due = self._now() + self._every_s
        return taken

    def _fold(self, steps: int, device_us: int) -> list[Load]:
        loads, touched = [], []
        for at, (part, host) in enumerate(zip(self._parts, self._hosts, strict=True)):
            counted = host.numpy().astype(np.int64)
            load = Load(part.pool)
            load.counts = (counted - self._before[at]) % _WRAP
            load.pairs = int(load.counts.sum())
            self._before[at] = counted
            loads.append(load)
            touched.append(count_touched(load, part, steps) * part.pool.info.slot_bytes)
        total = sum(touched) + self._dense_bytes
        for load, size in zip(loads, touched, strict=True):
            load.expert_ns = round(device_us * 1000 * size / total) if total else 0
        return loads


def count_touched(load: Load, part: DevicePart, steps: int) -> float:
    """How many experts a step touches on this rank, as rows of all places that choose for themselves would have it."""
    rows = load.counts / steps * part.tables.shares
    return float(-np.expm1(-rows).sum())
