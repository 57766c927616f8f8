"""Who pushed how much to whom: counted, packed, read back, and added up over ranks."""

from __future__ import annotations

import os
import random
import struct

import pytest

from engine.core.pushes import LAST_PUSHES, PushMeter, build_links, read_pairs
from engine.errors import RemoteProtocolError
from transport.messages import HEAD_FROM_RANK, OPERATOR_FROM_HEAD, LinksReport, PairCounts
from transport.wire import FrameReader, encode_frame

FRESH = int(os.environ.setdefault("FRESH_SEED", str(random.SystemRandom().randrange(1 << 30))))
"""The same in every process of a test run: parameters have to be."""
PAIR_KINDS, LINK_KINDS = "iqqiii", "iiiqqiii"


def unpack(kinds: str, count: int, blob: bytes) -> list[tuple[int, ...]]:
    """Rows out of columns, as the messages' docstrings have them."""
    columns, at = [], 0
    for kind in kinds:
        columns.append(struct.unpack_from(f"<{count}{kind}", blob, at))
        at += count * struct.calcsize(kind)
    assert at == len(blob)
    return list(zip(*columns, strict=True))


def pack(rows: list[tuple[int, ...]]) -> bytes:
    columns = list(zip(*rows, strict=True)) or [()] * len(PAIR_KINDS)
    packed = zip(PAIR_KINDS, columns, strict=True)
    return b"".join(struct.pack(f"<{len(rows)}{kind}", *column) for kind, column in packed)


@pytest.mark.parametrize("seed", range(FRESH, FRESH + 20))
def test_counts_are_what_happened(seed: int) -> None:
    rng = random.Random(seed)
    meter = PushMeter()
    peers = rng.sample(range(1000), rng.randrange(1, 6))
    lasts: dict[int, list[int]] = {}
    wanted: dict[int, list[int]] = {}
    flying: list[int] = []
    for _ in range(600):
        if flying and rng.random() < 0.5:
            peer = flying.pop(rng.randrange(len(flying)))
            row = wanted[peer]
            if rng.random() < 0.8:
                num_bytes, took_us = rng.randrange(1, 1 << 33), rng.randrange(1, 100_000)
                meter.land(peer, num_bytes, took_us)
                row[0], row[1] = row[0] + num_bytes, row[1] + 1
                lasts.setdefault(peer, []).append(took_us)
            else:
                meter.fail(peer)
                row[3] += 1
            meter.end(peer)
            row[2] -= 1
        else:
            peer = rng.choice(peers)
            meter.start(peer)
            flying.append(peer)
            wanted.setdefault(peer, [0, 0, 0, 0])[2] += 1
        if rng.random() < 0.1:
            linked = rng.sample(peers, rng.randrange(len(peers) + 1))
            for peer in linked:
                wanted.setdefault(peer, [0, 0, 0, 0])
            message, blob = meter.build(7, 3, linked)
            rows = []
            for peer, row in sorted(wanted.items()):
                last = sorted(lasts.get(peer, [])[-LAST_PUSHES:])
                # Nearest rank: the smallest that 99 of 100 are not above.
                rows.append((peer, *row, last[-(-99 * len(last) // 100) - 1] if last else 0))
            assert message == PairCounts(7, 3, len(rows)) and unpack(PAIR_KINDS, len(rows), blob) == rows
            read = read_pairs(message, blob, set(peers))
            assert read.generation == 3
            assert list(zip(*(column.tolist() for column in read.columns), strict=True)) == rows


def test_numbers_that_do_not_fit_their_columns_are_told_as_the_most_that_does() -> None:
    meter = PushMeter()
    meter.land(5, 1 << 60, 1 << 40)
    message, blob = meter.build(0, 1, ())
    assert unpack(PAIR_KINDS, message.count, blob) == [(5, 1 << 60, 1, 0, 0, 2**31 - 1)]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(9, 1, 1, 0, 0, 1)], "rank 9, which is no decode rank"),
        ([(-1, 1, 1, 0, 0, 1)], "rank -1, which is no decode rank"),
        ([(4, 1, 1, 0, 0, 1), (5, 1, 1, 0, 0, 1), (4, 1, 1, 0, 0, 1)], "rank 4 twice"),
        ([(4, 1, 1, 0, 0, 1), (5, -1, 1, 0, 0, 1)], "less than no pushes"),
        ([(4, 1, 1, -1, 0, 1)], "less than no pushes"),
    ],
)
def test_counts_that_can_not_be_are_refused(rows: list[tuple[int, ...]], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        read_pairs(PairCounts(0, 1, len(rows)), pack(rows), {4, 5})


def test_the_report_has_all_ranks_in_order_and_fits_its_frame() -> None:
    first, second = [(6, 1, 2, 3, 4, 5), (4, 1 << 40, 20, 0, 0, 9)], [(5, 7, 7, 0, 1, 0)]
    rank_to_rows = {
        3: read_pairs(PairCounts(3, 2, 1), pack(second), {4, 5, 6}),
        1: read_pairs(PairCounts(1, 1, 2), pack(first), {4, 5, 6}),
        2: read_pairs(PairCounts(2, 1, 0), b"", {4, 5, 6}),
    }
    report, blob = build_links(rank_to_rows)
    assert report == LinksReport(3)
    assert unpack(LINK_KINDS, 3, blob) == [(1, 1, *first[1]), (1, 1, *first[0]), (3, 2, *second[0])]
    assert build_links({}) == (LinksReport(0), b"")
    for accepts, frame in ((OPERATOR_FROM_HEAD, (report, blob)), (HEAD_FROM_RANK, (PairCounts(1, 1, 2), pack(first)))):
        reader = FrameReader(accepts)
        for part in encode_frame(*frame):
            reader.feed(part)
        (got,) = reader.take()
        assert (got.message, bytes(got.blob)) == frame
