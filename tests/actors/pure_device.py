"""PureDevice: a device whose tokens are a pure function of (request, position), and whose memory tells on misuse.

Every position that is "computed" leaves a record (request, position, id) in its page, and every slab knows its request,
its length and a checksum over the ids. A decode row reads its whole history back from the pages it was given. So a page
that was reused too early, pushed to the wrong place, not pushed, or written late by somebody else is an AssertionError
in the step that reads it, and a repeated or skipped step shows as a wrong length.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import math
import struct
import zlib
from collections.abc import Sequence

import trio

from engine.core.plan import DecodeRow, PrefillChunk, StepPlan, StepResult
from engine.errors import DeviceError
from engine.ports import DeviceInfo
from transport.fabric import BlockRun
from transport.messages import Sampling

RECORD = struct.Struct("<qii")
SLAB = struct.Struct("<qiiq")
EOS = 1


def pure_token(request: int, position: int, vocab_size: int, eos_share: float = 0.0) -> int:
    """The id at `position` of a request's text, whoever computes it and in whichever attempt."""
    word = zlib.crc32(struct.pack("<qi", request, position)) / 2**32
    if word < eos_share:
        return EOS
    return 2 + zlib.crc32(struct.pack("<iq", position, request)) % (vocab_size - 2)


def draw(request: int, position: int, sampling: Sampling, vocab_size: int, eos_share: float) -> int:
    """What the device samples for `position`: the pure token, unless a minimum forbids that the text ends there."""
    token = pure_token(request, position, vocab_size, eos_share)
    if sampling.min_tokens > 0:
        ends = {*sampling.stop_ids, *(() if sampling.ignore_eos else (EOS,))}
        while token in ends:
            token = 2 + (token + 1) % (vocab_size - 2)
    return token


@dataclasses.dataclass(frozen=True, slots=True)
class PureCosts:
    """Virtual seconds of a step: `base_s` + `token_s` for each id of a chunk and each row."""

    base_s: float = 0.005
    token_s: float = 0.0001


@dataclasses.dataclass(slots=True)
class PureTicket:
    step: int
    plan: StepPlan
    tokens: list[bytes]
    done_at: float
    cost_s: float
    result: StepResult | None = None


class PureDevice:
    """See the module. Its work happens at the virtual time at which the step is done: as late as possible."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_slabs: int,
        page_tokens: int,
        max_model_tokens: int = 1 << 20,
        vocab_size: int = 1000,
        eos_share: float = 0.0,
        costs: PureCosts = PureCosts(),
        fail_at_step: int = 0,
        hang_at_step: int = 0,
        layout_digest: str = "pure",
    ) -> None:
        self._eos_share = eos_share
        self._costs = costs
        self._fail_at_step, self._hang_at_step = fail_at_step, hang_at_step
        page_bytes, slab_bytes = page_tokens * RECORD.size, SLAB.size
        self._arena = ctypes.create_string_buffer(num_pages * page_bytes + num_slabs * slab_bytes)
        self._bytes = memoryview(self._arena).cast("B")
        self._slabs_at = num_pages * page_bytes
        self._queue: collections.deque[PureTicket] = collections.deque()
        self._free_at = 0.0
        self.num_steps = 0
        self.info = DeviceInfo(
            name="pure",
            layout_digest=layout_digest,
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            num_pages=num_pages,
            slab_bytes=slab_bytes,
            num_slabs=num_slabs,
            vocab_size=vocab_size,
            max_model_tokens=max_model_tokens,
            eos_ids=(EOS,),
        )

    def block_runs(self) -> Sequence[BlockRun]:
        address, info = ctypes.addressof(self._arena), self.info
        return (
            BlockRun(address, info.page_bytes, info.num_pages),
            BlockRun(address + self._slabs_at, info.slab_bytes, info.num_slabs),
        )

    def submit(self, plan: StepPlan) -> PureTicket:
        assert len(self._queue) < 2, f"step {plan.step} is a third step in the queue"
        assert not plan.is_empty, f"step {plan.step} is empty"
        work = sum(chunk.num_tokens for chunk in plan.chunks) + len(plan.rows)
        cost_s = self._costs.base_s + self._costs.token_s * work
        self._free_at = max(self._free_at, trio.current_time()) + cost_s
        tokens = [bytes(chunk.tokens) for chunk in plan.chunks]
        ticket = PureTicket(plan.step, plan, tokens, self._free_at, cost_s)
        self._queue.append(ticket)
        return ticket

    async def wait(self, ticket: PureTicket) -> StepResult:
        if ticket.step == self._hang_at_step:
            await trio.sleep(math.inf)
        await trio.sleep_until(ticket.done_at)
        if self._fail_at_step and ticket.step >= self._fail_at_step:
            raise DeviceError(f"step {ticket.step} failed, as asked")
        if ticket.result is None:
            assert self._queue[0] is ticket, "steps are awaited in order"
            self._queue.popleft()
            ticket.result = self._run(ticket)
            self.num_steps += 1
        return ticket.result

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ the "model"

    def _run(self, ticket: PureTicket) -> StepResult:
        chunk_tokens = tuple(
            self._run_chunk(chunk, tokens) for chunk, tokens in zip(ticket.plan.chunks, ticket.tokens, strict=True)
        )
        row_tokens = tuple(self._run_row(row) for row in ticket.plan.rows)
        return StepResult(ticket.step, chunk_tokens, row_tokens, int(ticket.cost_s * 1e6))

    def _run_chunk(self, chunk: PrefillChunk, tokens: bytes) -> int | None:
        ids = memoryview(tokens).cast("i")
        if chunk.start == 0:
            self._write_slab(chunk.slab, chunk.request, 0, 0, 0)
        request, length, _, checksum = self._read_slab(chunk.slab)
        assert (request, length) == (chunk.request, chunk.start), f"chunk {chunk.request}@{chunk.start}: {length}"
        assert chunk.sample is not None or len(ids) % self.info.page_tokens == 0, "a chunk ends inside a page"
        for offset, token in enumerate(ids):
            checksum = self._append(chunk.pages, request, chunk.start + offset, token, checksum)
        end = chunk.start + len(ids)
        sampled = None
        if chunk.sample is not None:
            sampled = draw(request, end, chunk.sample, self.info.vocab_size, self._eos_share)
        self._write_slab(chunk.slab, request, end, -1 if sampled is None else sampled, checksum)
        return sampled

    def _run_row(self, row: DecodeRow) -> int:
        request, length, last, checksum = self._read_slab(row.slab)
        where = f"row {row.request}@{row.position} in slab {row.slab}"
        assert request == row.request, f"{where}: the slab is of request {request}"
        assert length == row.position, f"{where}: its history has {length} ids"
        assert row.token is None or row.token == last, f"{where}: input {row.token}, sampled was {last}"
        seen = 0
        for position in range(row.position):
            at = self._record_at(row.pages, position)
            record = RECORD.unpack_from(self._bytes, at)
            assert record[:2] == (request, position), f"{where}: position {position} holds {record}"
            seen = zlib.crc32(self._bytes[at : at + RECORD.size], seen)
        assert seen == checksum, f"{where}: the ids in its pages are not those that its slab saw"
        checksum = self._append(row.pages, request, row.position, last, checksum)
        sampled = draw(request, row.position + 1, row.sampling, self.info.vocab_size, self._eos_share)
        self._write_slab(row.slab, request, row.position + 1, sampled, checksum)
        return sampled

    def _record_at(self, pages: tuple[int, ...], position: int) -> int:
        index, offset = divmod(position, self.info.page_tokens)
        return pages[index] * self.info.page_bytes + offset * RECORD.size

    def _append(self, pages: tuple[int, ...], request: int, position: int, token: int, checksum: int) -> int:
        at = self._record_at(pages, position)
        RECORD.pack_into(self._bytes, at, request, position, token)
        return zlib.crc32(self._bytes[at : at + RECORD.size], checksum)

    def _read_slab(self, slab: int) -> tuple[int, int, int, int]:
        return SLAB.unpack_from(self._bytes, self._slabs_at + slab * SLAB.size)  # type: ignore[return-value]

    def _write_slab(self, slab: int, request: int, length: int, last: int, checksum: int) -> None:
        SLAB.pack_into(self._bytes, self._slabs_at + slab * SLAB.size, request, length, last, checksum)
