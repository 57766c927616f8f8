"""The checkers: what must hold in every run, whatever the faults. They watch; they decide nothing.

`Auditor` is told of every turn of every rank, every frame between ranks, every write that lands and every death. It
keeps its own books of who may write what, from the frames alone, and so needs no part of the code that it checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.core.arena import Arena
from engine.core.decode import DecodeSide
from engine.core.pages import PageState
from engine.core.prefill import PrefillSide
from engine.errors import LocalProtocolError
from engine.sim.device import SimDevice
from engine.sim.violation import Violation
from transport.messages import (
    EpochEnded,
    Message,
    PagesGranted,
    PagesPushed,
    PrefillCommitted,
    TurnCommitted,
)

CHECKERS: Final = {
    "tags": "a step reads pages and slab of its own ids, all of them, in their last state (device)",
    "ends": "the end that a row is given lies within its pages and the model's length (device)",
    "pages": "every page and slab is in one state, held once, and all add up (every turn)",
    "in-flight": "memory that a submitted step names is not free (every turn)",
    "quarantine": "granted memory is set aside until its epoch ended or its writer is dead (every turn and grant)",
    "late-write": "no write lands outside an open epoch of its writer (every landing)",
    "epochs": "a rank never uses an epoch's number again (every grant)",
    "commit-data": "a commit follows its data: all pages and the slab have landed (every commit, every PagesPushed)",
    "commit-once": "an epoch is committed once, and not after its end (every commit)",
    "commit-count": "the pages told of add up to the pages committed (every commit)",
    "bounds": "queues and steps stay within their limits (every turn, four times a second)",
    "heartbeat": "a rank speaks to the head every snapshot_s, whatever its device does (four times a second)",
    "stream": "a client's tokens have no gap, no repetition, no wrong id, and the right end (every token)",
    "answers": "each request is answered once, by what was allowed to happen to it (every answer)",
    "liveness": "every request is answered within its time once faults are over; every wait has an end",
    "leftover": "after the last answer all memory is free again or cached, and all tables are empty",
    "one-run": "a seed gives one run (--check)",
}
LIVENESS: Final = frozenset({"liveness", "heartbeat", "group-liveness"})
"""Checkers whose finding means that something did not happen in time."""
RESERVED_STATES = (PageState.GRANTED, PageState.QUARANTINED)


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """One life of one rank."""

    role: str
    rank: int
    generation: int

    @property
    def name(self) -> str:
        return f"{self.role[0]}{self.rank}.{self.generation}"


@dataclasses.dataclass(slots=True, eq=False)
class Epoch:
    """What one grant allows, as its frames say. `blocks`: pages, then `num_pages` + slab."""

    number: int
    request: int
    writer: Life
    blocks: tuple[int, ...]
    landed: set[int] = dataclasses.field(default_factory=set)
    told: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Books:
    """Of one life: the epochs that it has granted and that are open, and which of them each block belongs to."""

    num_pages: int
    used: set[int] = dataclasses.field(default_factory=set)
    open: dict[int, Epoch] = dataclasses.field(default_factory=dict)
    block_to_epoch: dict[int, Epoch] = dataclasses.field(default_factory=dict)


class Auditor:
    """See the module.

    Args:
        is_thorough: look at all memory in every turn; else at all of it now and then, and at what changed always.
    """

    def __init__(self, *, is_thorough: bool, decode_rows: int, chunk_tokens: int, max_waiting: int) -> None:
        self._period = 1 if is_thorough else 256
        self._decode_rows = decode_rows
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._books: dict[Life, Books] = {}
        self.num_landings = 0
        self.num_commits = 0
        self.num_turns = 0
        """That were committed."""

    # ------------------------------------------------------------ lives

    def born(self, life: Life, num_pages: int) -> None:
        self._books[life] = Books(num_pages)

    def died(self, life: Life) -> None:
        """Its death is certain: it writes no more, and what it granted is gone with it."""
        self._books.pop(life, None)
        for books in self._books.values():
            for epoch in [epoch for epoch in books.open.values() if epoch.writer == life]:
                self._close(books, epoch)

    def num_open_epochs(self, writer: Life) -> int:
        """Epochs that only this writer, or its death, can end."""
        return sum(epoch.writer == writer for books in self._books.values() for epoch in books.open.values())

    # ------------------------------------------------------------ turns

    def turn(self, life: Life, side: object, device: SimDevice, count: int) -> None:
        """After a turn of a rank's step loop, the `count`-th of this life."""
        gauges_due = count % self._period == 0
        if gauges_due:
            assert isinstance(side, DecodeSide | PrefillSide)
            try:
                side.check()
            except LocalProtocolError as error:
                raise Violation("pages", f"{life.name}: {error}") from error
            self._check_quarantine(life, side)
            waiting = side.gauges().waiting
            if waiting > self._max_waiting:
                raise Violation("bounds", f"{life.name}: {waiting} requests wait (limit {self._max_waiting})")
        if not gauges_due and (not device.queue or device.queue[-1].is_checked):
            return  # the newest is checked last
        for ticket in device.queue:
            if ticket.is_checked and not gauges_due:
                continue
            ticket.is_checked = True
            plan, rows = ticket.plan, len(ticket.columns.positions)
            ids = sum([chunk.num_tokens for chunk in plan.chunks]) if plan.chunks else 0
            if rows > self._decode_rows or ids > self._chunk_tokens:
                raise Violation("bounds", f"{life.name}: step {plan.step} has {rows} rows and {ids} ids")
            if gauges_due:
                assert isinstance(side, DecodeSide | PrefillSide)
                for chunk in plan.chunks:
                    self._check_named(life, plan.step, chunk.slab, chunk.pages, side.arena)
                    if chunk.base is not None:
                        open_page = () if chunk.base.page < 0 else (chunk.base.page,)
                        self._check_named(life, plan.step, chunk.base.slab, open_page, side.arena)
                    if chunk.keep >= 0:
                        self._check_named(life, plan.step, chunk.keep, (), side.arena)
                roster = ticket.columns.roster
                for slab, pages in zip(roster.slabs.tolist(), roster.pages, strict=True):
                    self._check_named(life, plan.step, slab, pages, side.arena)

    def _check_named(self, life: Life, step: int, slab: int, pages: Sequence[int], arena: Arena) -> None:
        if arena.slabs.state_of(slab) is PageState.FREE:
            raise Violation("in-flight", f"{life.name}: step {step} names slab {slab}, which is free")
        page = arena.pages.find(pages, PageState.FREE)
        if page is not None:
            raise Violation("in-flight", f"{life.name}: step {step} names page {page}, which is free")

    def _check_quarantine(self, life: Life, side: DecodeSide | PrefillSide) -> None:
        books = self._books[life]
        pages = [block for block in books.block_to_epoch if block < books.num_pages]
        if len(pages) < len(books.block_to_epoch) and side.arena.pages.find_other(pages, PageState.GRANTED) is None:
            slabs = [block - books.num_pages for block in books.block_to_epoch if block >= books.num_pages]
            if side.arena.slabs.find_other(slabs, PageState.GRANTED) is None:
                return  # as a rule; else one by one
        for block, epoch in books.block_to_epoch.items():
            is_page = block < books.num_pages
            state = side.arena.pages.state_of(block) if is_page else side.arena.slabs.state_of(block - books.num_pages)
            if state not in RESERVED_STATES:
                what = f"page {block}" if is_page else f"slab {block - books.num_pages}"
                raise Violation(
                    "quarantine",
                    f"{life.name}: {what} is {state.name} while epoch {epoch.number} of {epoch.writer.name} is open",
                )

    # ------------------------------------------------------------ frames between ranks

    def pair_frame(self, sender: Life, receiver: Life, message: Message, blob: memoryview) -> None:
        """A frame as it is sent over a pair stream."""
        match message:
            case PagesGranted():
                self._granted(sender, receiver, message, blob)
            case PagesPushed():
                epoch = self._find(receiver, message.epoch)
                if epoch is not None:
                    span = epoch.blocks[message.first : message.first + message.count]
                    if not epoch.landed.issuperset(span):
                        missing = [block for block in span if block not in epoch.landed]
                        raise Violation("commit-data", f"{sender.name} told of pages {missing} before they landed")
                    epoch.told += message.count
            case PrefillCommitted():
                self._committed(sender, receiver, message)
            case TurnCommitted():
                self._committed_turn(sender, receiver, message)
            case EpochEnded():
                epoch = self._find(receiver, message.epoch)
                if epoch is not None:
                    self._close(self._books[receiver], epoch)
            case _:
                pass

    def _granted(self, sender: Life, writer: Life, message: PagesGranted, blob: memoryview) -> None:
        books = self._books.get(sender)
        if books is None:
            return  # its last words
        # Not in order: grants to different writers overtake each other on their streams.
        if message.epoch in books.used:
            raise Violation("epochs", f"{sender.name} grants epoch {message.epoch} again")
        books.used.add(message.epoch)
        blocks = (*memoryview(bytes(blob)).cast("i").tolist(), books.num_pages + message.slab)
        epoch = books.open[message.epoch] = Epoch(message.epoch, message.request, writer, blocks)
        taken = books.block_to_epoch
        if len(set(blocks)) < len(blocks) or not taken.keys().isdisjoint(blocks):
            block = next(block for at, block in enumerate(blocks) if block in taken or block in blocks[:at])
            other = taken.get(block, epoch)
            raise Violation(
                "quarantine",
                f"{sender.name} grants block {block} as epoch {epoch.number} to {writer.name}, but it is still in"
                f" epoch {other.number} of {other.writer.name}",
            )
        taken.update(dict.fromkeys(blocks, epoch))

    def _committed(self, sender: Life, receiver: Life, message: PrefillCommitted) -> None:
        books = self._books.get(receiver)
        if books is None:
            return
        epoch = books.open.get(message.epoch)
        if epoch is None:
            raise Violation("commit-once", f"{sender.name} commits epoch {message.epoch}, which is not open")
        if not epoch.landed.issuperset(epoch.blocks):
            missing = [block for block in epoch.blocks if block not in epoch.landed]
            raise Violation(
                "commit-data", f"{sender.name} commits epoch {epoch.number}, but blocks {missing} never landed"
            )
        if epoch.told != message.num_pages or message.num_pages != len(epoch.blocks) - 1:
            raise Violation(
                "commit-count",
                f"{sender.name} commits {message.num_pages} pages of epoch {epoch.number}; it told of {epoch.told},"
                f" {len(epoch.blocks) - 1} were granted",
            )
        self.num_commits += 1
        self._close(books, epoch)

    def _committed_turn(self, sender: Life, receiver: Life, message: TurnCommitted) -> None:
        books = self._books.get(receiver)
        if books is None:
            return
        epoch = books.open.get(message.epoch)
        if epoch is None or epoch.writer != sender:
            raise Violation("commit-once", f"{sender.name} commits a turn, epoch {message.epoch}, which it has not")
        missing = [block for block in epoch.blocks if block not in epoch.landed]
        if missing:
            raise Violation(
                "commit-data", f"{sender.name} commits a turn, epoch {epoch.number}, but blocks {missing} never landed"
            )
        if message.num_pages != len(epoch.blocks) - 1:
            raise Violation(
                "commit-count",
                f"{sender.name} commits a turn of {message.num_pages} pages, {len(epoch.blocks) - 1} were granted",
            )
        self.num_turns += 1
        self._close(books, epoch)

    def _find(self, life: Life, number: int) -> Epoch | None:
        books = self._books.get(life)
        return None if books is None else books.open.get(number)

    def _close(self, books: Books, epoch: Epoch) -> None:
        del books.open[epoch.number]
        for block in epoch.blocks:
            if books.block_to_epoch.get(block) is epoch:
                del books.block_to_epoch[block]

    # ------------------------------------------------------------ writes

    def landing(self, writer: Life, target: Life, blocks: list[int]) -> None:
        """Bytes of `writer` are about to land in these blocks of `target`."""
        books = self._books.get(target)
        if books is None:
            return
        self.num_landings += 1
        taken = books.block_to_epoch
        for block in blocks:
            epoch = taken.get(block)
            if epoch is None or (epoch.writer is not writer and epoch.writer != writer):
                owner = "no open epoch" if epoch is None else f"epoch {epoch.number} of {epoch.writer.name}"
                raise Violation("late-write", f"{writer.name} writes block {block} of {target.name}, which is {owner}")
            epoch.landed.add(block)


def describe(message: Message) -> str:
    """For traces: kind and fields, short."""
    return f"{type(message).__name__}{tuple(msgspec.to_builtins(message))}"[:200]
