"""What ranks may rely on when they exchange rows: each rule a function that raises AssertionError where it is broken.

All ranks lie in this process, as in `test_exchange.py`, and each half of an exchange is a launch of its own: so any
order that several processes could have can be chosen. See `test_pact.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.nvlink import Expiry, NvlinkExchange
from kernels import reference
from kernels.exchange import ExchangeConfig
from kernels.mailbox import COMBINE, DISPATCH, LIMIT, MailboxLayout
from tests.kernels.test_exchange import draw_rows, enter, open_group

CONFIG = ExchangeConfig()
EXPERTS, CAPACITY, ROWS, HIDDEN, TOP_K, STEPS = 8, 2, 1, 32, 2, 2
COUNTS = (1, 0, 1)


class Kernels(NamedTuple):
    """The modules of both phases, as they are or with a bug in them."""

    exchange: ModuleType
    combine: ModuleType


class _Round:
    """What all ranks bring to a layer in a step, and what must come of it."""

    def __init__(self, layout: MailboxLayout, number: int, device: torch.device) -> None:
        self.own = draw_rows(layout, COUNTS, EXPERTS, number, device)
        self.joined = reference.dispatch_rows(*zip(*self.own, strict=True), ROWS)
        self.there = torch.cat([torch.arange(ROWS, device=device) < count for count in COUNTS])
        random_ = torch.Generator().manual_seed(number)
        shape = (len(COUNTS), len(COUNTS) * ROWS, HIDDEN)
        self.parts = list(torch.randn(shape, generator=random_).to(device))

    def sums(self, place: int, layout: MailboxLayout) -> Tensor:
        at = slice(place * ROWS, place * ROWS + COUNTS[place])
        parts = [part[at] for part in self.parts]
        return reference.combine_rows(parts, place, self.own[place][1], None, layout.dtype, layout.part_type)


def _open(device: torch.device, layers: int, membership: int = 1) -> tuple[MailboxLayout, list[NvlinkExchange]]:
    layout = MailboxLayout(len(COUNTS), layers, CAPACITY, HIDDEN, TOP_K, torch.float32)
    return layout, open_group(layout, device, membership)


def _send(kernels: Kernels, member: NvlinkExchange, phase: int, layer: int, round_: _Round) -> None:
    box = member.mailbox
    if phase == DISPATCH:
        kernels.exchange.send_rows(box, layer, ROWS, *round_.own[box.rank], CONFIG)
    else:
        kernels.combine.send_parts(box, layer, ROWS, round_.parts[box.rank], round_.joined[1], None, CONFIG)


def _receive(kernels: Kernels, member: NvlinkExchange, phase: int, layer: int, round_: _Round) -> Sequence[Tensor]:
    box = member.mailbox
    if phase == DISPATCH:
        found: Sequence[Tensor] = kernels.exchange.receive_rows(box, layer, ROWS, CONFIG)
        return found
    out = torch.full((COUNTS[box.rank], HIDDEN), torch.nan, device=box.memory.device)
    part = round_.parts[box.rank]
    return [kernels.combine.receive_parts(box, layer, ROWS, part, round_.joined[1], None, out, None, CONFIG)]


def _check(found: Sequence[Tensor], phase: int, place: int, round_: _Round, layout: MailboxLayout) -> None:
    if phase == COMBINE:
        assert torch.equal(found[0], round_.sums(place, layout)), f"place {place} has other sums"
        return
    x, ids, weights = found
    assert torch.equal(ids, round_.joined[1]), f"place {place} has other choices"
    assert torch.equal(x[round_.there], round_.joined[0][round_.there]), f"place {place} has other rows"
    assert torch.equal(weights[round_.there], round_.joined[2][round_.there]), f"place {place} has other weights"


def _run_rank(
    kernels: Kernels, member: NvlinkExchange, phases: Sequence[int], rounds: Sequence[_Round], sent: list[list[int]]
) -> Iterator[tuple[int, int] | None]:
    """One rank's steps. Yields what it would wait for, as phase and number, or None where it may just be slow."""
    layout, place = member.mailbox.layout, member.mailbox.rank
    came: Sequence[Tensor] | None = None
    for number, round_ in enumerate(rounds):
        layer = number % layout.layers
        for phase in phases:
            if phase == DISPATCH and came is not None:
                # The last moment at which the rows of the exchange before may be read.
                _check(came, phase, place, rounds[number - 1], layout)
            _send(kernels, member, phase, layer, round_)
            sent[place][phase] = number
            yield phase, number
            found = _receive(kernels, member, phase, layer, round_)
            if phase == DISPATCH:
                came = found
            else:
                _check(found, phase, place, round_, layout)
            yield None


def check_delays(kernels: Kernels, device: torch.device, layers: int, kind: str, seed: int) -> None:
    """Whoever is slow, all get what was put for them: nothing is overwritten before it was read, or taken too early.

    One rank after the other is held up for as long as the others can go on without it.
    """
    chance = random.Random(seed)
    layout, group = _open(device, layers)
    rounds = [_Round(layout, number, device) for number in range(STEPS * layers)]
    phases = {"dispatch": [DISPATCH], "combine": [COMBINE], "both": [DISPATCH, COMBINE]}[kind]
    sent = [[-1, -1] for _ in group]
    ranks = [_run_rank(kernels, member, phases, rounds, sent) for member in group]
    waits: dict[int, tuple[int, int] | None] = dict.fromkeys(range(len(ranks)))
    slow = 0
    while waits:
        ready = [place for place, wait in waits.items() if wait is None or all(s[wait[0]] >= wait[1] for s in sent)]
        if chance.random() < 0.2:
            slow = chance.randrange(len(ranks))
        place = chance.choice([place for place in ready if place != slow] or ready)
        try:
            waits[place] = next(ranks[place])
        except StopIteration:
            del waits[place]
    for member in group:
        assert member.find_expiry() is None, f"place {member.mailbox.rank} has waited in vain: {member.find_expiry()}"


def check_sticky(kernels: Kernels, device: torch.device) -> None:
    """Once a wait has expired nothing is put, awaited or told any more, also if what was missing has come meanwhile."""
    layout, group = _open(device, 2)
    rounds = [_Round(layout, number, device) for number in range(2)]
    for place in (0, 2):
        _send(kernels, group[place], DISPATCH, 0, rounds[0])
    _receive(kernels, group[0], DISPATCH, 0, rounds[0])
    told = group[0].find_expiry()
    assert told == Expiry(0, 0, DISPATCH, 1), f"it says {told}"
    _send(kernels, group[1], DISPATCH, 0, rounds[0])
    before = [member.mailbox.memory.clone() for member in group]
    for phase, layer in ((COMBINE, 0), (DISPATCH, 1), (COMBINE, 1)):
        _send(kernels, group[0], phase, layer, rounds[layer])
        _receive(kernels, group[0], phase, layer, rounds[layer])
    assert group[0].find_expiry() == told, f"it said {told}, and then {group[0].find_expiry()}"
    for member, memory in zip(group, before, strict=True):
        assert torch.equal(member.mailbox.memory, memory), f"something was put to place {member.mailbox.rank}"


def check_blame(kernels: Kernels, device: torch.device) -> None:
    """The word of the least exchange names who is to blame, though others have waited for others in vain."""
    layout, group = _open(device, 3)
    rounds = [_Round(layout, number, device) for number in range(3)]
    _exchange(kernels, group, 0, rounds[0])
    # Place 2 dies while it puts: place 0 has got its rows, and place 1 has not.
    group[2].mailbox.addresses[1] = 0
    for member in group:
        _send(kernels, member, DISPATCH, 1, rounds[1])
    _check(_receive(kernels, group[0], DISPATCH, 1, rounds[1]), DISPATCH, 0, rounds[1], layout)
    _send(kernels, group[0], DISPATCH, 2, rounds[2])
    _receive(kernels, group[1], DISPATCH, 1, rounds[1])
    _receive(kernels, group[0], DISPATCH, 2, rounds[2])
    words = [member.find_expiry() for member in group[:2]]
    assert words[0] in [Expiry(0, 2, DISPATCH, 1), Expiry(0, 2, DISPATCH, 2)], f"place 0 says {words[0]}"
    assert words[1] == Expiry(0, 1, DISPATCH, 2), f"place 1 says {words[1]}"
    assert min(word[:3] for word in words if word is not None) == words[1][:3]


def check_memberships(kernels: Kernels, device: torch.device) -> None:
    """What was put for an older membership is not taken for what a newer one waits for."""
    layout, group = _open(device, 2)
    old, new = (_Round(layout, number, device) for number in range(2))
    for phase in (DISPATCH, COMBINE):
        enter(group, 5 + 2 * phase, range(3))
        _exchange(kernels, group, 0, old, phase)
        enter(group, 6 + 2 * phase, range(3))
        for member in group[:2]:
            _send(kernels, member, phase, 0, new)
        _receive(kernels, group[0], phase, 0, new)
        told = group[0].find_expiry()
        assert told == Expiry(0, 0, phase, 2), f"beside what place 2 has put in an older membership it says {told}"
    enter(group, 9, range(3))
    for phase in (DISPATCH, COMBINE):
        _exchange(kernels, group, 0, new, phase)


def check_numbers(kernels: Kernels, device: torch.device) -> None:
    """What was put in an older exchange is not taken for what a newer one of the same half waits for."""
    for phase in (DISPATCH, COMBINE):
        layout, group = _open(device, 2)
        rounds = [_Round(layout, number, device) for number in range(3)]
        for layer in range(2):
            _exchange(kernels, group, layer, rounds[layer], phase)
        for member in group[:2]:
            _send(kernels, member, phase, 0, rounds[2])
        _receive(kernels, group[0], phase, 0, rounds[2])
        told = group[0].find_expiry()
        assert told == Expiry(1, 0, phase, 2), f"beside what place 2 has put a step ago it says {told}"


def check_sizes(kernels: Kernels, device: torch.device) -> None:
    """Ranks that disagree about the places for rows do not take one another's."""
    layout, group = _open(device, 2)
    round_ = _Round(layout, 0, device)
    kernels.exchange.send_rows(group[2].mailbox, 0, CAPACITY, *round_.own[2], CONFIG)
    for member in group[:2]:
        _send(kernels, member, DISPATCH, 0, round_)
    _receive(kernels, group[0], DISPATCH, 0, round_)
    told = group[0].find_expiry()
    assert told == Expiry(0, 0, DISPATCH, 2), f"beside rows of a larger step it says {told}"


def check_lost(kernels: Kernels, device: torch.device) -> None:
    """Without a place that is lost the others go on, and rows that it once had are not there."""
    layout, group = _open(device, 2)
    round_ = _Round(layout, 0, device)
    _exchange(kernels, group, 0, round_)
    enter(group, 2, (0, 1))
    for place in (0, 1):
        _send(kernels, group[place], DISPATCH, 0, round_)
    for place in (0, 1):
        ids = _receive(kernels, group[place], DISPATCH, 0, round_)[1]
        assert torch.equal(ids[: 2 * ROWS], round_.joined[1][: 2 * ROWS])
        assert (ids[2 * ROWS :] == -1).all(), "rows of the place that is lost are still there"
        assert group[place].find_expiry() is None, f"place {place} has waited for one that is lost"


def _exchange(
    kernels: Kernels, group: Sequence[NvlinkExchange], layer: int, round_: _Round, phase: int = DISPATCH
) -> None:
    """One that all take part in, checked."""
    for member in group:
        _send(kernels, member, phase, layer, round_)
    for member in group:
        found = _receive(kernels, member, phase, layer, round_)
        _check(found, phase, member.mailbox.rank, round_, member.mailbox.layout)
        assert member.find_expiry() is None, f"place {member.mailbox.rank}: {member.find_expiry()}"


def check_sleeps(kernels: Kernels, device: torch.device, slow: int) -> None:
    """The same with real streams: `slow` sleeps between what came and its reading, and the others run ahead."""
    layout, group = _open(device, 2)
    rounds = [_Round(layout, number, device) for number in range(6)]
    # Loads all kernels: a stream that waits for another might keep one from being loaded.
    _exchange(kernels, group, 0, rounds[0])
    torch.cuda._sleep(1)
    enter(group, 2, range(3))
    for member in group:
        kernels.exchange.dispatch_rows(member.mailbox, 0, ROWS, *rounds[0].own[member.mailbox.rank], CONFIG)
        torch.cuda.synchronize(device)
    enter(group, 3, range(3))
    for member in group:
        member.mailbox.state[LIMIT] = int(20e9)
    seen = [[torch.empty_like(part) for part in round_.joined] for round_ in rounds for _ in group]
    torch.cuda.synchronize(device)
    for place, member in enumerate(group):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for number, round_ in enumerate(rounds):
                own = round_.own[place]
                found = kernels.exchange.dispatch_rows(member.mailbox, number % 2, ROWS, *own, CONFIG)
                if place == slow:
                    torch.cuda._sleep(4_000_000)
                for to, part in zip(seen[number * len(group) + place], found, strict=True):
                    to.copy_(part)
    torch.cuda.synchronize(device)
    for at, found in enumerate(seen):
        _check(found, DISPATCH, at % len(group), rounds[at // len(group)], layout)
    for member in group:
        assert member.find_expiry() is None, f"place {member.mailbox.rank} has waited in vain: {member.find_expiry()}"
