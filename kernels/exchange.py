"""Exchange: the rows of all ranks of a group onto each of them, by stores into peers' memory, inside a graph.

Nothing goes through a library or the host: a program stores its chunk into each peer's mailbox, releases a flag there,
and waits for the flags of the same chunk in its own (`kernels.flags`). `kernels.mailbox` has the layout, and why it is
safe to use it again. The way back is `kernels.combine`.

Programs of a launch need not all be resident: each puts before it waits, and programs start in order, so the least
chunk that has not ended on some rank always can.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flags import COUNTER_BITS, FAILURE, agree, await_flags, pointer_at, release_flags, turn_over
from kernels.mailbox import DISPATCH, MOST_PARTS, SCALE_COLUMNS, Mailbox
from kernels.records import e4m3_byte, nearest_bfloat16, power_of_two, scale_byte
from kernels.rows import INTERPRETED, await_inputs, launch_options

_GROUP = tl.constexpr(SCALE_COLUMNS)


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
    """How an exchange is cut into chunks, each a row or a part of it; the same on all ranks.

    Attributes:
        parts: chunks that share a row: 1, 2 or 4 (`MOST_PARTS`).
        warps: of a program.
        early: kernels are launched while those before them drain (programmatic dependent launch).
    """

    parts: int = 1
    warps: int = 8
    early: bool = not INTERPRETED


# Numbers that are 1 on some rank and not on others, or change with the step's size, must not make another kernel.
PLAIN_NUMBERS = ("own", "rows", "rank", "half", "next_half")


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """To nearest even, in the interpreter too."""
    if TYPE == tl.bfloat16:  # noqa: SIM300
        return nearest_bfloat16(x)
    else:
        return x.to(TYPE)


@triton.jit
def _put_row(
    address, peer, packed, scale, expert, home, weight, target, column, group, place, there, listed,
    rows_at, scales_at, ids_at, weights_at,
    HIDDEN: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """Stores a chunk of row `target` into the mailbox at `address`, which is that of place `peer`."""
    if ROUTED:
        expert = tl.where(home == peer, expert, -1)
        there &= tl.max(expert, 0) >= 0
    to = pointer_at(address, rows_at, packed.dtype) + target * HIDDEN + column
    tl.store(to, packed, mask=there)
    if NARROW:
        scales = pointer_at(address, scales_at, tl.uint8) + target * (HIDDEN // _GROUP) + group
        tl.store(scales, scale, mask=group < HIDDEN // _GROUP)
    tl.store(pointer_at(address, ids_at, tl.int32) + target * K + place, expert, mask=listed)
    tl.store(pointer_at(address, weights_at, tl.float32) + target * K + place, weight, mask=listed)


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _dispatch_rows_kernel(
    x,  # A[own, HIDDEN]
    ids,  # int32[own, K]
    weights,  # float32[own, K]
    joined,  # A[RANKS * rows, HIDDEN], written where rows travel narrow
    expert_to_place,  # int32[experts], where ROUTED
    addresses,  # int64[RANKS], 0 for a rank that is lost
    state,  # int64[STATE_WORDS]
    own,
    rows,
    rank,
    half,
    next_half,
    flags_at,  # here and below: bytes in a mailbox
    rows_at,
    scales_at,
    ids_at,
    weights_at,
    flag_stride,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    PLACED: tl.constexpr,  # the own rows lie in the own mailbox already
    ROUTED: tl.constexpr,  # rows go to the places of their experts only
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Chunk `program_id(0)`: puts its rows into all mailboxes, own included; waits for the peers' chunk."""
    await_inputs(EARLY)
    chunk = tl.program_id(0)
    mine = tl.load(addresses + rank)
    word = tl.load(state + half)
    flag_word = word | (rows.to(tl.int64) << COUNTER_BITS)
    # Of the flags of a place, that of this chunk.
    flag_at = flags_at + 8 * chunk.to(tl.int64)
    column = chunk % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    place = tl.arange(0, triton.next_power_of_2(K))
    row = chunk // PARTS
    there = inside & (row < own)
    group = chunk % PARTS * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    failure = tl.load(state + FAILURE, volatile=True)
    fine = failure == 0
    if SEND:
        value = tl.load(x + row.to(tl.int64) * HIDDEN + column, mask=there, other=0.0)
        chosen = (place < K) & (row < own)
        expert = tl.load(ids + row * K + place, mask=chosen, other=-1)
        weight = tl.load(weights + row * K + place, mask=chosen, other=0.0)
        listed = (place < K) & (chunk % PARTS == 0)
        target = rank.to(tl.int64) * rows + row
        packed, scale, home = value, expert, expert
        if ROUTED:
            home = tl.load(expert_to_place + expert, mask=expert >= 0, other=-1)
        if NARROW:
            groups = tl.reshape(value.to(tl.float32), (BLOCK // _GROUP, _GROUP))
            scale = scale_byte(tl.max(tl.abs(groups), 1))
            inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
            packed = tl.reshape(e4m3_byte(groups * inverse[:, None]), (BLOCK,))
            scale = scale.to(tl.uint8)
        fine = agree(failure, FAST)
        if fine:
            # The next rank first, so that links are used evenly; the own one last.
            for turn in tl.static_range(1, RANKS):
                peer = (rank + turn) % RANKS
                address = tl.load(addresses + peer)
                if address != 0:
                    _put_row(
                        address, peer, packed, scale, expert, home, weight, target, column, group, place, there, listed,
                        rows_at, scales_at, ids_at, weights_at, HIDDEN, K, NARROW, ROUTED,
                    )  # fmt: skip
                else:
                    # Nobody else says that a lost rank has no rows.
                    to = pointer_at(mine, ids_at, tl.int32) + (peer.to(tl.int64) * rows + row) * K + place
                    tl.store(to, tl.full(place.shape, -1, tl.int32), mask=listed)
            if PLACED:
                listed &= row >= own
                there &= row >= own
            _put_row(
                mine, rank, packed, scale, expert, home, weight, target, column, group, place, there, listed,
                rows_at, scales_at, ids_at, weights_at, HIDDEN, K, NARROW, ROUTED,
            )  # fmt: skip
            release_flags(addresses, flag_at + rank * flag_stride, flag_word, rank, RANKS, FAST)
    if RECEIVE:
        if not SEND:
            fine = agree(failure, FAST)
        number = word & ((tl.full((), 1, tl.int64) << COUNTER_BITS) - 1)
        await_flags(
            addresses, state, mine + flag_at, flag_stride, flag_word, number, rank, fine, 0, RANKS, FAST
        )  # fmt: skip
        turn_over(state, word, half, next_half, chunk, 0)
        if NARROW:
            tl.debug_barrier()
            for source in tl.static_range(RANKS):
                at = tl.full((), source, tl.int64) * rows + row
                packed = tl.load(pointer_at(mine, rows_at, tl.uint8) + at * HIDDEN + column, mask=inside, other=0)
                scales = pointer_at(mine, scales_at, tl.uint8) + at * (HIDDEN // _GROUP) + column // _GROUP
                scale = power_of_two(tl.load(scales, mask=inside, other=127).to(tl.int32))
                wide = packed.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
                tl.store(joined + at * HIDDEN + column, round_to(wide, joined.dtype.element_ty), mask=inside)


def send_rows(
    mailbox: Mailbox,
    layer: int,
    rows: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: ExchangeConfig | None = None,
    expert_to_place: Tensor | None = None,
) -> None:
    """Enqueues the first half of `dispatch_rows`: puts, and does not wait."""
    _dispatch(mailbox, layer, rows, (x, ids, weights), config, expert_to_place, send=True, receive=False)


def receive_rows(
    mailbox: Mailbox, layer: int, rows: int, config: ExchangeConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Enqueues the second half: waits. Returns what `dispatch_rows` does."""
    return _dispatch(mailbox, layer, rows, None, config, None, send=False, receive=True)


def dispatch_rows(
    mailbox: Mailbox,
    layer: int,
    rows: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: ExchangeConfig | None = None,
    expert_to_place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all ranks, on each of them: `kernels.reference.dispatch_rows`, seen from one rank.

    Enqueues one kernel, which ends when all peers' rows are here, or the mailbox's state says which one's are not.

    Args:
        mailbox: this rank's end.
        layer: each one once in a step, in order.
        rows: places that each rank has, at least its own rows; the same on all ranks, at most the layout's capacity.
        x: A[own, hidden], contiguous, as the next two; `own` may differ between ranks, and be 0. Rows that lie where
            they would be put in the own mailbox (`Mailbox.own_rows`), with ids and weights, are not put there again.
        ids: int32[own, k]; -1 in rows of padding.
        weights: float32[own, k].
        config: the same on all ranks; None for the default.
        expert_to_place: int32[experts], the place that computes an expert for the rows of this rank, for groups so wide
            that a row has experts on few of the ranks. Each rank then gets the ids that it computes, and -1 for others
            (`kernels.reference.keep_ids`), and x only of rows that have some left. None if all rows go everywhere.

    Returns:
        (A[ranks * rows, hidden], int32[ranks * rows, k], float32[ranks * rows, k]), by rank; ids are -1 where a rank
        has no row, and x is whatever was there. Memory of the mailbox, see `kernels.mailbox` for how long it stays; x
        of narrow rows is new.
    """
    return _dispatch(mailbox, layer, rows, (x, ids, weights), config, expert_to_place, send=True, receive=True)


def choose_config(rows: int) -> ExchangeConfig:
    """For so many rows of a rank: a few rows are cut finer, so that each link's latency is all that counts."""
    return ExchangeConfig(parts=4, warps=2) if rows <= 16 else ExchangeConfig()


def _dispatch(mailbox, layer, rows, own_rows, config, expert_to_place, *, send, receive):
    layout = mailbox.layout
    config, common = common_arguments(mailbox, layer, rows, config, send=send, receive=receive)
    x, ids, weights = own_rows if own_rows is not None else (mailbox.memory,) * 3
    own = len(x) if own_rows is not None else 0
    if own > rows:
        raise ValueError(f"{own} rows do not fit in the {rows} places that each rank has")
    is_placed = False
    if send and not layout.narrow and expert_to_place is None:
        places = mailbox.own_rows(layer, rows)
        is_placed = all(own.data_ptr() == to.data_ptr() for own, to in zip(own_rows, places, strict=True))
    joined = mailbox.memory
    if receive:
        joined = mailbox.rows(layer, rows)
        if layout.narrow:
            joined = torch.empty(joined.shape, dtype=layout.dtype, device=joined.device)
    _dispatch_rows_kernel[(rows * config.parts,)](
        x, ids, weights, joined, expert_to_place, mailbox.addresses, mailbox.state, own, rows, mailbox.rank,
        *find_halves(mailbox, layer), layout.flags_at(DISPATCH, layer), layout.rows_at(layer), layout.scales_at(layer),
        layout.ids_at(layer), layout.weights_at(layer), NARROW=layout.narrow, PLACED=is_placed,
        ROUTED=expert_to_place is not None, **common,
    )  # fmt: skip
    return (joined, mailbox.ids(layer, rows), mailbox.weights(layer, rows)) if receive else None


def find_halves(mailbox: Mailbox, layer: int) -> tuple[int, int]:
    """This layer's half, and the next exchange's."""
    layout = mailbox.layout
    return layout.half(layer), layout.half((layer + 1) % layout.layers)


def common_arguments(mailbox, layer, rows, config, *, send, receive):
    """What both kernels of a layer are launched with, and the configuration."""
    layout = mailbox.layout
    if not 0 <= layer < layout.layers or not 1 <= rows <= layout.capacity:
        raise ValueError(
            f"layer {layer} of {layout.layers} with {rows} rows of a rank (1 to {layout.capacity}) is no exchange"
        )
    config = config or choose_config(rows)
    if layout.ranks > 32 * config.warps:
        raise ValueError(f"{layout.ranks} ranks need a thread each, and a program has {32 * config.warps}")
    block = max(triton.next_power_of_2(layout.hidden) // config.parts, SCALE_COLUMNS)
    return config, {
        "HIDDEN": layout.hidden, "K": layout.top_k, "RANKS": layout.ranks, "PARTS": config.parts, "BLOCK": block,
        "SEND": send, "RECEIVE": receive, "FAST": not INTERPRETED, "EARLY": config.early,
        "flag_stride": 8 * layout.capacity * MOST_PARTS, "num_warps": config.warps,
        **launch_options(config.early),
    }  # fmt: skip
