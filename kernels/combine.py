"""Combine: this rank's parts of all rows' sums back to the rows' owners, who add them up in the order of ranks.

The counterpart of `kernels.exchange`, by the same means. The sum over a rank's own experts, the parts of the others and
what else is added to them are one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.exchange import PLAIN_NUMBERS, ExchangeConfig, common_arguments, find_halves, round_to
from kernels.flags import COUNTER_BITS, FAILURE, HALVES, agree, await_flags, pointer_at, release_flags, turn_over
from kernels.mailbox import COMBINE, Mailbox
from kernels.rows import await_inputs

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _load_part(
    partial, ids, expert_to_slot, row, column, inside, HIDDEN: tl.constexpr, K: tl.constexpr, SUMS: tl.constexpr
):
    """float32[BLOCK]: this rank's part of a row's sum; of pairs, those here in the order of their places."""
    if SUMS:
        part = tl.load(partial + row * HIDDEN + column, mask=inside, other=0.0)
    else:
        part = tl.zeros(column.shape, tl.float32)
        for place in tl.static_range(K):
            expert = tl.load(ids + row * K + place)
            slot = tl.load(expert_to_slot + expert, mask=expert >= 0, other=-1)
            pair = (row * K + place) * HIDDEN + column
            part += tl.load(partial + pair, mask=inside & (slot >= 0), other=0.0)
    return part


@triton.jit
def _has_expert(ids, row, asked, K: tl.constexpr, ANYWHERE: tl.constexpr):
    """Whether a row, of those `asked` for, has an expert; the first is enough to look at if not ANYWHERE."""
    if ANYWHERE:
        place = tl.arange(0, triton.next_power_of_2(K))
        return tl.max(tl.load(ids + row * K + place, mask=(place < K) & asked, other=-1), 0) >= 0
    else:
        return tl.load(ids + row * K, mask=asked, other=-1) >= 0


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _combine_rows_kernel(
    partial,  # float32[RANKS * rows, HIDDEN], or of pairs [RANKS * rows * K, HIDDEN]
    ids,  # int32[RANKS * rows, K]
    expert_to_slot,  # int32[experts], of pairs
    base,  # A[own, HIDDEN]
    own_ids,  # int32[own, K], where ROUTED
    expert_to_place,  # int32[experts], where ROUTED
    out,  # A[own, HIDDEN]
    addresses,  # int64[RANKS], 0 for a rank that is lost
    state,  # int64[STATE_WORDS]
    own,
    rows,
    rank,
    half,
    next_half,
    flags_at,  # here and below: bytes in a mailbox
    parts_at,
    flag_stride,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIRE: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    ROUTED: tl.constexpr,  # rows have experts on some ranks only
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Chunk `program_id(0)`: puts its rows' parts to their owners; adds up the parts of the own rows in the chunk."""
    await_inputs(EARLY)
    chunk = tl.program_id(0)
    mine = tl.load(addresses + rank)
    word = tl.load(state + HALVES + half)
    flag_word = word | (rows.to(tl.int64) << COUNTER_BITS)
    # Of the flags of a place, that of this chunk.
    flag_at = flags_at + 8 * chunk.to(tl.int64)
    column = chunk % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    row = (chunk // PARTS).to(tl.int64)
    failure = tl.load(state + FAILURE, volatile=True)
    fine = failure == 0
    if SEND:
        for turn in tl.static_range(1, RANKS):
            peer = (rank + turn) % RANKS
            address = tl.load(addresses + peer)
            at = peer.to(tl.int64) * rows + row
            # Padding has no expert anywhere, and its owner does not look. Of lost ranks all is padding.
            counts = _has_expert(ids, at, peer != rank, K, ROUTED)
            part = _load_part(partial, ids, expert_to_slot, at, column, inside & counts, HIDDEN, K, SUMS)
            if turn == 1:
                fine = agree(failure, FAST)
            if fine & (address != 0):
                to = pointer_at(address, parts_at, WIRE) + (rank.to(tl.int64) * rows + row) * HIDDEN + column
                tl.store(to, round_to(part, WIRE), mask=inside & counts)
        if fine:
            release_flags(addresses, flag_at + rank * flag_stride, flag_word, rank, RANKS, FAST)
    if RECEIVE:
        # What is here is read under the wait.
        at = rank.to(tl.int64) * rows + row
        is_owner = row < own
        here = inside & _has_expert(ids, at, is_owner, K, ROUTED)
        if ROUTED:
            place = tl.arange(0, triton.next_power_of_2(K))
            expert = tl.load(own_ids + row * K + place, mask=(place < K) & is_owner, other=-1)
            home = tl.load(expert_to_place + expert, mask=expert >= 0, other=-1)
        own_part = _load_part(partial, ids, expert_to_slot, at, column, here, HIDDEN, K, SUMS)
        ahead = tl.zeros((BLOCK,), tl.float32)
        if HAS_BASE:
            ahead = tl.load(base + row * HIDDEN + column, mask=inside & is_owner, other=0.0).to(tl.float32)
        if not SEND:
            fine = agree(failure, FAST)
        number = word & ((tl.full((), 1, tl.int64) << COUNTER_BITS) - 1)
        await_flags(
            addresses, state, mine + flag_at, flag_stride, flag_word, number, rank, fine, 1, RANKS, FAST
        )  # fmt: skip
        turn_over(state, word, half, next_half, chunk, 1)
        tl.debug_barrier()
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(RANKS):
            if source == rank:
                total += own_part
            else:
                at = tl.full((), source, tl.int64) * rows + row
                lives = tl.load(addresses + source) != 0
                theirs = pointer_at(mine, parts_at, WIRE) + at * HIDDEN + column
                has_part = here & lives
                if ROUTED:
                    has_part = inside & lives & (tl.max((home == source).to(tl.int32), 0) != 0)
                total += tl.load(theirs, mask=has_part, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + row * HIDDEN + column, round_to(total + ahead, out.dtype.element_ty), mask=inside & is_owner)


def send_parts(
    mailbox: Mailbox,
    layer: int,
    rows: int,
    partial: Tensor,
    ids: Tensor,
    expert_to_slot: Tensor | None = None,
    config: ExchangeConfig | None = None,
    routed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Enqueues the first half of `combine_rows`: puts, and does not wait."""
    _combine(mailbox, layer, rows, partial, ids, None, None, expert_to_slot, config, routed, send=True, receive=False)


def receive_parts(
    mailbox: Mailbox,
    layer: int,
    rows: int,
    partial: Tensor,
    ids: Tensor,
    base: Tensor | None,
    out: Tensor,
    expert_to_slot: Tensor | None = None,
    config: ExchangeConfig | None = None,
    routed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Enqueues the second half: waits, and adds. Returns `out`."""
    return _combine(
        mailbox, layer, rows, partial, ids, base, out, expert_to_slot, config, routed, send=False, receive=True
    )


def combine_rows(
    mailbox: Mailbox,
    layer: int,
    rows: int,
    partial: Tensor,
    ids: Tensor,
    base: Tensor | None,
    out: Tensor,
    expert_to_slot: Tensor | None = None,
    config: ExchangeConfig | None = None,
    routed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sums of the own rows over all ranks: `kernels.reference.combine_rows`, seen from one rank.

    Enqueues one kernel, which ends as that of `dispatch_rows` does.

    Args:
        mailbox: this rank's end.
        layer: each one once in a step, in order, after its dispatch.
        rows: as in the dispatch.
        partial: float32[ranks * rows, hidden], contiguous: this rank's part of each row's sum. With `expert_to_slot`
            float32[ranks * rows * k, hidden], of each pair (row, place); those whose expert is elsewhere are not read.
        ids: int32[ranks * rows, k], as dispatched. A row whose first one is -1 is padding, whose sum is 0.
        base: A[own, hidden], contiguous, added last; None for none.
        out: A[own, hidden], contiguous, written.
        expert_to_slot: int32[experts], -1 for an expert of another rank.
        config: the same on all ranks; None for the default.
        routed: after a dispatch with `expert_to_place`, the own rows' ids, as they were before it, and that table.

    Returns:
        `out`: parts in the order of ranks, then the base. The own part is not rounded to the type in which others
        travel.
    """
    return _combine(
        mailbox, layer, rows, partial, ids, base, out, expert_to_slot, config, routed, send=True, receive=True
    )


def _combine(mailbox, layer, rows, partial, ids, base, out, expert_to_slot, config, routed, *, send, receive):
    layout = mailbox.layout
    config, common = common_arguments(mailbox, layer, rows, config, send=send, receive=receive)
    own_ids, expert_to_place = routed if routed is not None else (None, None)
    _combine_rows_kernel[(rows * config.parts,)](
        partial, ids, expert_to_slot, base, own_ids, expert_to_place, out, mailbox.addresses, mailbox.state,
        0 if out is None else len(out), rows, mailbox.rank, *find_halves(mailbox, layer),
        layout.flags_at(COMBINE, layer), layout.parts_at(layer), WIRE=_TYPES[layout.part_type],
        SUMS=expert_to_slot is None, HAS_BASE=base is not None, ROUTED=routed is not None, **common,
    )  # fmt: skip
    return out
