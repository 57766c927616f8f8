"""Reports with blobs as arrays, and what is found in them at once: loads of experts, pushes between ranks. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.messages import HeatReport, LinksReport, Role

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Heat:
    """A HeatReport and its blob as arrays. n ranks in the order of `PartReport.ranks`, s slots each."""

    report: HeatReport
    rank_load: Floats
    """[n, layers]"""
    hottest: npt.NDArray[np.int32]
    """[n, layers]"""
    slots: npt.NDArray[np.int32]
    """[n, s]"""
    next_slots: npt.NDArray[np.int32]
    """[n, s]"""
    load: Floats
    """[experts]"""
    moved: npt.NDArray[np.uint8]
    """[n, s]"""
    at: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A LinksReport as columns, one row for each pair of ranks."""

    prefill: Ints
    generation: Ints
    decode: Ints
    bytes: Ints
    """Since this life of the prefill rank began."""
    pushes: Ints
    inflight: Ints
    failed: Ints
    p99_us: Ints
    rates: npt.NDArray[np.float64]
    """Bytes in a second over the last `history.RATE_S` or so; 0 before two reports were heard."""
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Hot:
    """The fullest layer of one rank: `load` of the layer's mean over ranks, and the expert that weighs most there (-1:
    none). `mean` is the rank's load over all layers; 1 is even."""

    layer: int
    expert: int
    load: float
    mean: float
    pool: Role
    group: int


def read_heat(report: HeatReport, blob: memoryview | bytes, at: float) -> Heat:
    """The arrays of a HeatReport; `wire` has checked the blob's length. They share its memory."""
    n, layers, slots, experts = report.ranks, report.layers, report.slots_per_rank, report.experts
    offset = 0

    def column(dtype: str, *shape: int) -> npt.NDArray[np.generic]:
        nonlocal offset
        count = math.prod(shape)
        array = np.frombuffer(blob, dtype=dtype, count=count, offset=offset).reshape(shape)
        offset += array.nbytes
        return array

    return Heat(
        report=report,
        rank_load=column("<f4", n, layers),  # type: ignore[arg-type]
        hottest=column("<i4", n, layers),  # type: ignore[arg-type]
        slots=column("<i4", n, slots),  # type: ignore[arg-type]
        next_slots=column("<i4", n, slots),  # type: ignore[arg-type]
        load=column("<f4", experts),  # type: ignore[arg-type]
        moved=column("u1", n, slots),  # type: ignore[arg-type]
        at=at,
    )


def find_hots(heat: Heat, ranks: Sequence[int]) -> dict[int, Hot]:
    """The fullest layer of each of `ranks`, which are those of the report in its order."""
    report = heat.report
    layers = heat.rank_load.argmax(axis=1)
    rows = np.arange(len(layers))
    columns = (layers, heat.hottest[rows, layers], heat.rank_load[rows, layers], heat.rank_load.mean(axis=1))
    return {
        rank: Hot(layer, expert, load, mean, report.pool, report.group)
        for rank, layer, expert, load, mean in zip(ranks, *(column.tolist() for column in columns), strict=False)
    }


def read_pairs(report: LinksReport, blob: memoryview | bytes, at: float) -> Pairs:
    """The columns of a LinksReport, without rates."""
    count = report.count
    offset = 0
    columns: list[Ints] = []
    for dtype in ("<i4", "<i4", "<i4", "<i8", "<i8", "<i4", "<i4", "<i4"):
        array = np.frombuffer(blob, dtype=dtype, count=count, offset=offset)
        offset += array.nbytes
        columns.append(array.astype(np.int64))
    prefill, generation, decode, size, pushes, inflight, failed, p99_us = columns
    return Pairs(prefill, generation, decode, size, pushes, inflight, failed, p99_us, np.zeros(count), at)


def pair_rates(new: Pairs, old: Pairs) -> npt.NDArray[np.float64]:
    """Bytes in a second of each row of `new`; 0 for pairs (lives of ranks) that `old` does not have."""
    rates = np.zeros(len(new.bytes))
    seconds = new.at - old.at
    if seconds <= 0:
        return rates

    def keys(pairs: Pairs) -> Ints:
        found: Ints = (pairs.prefill << 44) | ((pairs.generation & 0xFFFFFF) << 20) | pairs.decode
        return found

    _, here, there = np.intersect1d(keys(new), keys(old), assume_unique=True, return_indices=True)
    rates[here] = np.maximum(0, new.bytes[here] - old.bytes[there]) / seconds
    return rates
