"""SimDevice: a device that takes virtual time, writes `text`, and whose memory tells on misuse.

Every page carries a tag: its place in the sequence, how much of it is filled, and the checksum of the history before
and after it. So it is a function of the ids up to its end, and right for all requests that begin with them. Every slab
knows its request, its length, the checksum over all of it and the last token. A row reads its pages' tags back: they
must form an unbroken chain that ends at the slab's checksum. So a page that was reused too early, pushed to the wrong
place, not pushed, or written late by somebody else is a Violation in the step that reads it, and a repeated or skipped
step shows as a wrong length. So does a prompt that goes on from state that is not that of its first ids. What a step
reads and writes, it reads and writes when it ends: as late as a real one might.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import operator
import struct
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import Protocol

import numpy as np
import trio

from engine.actors.bell import Bell
from engine.core.effects import Stretch
from engine.core.pact import GroupStep
from engine.core.plan import Base, DecodeRow, DecodeRows, PrefillChunk, Roster, StepPlan, StepResult
from engine.errors import DeviceError, GroupBroken, LocalProtocolError
from engine.ports import DeviceInfo, ExpertSlots
from engine.sim.costs import FlatCosts
from engine.sim.drafting import Drafting, is_drafting
from engine.sim.pool import Pool
from engine.sim.text import EOS, Words, append_chain, append_chains, draw, draw_many, extend_chain, seed_mix
from engine.sim.violation import Violation
from transport.checksum import BlockReader
from transport.fabric import BlockRun
from transport.messages import PartInfo

_PAGE = struct.Struct("<qiiII")
"""padding, index in the sequence, ids in it, checksum before, checksum after. As half words: 0-1, 2, 3, 4, 5."""
_SLAB = struct.Struct("<qiiIi")
"""request, ids of history, last token, checksum, padding. As half words: 0-1, 2, 3, 4, 5."""
_HALF = struct.Struct("<I")
_TRAIL = 16
"""Checksums that a slab has behind that, where turns are handed back: that of the first n ids in place n % 16. As the
rings of a real one, it is right for the last few lengths that it had."""
_TRAIL_AT = _SLAB.size // _HALF.size
SPARE_IDS = 8
"""So many ids behind the place that is gone on from a real slab may have been written: see docs/design.md, Memory."""
QUEUE_LIMIT = 2
_TEMPERATURE, _MIN_TOKENS = operator.attrgetter("temperature"), operator.attrgetter("min_tokens")

Costs = Callable[[StepPlan], float]


@dataclasses.dataclass(slots=True, eq=False)
class SimTicket:
    """A submitted step. `done_at` is infinite while it is not known when it ends."""

    step: int
    plan: StepPlan
    columns: DecodeRows
    """The plan's rows."""
    tokens: list[bytes]
    cost_s: float
    done_at: float = math.inf
    result: StepResult | None = None
    error: DeviceError | None = None
    is_checked: bool = False
    """The auditor has seen that it keeps to the bounds."""
    over: Bell = dataclasses.field(default_factory=Bell)
    """Rung when it is over, or broken off."""


class Place(Protocol):
    """A device's place in a group with experts; `engine.sim.group` has it."""

    @property
    def experts(self) -> ExpertSlots: ...
    @property
    def breaks(self) -> Sized: ...
    def runs(self) -> tuple[BlockRun, ...]: ...
    def submitted(self) -> None: ...
    def leave(self) -> None: ...
    def stop_until(self, until: float) -> None: ...
    def take_break(self, ticket: SimTicket) -> GroupBroken | None: ...


class _Cast:
    """What the device keeps of a roster while it stays, apart from its tables, which the pool has. `slabs` are numbers
    of the pool's units."""

    def __init__(self, roster: Roster | None, slabs: np.ndarray) -> None:
        self.roster, self.slabs = roster, slabs
        sampling = () if roster is None else roster.sampling
        self.mixes: Words = np.zeros(len(sampling), np.uint32)
        if any(map(_TEMPERATURE, sampling)):
            self.mixes[:] = [seed_mix(each) for each in sampling]
        self.masked: list[int] = []
        if any(map(_MIN_TOKENS, sampling)):
            self.masked = [row for row, least in enumerate(map(_MIN_TOKENS, sampling)) if least]


class SimDevice:
    """See the module.

    Args:
        costs: virtual seconds of a plan.
        sleep_until: how to wait for an instant; the event clock's own is cheaper than trio's.
        group: device of a group that steps together; its members' steps end at the slowest's end.
        reads_all: a row reads every page of its history in each step, else the last, and all when it begins a page.
        fail_at_step, hang_at_step: from that step on it fails; that step never ends.
        checksum_s: virtual seconds that the checksum of one block takes.
        max_drafts: drafts that it proposes for a row at most; draft_share: of places at which a draft holds.
        pool: has its memory; one of its own otherwise.
        has_trail: its slabs can be gone on from a few ids before their length.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_slabs: int,
        page_tokens: int,
        max_model_tokens: int = 1 << 20,
        vocab_size: int = 1000,
        eos_share: float = 0.0,
        costs: Costs = FlatCosts(),
        sleep_until: Callable[[float], Awaitable[None]] = trio.sleep_until,
        group: StepGroup | None = None,
        reads_all: bool = True,
        fail_at_step: int = 0,
        hang_at_step: int = 0,
        name: str = "sim",
        layout_digest: str = "",
        checksum_s: float = 0.0,
        pool: Pool | None = None,
        max_drafts: int = 0,
        draft_share: float = 0.0,
        has_trail: bool = False,
    ) -> None:
        self._eos_share = eos_share
        self._costs = costs
        self._sleep_until = sleep_until
        self._group = group
        self._checksum_s = checksum_s
        self._reader: BlockReader | None = None
        self._reads_all = reads_all
        self._drafting = Drafting(num_slabs, draft_share)
        self.fail_at_step, self.hang_at_step = fail_at_step, hang_at_step
        self.slow = 1.0
        """Factor on every step that is submitted from now on."""
        self.num_steps = 0
        self.busy_s = 0.0
        """Virtual seconds of its finished steps, without the waiting for others of its group."""
        self.next_step = 1
        """Number of the step that is submitted next."""
        self.queue: collections.deque[SimTicket] = collections.deque()
        """Submitted and not over."""
        self._pool = make_pool(1, num_pages, num_slabs, has_trail=has_trail) if pool is None else pool
        self._has_trail, self._slab_bytes = has_trail, _count_slab_bytes(has_trail)
        assert self._pool.sizes == (num_pages, num_slabs)
        self._first_page, self._first_slab, self._pages_at, self._slabs_at = self._pool.take()
        self._bytes = self._pool.buffer
        self._cast = _Cast(None, np.zeros(0, np.int64))
        self._sound_tokens: np.ndarray | None = None
        self._free_at = 0.0
        self._why_dead = ""
        # Nobody waits for a step that is over, so those in the queue have one each, by turns.
        self._bells = itertools.cycle([Bell() for _ in range(QUEUE_LIMIT)])
        self._place: Place | None = None
        self.experts: ExpertSlots | None = None
        self.info = DeviceInfo(
            name=name,
            layout_digest=layout_digest or f"sim-{page_tokens}",
            page_tokens=page_tokens,
            page_bytes=_PAGE.size,
            num_pages=num_pages,
            slab_bytes=self._slab_bytes,
            num_slabs=num_slabs,
            vocab_size=vocab_size,
            max_model_tokens=max_model_tokens,
            eos_ids=(EOS,),
            max_drafts=max_drafts,
        )
        if group is not None:
            group.join(self)

    def take_place(self, place: Place, address: str, parts: Sequence[PartInfo]) -> None:
        """It is a device of a group with experts from now on; before its first use."""
        self._place, self.experts = place, place.experts
        self.info = dataclasses.replace(self.info, mesh_address=address, parts=tuple(parts))

    def stop_until(self, until: float) -> None:
        """Its process is stopped; that shows only to a group that waits for it."""
        if self._place is not None:
            self._place.stop_until(until)

    def block_runs(self) -> Sequence[BlockRun]:
        address, info = self._pool.address, self.info
        slots = () if self._place is None else self._place.runs()
        return (
            BlockRun(address + self._pages_at, info.page_bytes, info.num_pages),
            BlockRun(address + self._slabs_at, info.slab_bytes, info.num_slabs),
            *slots,
        )

    def submit(self, plan: StepPlan) -> SimTicket:
        if self._why_dead:
            raise DeviceError(f"step {plan.step}: {self._why_dead}")
        if len(self.queue) >= QUEUE_LIMIT:
            raise LocalProtocolError(f"step {plan.step} is one step too many in the queue (limit {QUEUE_LIMIT})")
        if self._place is None and plan.is_empty:
            raise LocalProtocolError(f"step {plan.step} is empty")
        columns = plan.columns
        is_plain = not plan.drafts and columns.roster.ends is None
        cost_s = self._costs(plan if is_plain else self._place_rows(plan)) * self.slow
        tokens = [bytes(chunk.tokens) for chunk in plan.chunks] if plan.chunks else []
        step = plan.step
        ticket = SimTicket(step, plan, columns, tokens, cost_s, over=next(self._bells))
        self.queue.append(ticket)
        if step >= self.next_step:
            self.next_step = step + 1
        if self._place is not None:
            self._place.submitted()
        elif self._group is not None:
            self._group.submitted()
        elif plan.step != self.hang_at_step:
            self._free_at = ticket.done_at = max(self._free_at, trio.current_time()) + cost_s
        else:
            self._free_at = math.inf
        return ticket

    async def wait(self, ticket: SimTicket) -> StepResult:
        place = self._place
        if place is not None:
            # Until the step is over, or broken off.
            if ticket.result is not None or ticket.error is not None:
                await trio.lowlevel.checkpoint()
            while ticket.result is None and ticket.error is None:
                if place.breaks:
                    broken = place.take_break(ticket)
                    if broken is not None:
                        raise broken
                await ticket.over.wait()
            if place.breaks:
                broken = place.take_break(ticket)
                if broken is not None:
                    raise broken
        elif ticket.result is None and ticket.error is None:
            if self._group is not None:
                await ticket.over.wait()
            else:
                await self._sleep_until(ticket.done_at)
            while self.queue and self.queue[0].done_at <= ticket.done_at and ticket.done_at < math.inf:
                self.finish_first()
        else:
            await trio.lowlevel.checkpoint()
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    def foresee(self, grammar: str) -> None:
        """See `ports.Device.foresee`. Simulated tokens follow no grammar."""

    async def checksums(self, stretches: Sequence[Stretch]) -> tuple[int, ...]:
        num_pages = self.info.num_pages
        blocks = [[*pages] if slab < 0 else [*pages, num_pages + slab] for pages, slab in stretches]
        await self._sleep_until(trio.current_time() + self._checksum_s * sum(map(len, blocks)))
        if self._reader is None:
            self._reader = BlockReader(self.block_runs())
        return self._reader.checksums(blocks)

    async def aclose(self) -> None:
        if self.queue and not self._why_dead and self._group is None and self.queue[-1].done_at < math.inf:
            await self.wait(self.queue[-1])
        await trio.lowlevel.checkpoint()
        self.die("the device was closed")

    def die(self, why: str) -> None:
        """Takes no more; what is queued is never over."""
        self._why_dead = self._why_dead or why
        if self._group is not None:
            self._group.leave(self)
        if self._place is not None:
            self._place.leave()

    def fail(self, error: DeviceError) -> None:
        """All that is queued fails with this."""
        self.die(str(error))
        while self.queue:
            ticket = self.queue.popleft()
            ticket.error = error
            ticket.over.ring()

    # ------------------------------------------------------------ the "model"

    def finish_first(self, group: GroupStep | None = None, drawn: Sequence[int] | None = None) -> None:
        """The oldest step in the queue is over: computes it.

        Args:
            group: the step of its group.
            drawn: what `run_together` made of it.
        """
        ticket = self.queue.popleft()
        why = None if drawn is not None else self._why_fails(ticket)
        if why is None and not self._why_dead:
            plan = ticket.plan
            chunks: tuple[int | None, ...] = ()
            if plan.chunks:
                chunks = tuple([self._run_chunk(c, ids) for c, ids in zip(plan.chunks, ticket.tokens, strict=True)])
            rows: Sequence[int] = () if drawn is None else drawn
            counts = proposed = None
            if drawn is None and plan.rows:
                if is_drafting(plan):
                    rows, counts, proposed = self._run_drafted(plan)
                elif self._reads_all:
                    rows = [self._run_row(row) for row in plan.rows]
                else:
                    rows = _run_rows([(self, ticket.columns)])[0]
            for chunk in plan.chunks:
                self._drafting.forget(chunk.slab)
            ticket.result = StepResult(
                ticket.step, chunks, rows, max(1, int(ticket.cost_s * 1e6)), group,
                row_counts=counts, row_proposed=proposed,
            )  # fmt: skip
            if drawn is not None or not plan.is_empty:
                self.num_steps += 1
                self.busy_s += ticket.cost_s
        else:
            self._why_dead = self._why_dead or f"step {ticket.step} failed on the device: {why}"
            ticket.error = DeviceError(f"step {ticket.step}: {self._why_dead}")
        ticket.over.ring()

    @property
    def runs_together(self) -> bool:
        """Its oldest step is rows alone, all right, and read as columns: `run_together` may compute it."""
        if self._reads_all or self._why_dead or not self.queue:
            return False
        ticket = self.queue[0]
        plan = ticket.plan
        tokens = ticket.columns.tokens
        if plan.chunks or not len(tokens) or is_drafting(plan) or (self.fail_at_step and self._why_fails(ticket)):
            return False
        return tokens is self._sound_tokens or self._find_wrong_id(tokens) is None

    def _why_fails(self, ticket: SimTicket) -> str | None:
        fails = self.fail_at_step and ticket.step >= self.fail_at_step
        return "failed, as asked" if fails else self._find_fault(ticket.plan)

    def _find_fault(self, plan: StepPlan) -> str | None:
        """What a real device could not compute."""
        info = self.info
        spans = [(c.slab, c.pages, c.start + c.num_tokens) for c in plan.chunks] if plan.chunks else []
        if self._reads_all and not is_drafting(plan):
            spans += [(row.slab, row.pages, row.position + 1) for row in plan.rows]
        for slab, pages, end in spans:
            if not 0 <= slab < info.num_slabs:
                return f"slab {slab} of {info.num_slabs}"
            if end > info.max_model_tokens:
                return f"a sequence of {end} tokens (max_model_tokens {info.max_model_tokens})"
            if end > len(pages) * info.page_tokens:
                return f"{end} tokens need more pages than the {len(pages)} given"
            if max(pages) >= info.num_pages or min(pages) < 0:
                return f"page id outside the {info.num_pages} pages"
        for chunk in plan.chunks:
            fault = self._find_unkept(plan, chunk) if chunk.keep >= 0 or chunk.base is not None else None
            if fault is not None:
                return fault
        return self._find_wrong_id(plan.columns.tokens) if plan.rows else None

    def _find_wrong_id(self, tokens: np.ndarray) -> str | None:
        # Steps behind one with the same rows share a column of tokens that only the device knows.
        if tokens is not self._sound_tokens:
            if np.count_nonzero(tokens >= self.info.vocab_size):
                return f"token id {tokens.max()} outside the vocabulary of {self.info.vocab_size}"
            self._sound_tokens = tokens
        return None

    def _find_unkept(self, plan: StepPlan, chunk: PrefillChunk) -> str | None:
        """What of a chunk's base, or of what it is to keep, is not possible."""
        info, base = self.info, chunk.base
        written = [other.slab for other in plan.chunks] + [other.keep for other in plan.chunks if other.keep >= 0]
        if chunk.keep >= info.num_slabs or written.count(chunk.keep) > 1:
            return f"slab {chunk.keep} can not be kept, of {info.num_slabs}"
        if base is not None and (not 0 <= base.slab < info.num_slabs or base.slab in written):
            return f"slab {base.slab} is no base, of {info.num_slabs}"
        if base is not None and (base.page >= info.num_pages or base.page in chunk.pages):
            return f"page {base.page} is no base, of {info.num_pages}"
        return None

    def _run_chunk(self, chunk: PrefillChunk, ids: bytes) -> int | None:
        page_tokens, where = self.info.page_tokens, f"chunk of request {chunk.request} at {chunk.start}"
        chain, filled, before = 0, chunk.start % page_tokens, 0
        if chunk.base is not None:
            self._copy_base(chunk, chunk.base, where)
        if chunk.start:
            request, length, _, chain, _ = self._read_slab(chunk.slab)
            self._expect(where, "slab", (request, length), (chunk.request, chunk.start))
            if self._reads_all or chunk.base is not None:
                before = self._read_pages(where, chunk.pages, chunk.start, chain)
        if filled:
            self._expect(where, "that it begins inside a page, with a base,", chunk.base is not None, True)
        end = chunk.start + len(ids) // 4
        if chunk.sample is None:
            self._expect(where, "ids beyond the last whole page", end % page_tokens, 0)
        for index in range(chunk.start // page_tokens, -(-end // page_tokens)):
            at = max(0, index * page_tokens - chunk.start) * 4
            part = ids[at : (index + 1) * page_tokens * 4 - chunk.start * 4]
            before, chain = before if filled else chain, extend_chain(chain, part)
            self._write_page(chunk.pages[index], index, filled + len(part) // 4, before, chain)
            filled = 0
        sampled = None
        if chunk.sample is not None:
            sampled = draw(chain, chunk.sample, self.info.vocab_size, self._eos_share)
        self._write_slab(chunk.slab, chunk.request, end, -1 if sampled is None else sampled, chain)
        if chunk.keep >= 0:
            self._copy_slab(chunk.slab, chunk.keep)
        return sampled

    def _copy_base(self, chunk: PrefillChunk, base: Base, where: str) -> None:
        """Slab and open page as they were kept. The pages' tags show whether they belong to what is behind them."""
        _, length, _, chain, _ = self._read_slab(base.slab)
        spilt = length - chunk.start
        if not self._has_trail or not 0 <= spilt <= SPARE_IDS:
            self._expect(where, f"length of its base, slab {base.slab},", length, chunk.start)
        self._copy_slab(base.slab, chunk.slab)
        if spilt:
            chain = self._read_trail(base.slab, chunk.start)
        self._write_slab(chunk.slab, chunk.request, chunk.start, -1, chain)
        if base.page >= 0:
            own = chunk.pages[chunk.start // self.info.page_tokens]
            first, size = self._pages_at, _PAGE.size
            tag = self._bytes[first + base.page * size : first + (base.page + 1) * size]
            self._bytes[first + own * size : first + (own + 1) * size] = tag
            if spilt:
                self._cut_page(where, own, chunk.start, base.slab, length)

    def _cut_page(self, where: str, page: int, start: int, slab: int, length: int) -> None:
        """A page that was written behind `start` is as it was there, if all of it is of the slab's history."""
        page_tokens = self.info.page_tokens
        index, filled = divmod(start, page_tokens)
        end = min(length, (index + 1) * page_tokens)
        tag = _PAGE.unpack_from(self._bytes, self._pages_at + page * _PAGE.size)
        wanted = (index, end - index * page_tokens, self._read_trail(slab, end))
        self._expect(where, "tag of its open page", (tag[1], tag[2], tag[4]), wanted)
        self._write_page(page, index, filled, tag[3], self._read_trail(slab, start))

    def _read_trail(self, slab: int, length: int) -> int:
        """The checksum of the first `length` ids of a slab's history."""
        at = self._slabs_at + slab * self._slab_bytes + _HALF.size * (_TRAIL_AT + length % _TRAIL)
        return int(_HALF.unpack_from(self._bytes, at)[0])

    def _copy_slab(self, source: int, target: int) -> None:
        first, size = self._slabs_at, self._slab_bytes
        tag = self._bytes[first + source * size : first + (source + 1) * size]
        self._bytes[first + target * size : first + (target + 1) * size] = tag

    def _run_row(self, row: DecodeRow) -> int:
        position, pages, page_tokens = row.position, row.pages, self.info.page_tokens
        request, length, last, chain, _ = self._read_slab(row.slab)
        if request != row.request or length != position or (row.token is not None and row.token != last):
            where = f"row of request {row.request} at {position}, slab {row.slab}"
            self._expect(where, "request and length in the slab", (request, length), (row.request, position))
            self._expect(where, "input id", row.token, last)
        index, offset = divmod(position, page_tokens)
        self._read_history(row, chain)
        grown = append_chain(chain, last)
        if offset:
            before = _PAGE.unpack_from(self._bytes, self._pages_at + pages[index] * _PAGE.size)[3]
        else:
            before = chain
        self._write_page(pages[index], index, offset + 1, before, grown)
        sampled = draw(grown, row.sampling, self.info.vocab_size, self._eos_share)
        self._write_slab(row.slab, request, position + 1, sampled, grown)
        return sampled

    def _place_rows(self, plan: StepPlan) -> StepPlan:
        """The plan for its costs: rows that only the device can place are where their slabs are by now."""
        if not is_drafting(plan):
            return plan
        columns = plan.columns
        lengths = np.array([self._read_slab(slab)[1] for slab in columns.roster.slabs.tolist()], np.int64)
        positions = np.where(columns.positions < 0, lengths, columns.positions)
        return dataclasses.replace(plan, rows=DecodeRows(columns.roster, positions, columns.tokens))

    def _run_drafted(self, plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
        """Rows with drafts behind them, or where only this device knows where they are: (tokens, counts, proposed)."""
        tokens: list[int] = []
        counts: list[int] = []
        proposed: list[int] = []
        ends = plan.columns.roster.ends
        for at, row in enumerate(plan.rows):
            where = f"row of request {row.request}, slab {row.slab}"
            request, length, *_ = self._read_slab(row.slab)
            self._expect(where, "request in the slab", request, row.request)
            if row.position >= 0:
                row_token = row.token
            else:
                self._expect(where, "input id of a row that only the device can place", row.token, None)
                row, row_token = dataclasses.replace(row, position=length), None
            end = len(row.pages) * self.info.page_tokens if ends is None else int(ends[at])
            if end > len(row.pages) * self.info.page_tokens or end > self.info.max_model_tokens:
                raise Violation("ends", f"{self.info.name}: {where}: end {end} is beyond its {len(row.pages)} pages")
            if row.position >= end:
                self._expect(where, "position of a row at its end", row.position, end)
                counts.append(0)
                proposed.append(0)
                continue
            held, accepted = 0, 0
            if not row.sampling.min_tokens:
                held = min(plan.drafts, self._drafting.proposed(row.slab, row.position), end - 1 - row.position)
                accepted = self._drafting.accepted(row.request, row.position, held)
            for step in range(accepted + 1):
                token = row_token if not step else None
                tokens.append(self._run_row(dataclasses.replace(row, position=row.position + step, token=token)))
            counts.append(accepted + 1)
            proposed.append(held)
            self._drafting.propose(row.slab, row.position + accepted + 1, plan.drafts)
        return tokens, counts, proposed

    def keep_cast(self, roster: Roster) -> _Cast:
        """What it keeps of this roster."""
        if self._cast.roster is not roster:
            self._cast = _Cast(roster, roster.slabs + self._first_slab)
            self._pool.keep_tables(self._cast.slabs, roster.tables + self._first_page)
        return self._cast

    def _read_history(self, row: DecodeRow, chain: int) -> None:
        """All pages of a row that begins one: an unbroken chain, which ends at the slab's checksum."""
        self._read_pages(f"row of request {row.request} at {row.position}", row.pages, row.position, chain)

    def _read_pages(self, where: str, pages: Sequence[int], length: int, chain: int) -> int:
        """The same of any sequence; returns the checksum before the last page."""
        page_tokens, before, after = self.info.page_tokens, 0, 0
        for index in range(-(-length // page_tokens)):
            before, filled = after, min(page_tokens, length - index * page_tokens)
            tag = _PAGE.unpack_from(self._bytes, self._pages_at + pages[index] * _PAGE.size)
            if tag[1:4] != (index, filled, before):
                self._expect(f"{where}, page {pages[index]}", "tag of its page", tag[1:4], (index, filled, before))
            after = tag[4]
        if after != chain:
            self._expect(where, "checksum of its pages against its slab's", after, chain)
        return before

    def _expect(self, where: str, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise Violation("tags", f"{self.info.name}: {where}: {what} is {found}, not {wanted}")

    def _write_page(self, page: int, index: int, filled: int, before: int, after: int) -> None:
        _PAGE.pack_into(self._bytes, self._pages_at + page * _PAGE.size, 0, index, filled, before, after)

    def _read_slab(self, slab: int) -> tuple[int, int, int, int, int]:
        return _SLAB.unpack_from(self._bytes, self._slabs_at + slab * self._slab_bytes)  # type: ignore[return-value]

    def _write_slab(self, slab: int, request: int, length: int, last: int, chain: int) -> None:
        at = self._slabs_at + slab * self._slab_bytes
        _SLAB.pack_into(self._bytes, at, request, length, last, chain, 0)
        if self._has_trail:
            _HALF.pack_into(self._bytes, at + _HALF.size * (_TRAIL_AT + length % _TRAIL), chain)


def run_together(devices: Sequence[SimDevice]) -> list[Sequence[int]]:
    """Computes the oldest step of each, for its `finish_first`; all of them `runs_together`, and are of one make."""
    pools = list(dict.fromkeys([device._pool for device in devices]))
    told: dict[SimDevice, Sequence[int]] = {}
    for pool in pools:
        here = devices if len(pools) == 1 else [device for device in devices if device._pool is pool]
        told.update(zip(here, _run_rows([(device, device.queue[0].columns) for device in here]), strict=True))
    return [told[device] for device in devices]


def make_pool(devices: int, num_pages: int, num_slabs: int, *, has_trail: bool = False) -> Pool:
    """Memory for so many devices with so many pages and slabs each."""
    return Pool(devices, num_pages, _PAGE.size, num_slabs, _count_slab_bytes(has_trail))


def _count_slab_bytes(has_trail: bool) -> int:
    return _SLAB.size + (_HALF.size * _TRAIL if has_trail else 0)


def _run_rows(steps: Sequence[tuple[SimDevice, DecodeRows]]) -> list[Sequence[int]]:
    """`_run_row` for all rows of all steps, as columns: what one call costs does not depend on how many there are. All
    devices share a pool.

    A row that does not look right goes to `_run_row`, which says what it is.
    """
    first = steps[0][0]
    vocab_size, eos_share = first.info.vocab_size, first._eos_share
    casts = [device.keep_cast(rows.roster) for device, rows in steps]
    bounds = [0, *itertools.accumulate(len(rows) for _, rows in steps)]
    spans = list(itertools.pairwise(bounds))
    requests = _join([rows.roster.requests for _, rows in steps])
    positions = _join([rows.positions for _, rows in steps])
    tokens = _join([rows.tokens for _, rows in steps])
    page_words, slab_words, tables = first._pool.page_words, first._pool.slab_words, first._pool.tables
    slab_ids = _join([cast.slabs for cast in casts])
    # Ways that take a third of the time: `take` for whole tags, columns to write them, `//` without `divmod`.
    index = positions // first.info.page_tokens
    offset = positions - index * first.info.page_tokens
    page_ids = tables.reshape(-1).take(slab_ids * tables.shape[1] + index)
    # As words and half words: looks at named fields would take longer than all that is done here.
    slabs, pages = slab_words.take(slab_ids, axis=0), page_words.take(page_ids, axis=0)
    slab_halves, page_halves = slabs.view(np.uint32), pages.view(np.uint32)
    chain, last = slab_halves[:, 4], slab_halves[:, 3]
    begun = np.flatnonzero(offset == 0)
    page_words[:, 0][page_ids[begun]] = 0
    pages[begun, 1] = index[begun]
    page_halves[begun, 4] = page_halves[begun, 5] = chain[begun]
    is_wrong = (
        (pages[:, 1] != (index | offset << 32))
        | (page_halves[:, 5] != chain)
        | (slabs[:, 0] != requests)
        | (slab_halves[:, 2] != positions)
        | ((tokens != last) & (tokens >= 0))
    )
    is_wrong[begun] |= (index[begun] == 0) & (chain[begun] != 0)
    begun = begun[index[begun] > 0]
    if len(begun):
        histories = [
            tables[slab, :count] for slab, count in zip(slab_ids[begun].tolist(), index[begun].tolist(), strict=True)
        ]
        is_wrong[begun] |= _find_broken(page_words, histories, chain[begun], first.info.page_tokens)
    if b"\x01" in is_wrong.tobytes():  # a quarter of what `any` costs
        at = int(is_wrong.argmax())
        step = bisect.bisect_right(bounds, at) - 1
        row = steps[step][1][at - bounds[step]]
        steps[step][0]._run_row(row)
        raise AssertionError(f"{row} looks wrong, and is not")
    grown = append_chains(chain, last)
    drawn = draw_many(grown, _join([cast.mixes for cast in casts]), vocab_size, eos_share)
    for (_, rows), cast, (start, _) in zip(steps, casts, spans, strict=True):
        for at in cast.masked:
            drawn[start + at] = draw(int(grown[start + at]), rows.roster.sampling[at], vocab_size, eos_share)
    page_halves[:, 3] += 1
    page_halves[:, 5] = slab_halves[:, 4] = grown
    slab_halves[:, 2] += 1
    slab_halves[:, 3] = drawn
    for words, units, tags in ((page_words, page_ids, pages), (slab_words, slab_ids, slabs)):
        for column in (1, 2):  # the first is what it was
            words[:, column][units] = tags[:, column]
    if first._has_trail:
        slab_words.view(np.uint32)[slab_ids, _TRAIL_AT + (positions + 1) % _TRAIL] = grown
    told = drawn.astype(np.int32).data
    return [told[start:end] for start, end in spans]


def _find_broken(
    page_words: np.ndarray, histories: Sequence[np.ndarray], chains: Words, page_tokens: int
) -> np.ndarray:
    """bool[rows]: which of these rows have a history that is not an unbroken chain of full pages up to its checksum."""
    counts = np.array([len(pages) for pages in histories])
    ends = counts.cumsum()
    begins = ends - counts
    pages = page_words.take(np.concatenate(histories), axis=0)
    halves = pages.view(np.uint32)
    before = np.zeros(len(pages), np.uint32)
    before[1:] = halves[:-1, 5]
    before[begins] = 0
    is_wrong = (pages[:, 1] != (np.arange(len(pages)) - begins.repeat(counts) | page_tokens << 32)) | (
        halves[:, 4] != before
    )
    is_broken: np.ndarray = np.logical_or.reduceat(is_wrong, begins) | (halves[ends - 1, 5] != chains)
    return is_broken


def _join(columns: list[np.ndarray]) -> np.ndarray:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


class StepGroup:
    """Devices whose steps run together: each takes its oldest queued step, and all end when the slowest does.

    Args:
        at: calls a function at an instant (`Clock.at`).
        floor_s: what a step takes at least, whatever is in it.
    """

    def __init__(self, at: Callable[[float, Callable[[], None]], None], floor_s: float = 0.0) -> None:
        self._at = at
        self._floor_s = floor_s
        self._members: list[SimDevice] = []
        self._running: list[tuple[SimDevice, SimTicket]] = []
        self.num_steps = 0

    def join(self, device: SimDevice) -> None:
        self._members.append(device)

    def leave(self, device: SimDevice) -> None:
        """A member is gone; the others do not wait for it."""
        if device in self._members:
            self._members.remove(device)
            stuck = any(ticket.done_at == math.inf for _, ticket in self._running)
            self._running = [(other, ticket) for other, ticket in self._running if other is not device]
            if stuck and all(ticket.step != other.hang_at_step for other, ticket in self._running):
                self._schedule(0.0)

    def submitted(self) -> None:
        """A member has a step. If nothing runs, the group starts at the end of this instant, with all who have one."""
        if not self._running:
            self._running = [(device, device.queue[0]) for device in self._members if device.queue][:1]
            self._at(trio.current_time(), self._begin)

    def _begin(self) -> None:
        self._running = [(device, device.queue[0]) for device in self._members if device.queue]
        if self._running:
            self.num_steps += 1
            if all(ticket.step != device.hang_at_step for device, ticket in self._running):
                self._schedule(max(self._floor_s, *(ticket.cost_s for _, ticket in self._running)))

    def _schedule(self, cost_s: float) -> None:
        end = trio.current_time() + cost_s
        for _, ticket in self._running:
            ticket.done_at = end
        self._at(end, self._end)

    def _end(self) -> None:
        running, self._running = self._running, []
        for device, ticket in running:
            if device in self._members and device.queue and device.queue[0] is ticket:
                device.finish_first()
        self._begin()
