"""Flags: how kernels of a group's ranks tell each other that what they have stored can be read, as parts of kernels.

A flag is released for the whole system behind a program's stores into a peer's memory, and acquired by the peer before
its program ends, so every later kernel of its stream sees what was stored. A wait is bounded. The first one to expire
says on what, in the mailbox's state; from then on kernels of this rank neither put nor wait, so that a graph always
ends, and its peers find out by waits of their own.

**Whom it names.** A place whose flag of the earliest exchange has not come. Of several such places any may be named:
their waits end at about the same time, and who is first to write is a matter of luck. So over all ranks the word with
the least exchange accuses somebody who is to blame: who lives, and has not come so far himself, waits in an earlier
exchange for somebody else, has waited for longer, and says so in a word of his own.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from kernels import mailbox
from kernels.rows import INTERPRETED

HALVES = tl.constexpr(mailbox.HALVES)
FAILURE = tl.constexpr(mailbox.FAILURE)
LIMIT = tl.constexpr(mailbox.LIMIT)
FAILED = tl.constexpr(mailbox.FAILED)
COUNTER_BITS = tl.constexpr(mailbox.COUNTER_BITS)
# A wait that has lasted so long also looks whether another has expired, or the host has given up: sooner, that would be
# one more load between two looks at a flag.
LOOK_NS = tl.constexpr(100_000)


if INTERPRETED:

    def _now():
        """Nanoseconds, behind a nap: ranks that are waited for may share the core."""
        time.sleep(5e-5)
        return time.monotonic_ns()

else:

    @triton.jit
    def _now():
        """Only interpreted kernels have the host's clock; where they are compiled, nothing comes here."""
        return 0


@triton.jit
def agree(failure, FAST: tl.constexpr):
    """Whether no thread of the program has read a failure; the same for all of them, whoever writes one now."""
    if FAST:
        found = tl.inline_asm_elementwise(
            asm="""{
            .reg .pred failed;
            setp.ne.b64 failed, $1, 0;
            barrier.cta.red.or.pred failed, 0, failed;
            selp.u32 $0, 1, 0, failed;
            }""",
            constraints="=r,l",
            args=[failure],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return found == 0
    else:
        return failure == 0


@triton.jit
def release_flags(addresses, at, word, rank, RANKS: tl.constexpr, FAST: tl.constexpr):
    """Stores a flag at byte `at` of each peer's mailbox, for the whole system behind what this program has stored."""
    tl.debug_barrier()
    if FAST:
        # A thread for each peer. Its release covers what the barrier has ordered before it. A store, since nobody needs
        # the old value.
        tl.inline_asm_elementwise(
            asm="""{
            .reg .pred puts;
            .reg .b32 peer;
            .reg .b64 target;
            mov.u32 peer, %tid.x;
            setp.lt.u32 puts, peer, $5;
            setp.ne.and.u32 puts, peer, $4, puts;
            mad.wide.u32 target, peer, 8, $1;
            @puts ld.global.b64 target, [target];
            setp.ne.and.b64 puts, target, 0, puts;
            add.s64 target, target, $2;
            @puts st.release.sys.global.b64 [target], $3;
            mov.u32 $0, 0;
            }""",
            constraints="=r,l,l,l,r,r",
            args=[addresses, at, word, rank, RANKS],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for turn in tl.static_range(1, RANKS):
            address = tl.load(addresses + (rank + turn) % RANKS)
            if address != 0:
                tl.atomic_xchg((address + at).to(tl.pointer_type(tl.int64)), word, sem="release", scope="sys")


@triton.jit
def await_flags(
    addresses, state, flags, stride, word, number, rank, fine,
    PHASE: tl.constexpr, RANKS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Waits until each living peer has put `word`; after the limit says of one which has not. Not if not `fine`.

    Ends sooner, and says nothing, where another wait of this rank has expired or the host has written to the state.

    Args:
        flags: address of place 0's flag of this chunk in the own mailbox.
        stride: bytes to the next place's.
        number: of the exchange.
    """
    limit = tl.load(state + LIMIT)
    failed = FAILED | (PHASE << 60) | number
    look = tl.full((), LOOK_NS, tl.int64)
    if FAST:
        # A thread for each peer looks at its flag and the clock; the barrier lets all read what these have acquired.
        # Whoever finds its flag missing says so unless another has: an exchange begins when the one before has ended,
        # so the first to write is of the earliest.
        tl.inline_asm_elementwise(
            asm="""{
            .reg .pred waits, found, early;
            .reg .b32 peer;
            .reg .b64 flag, seen, began, now, failure;
            mov.u32 peer, %tid.x;
            setp.lt.u32 waits, peer, $9;
            setp.ne.and.u32 waits, peer, $8, waits;
            setp.ne.and.u32 waits, $10, 0, waits;
            mad.wide.u32 flag, peer, 8, $1;
            @waits ld.global.b64 flag, [flag];
            setp.ne.and.b64 waits, flag, 0, waits;
            @!waits bra DONE;
            mad.wide.u32 flag, peer, $4, $3;
            mov.u64 began, %globaltimer;
            SPIN:
            ld.acquire.sys.global.b64 seen, [flag];
            setp.eq.b64 found, seen, $5;
            @found bra DONE;
            mov.u64 now, %globaltimer;
            sub.s64 now, now, began;
            setp.lt.s64 early, now, $11;
            @early bra SPIN;
            ld.relaxed.sys.global.b64 failure, [$2];
            setp.ne.b64 found, failure, 0;
            @found bra DONE;
            setp.lt.s64 early, now, $6;
            @early bra SPIN;
            cvt.u64.u32 failure, peer;
            shl.b64 failure, failure, 52;
            or.b64 failure, failure, $7;
            atom.relaxed.sys.global.cas.b64 seen, [$2], 0, failure;
            DONE:
            barrier.cta.sync 0;
            mov.u32 $0, 0;
            }""",
            constraints="=r,l,l,l,r,l,l,l,r,r,r,l",
            args=[addresses, state + FAILURE, flags, stride, word, limit, failed, rank, RANKS, fine.to(tl.int32), look],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        # Other processes may put flags meanwhile.
        began = _now()
        for turn in tl.static_range(1, RANKS):
            peer = (rank + turn) % RANKS
            if fine & (tl.load(addresses + peer) != 0):
                flag = (flags + peer * stride).to(tl.pointer_type(tl.int64))
                fine = tl.atomic_add(flag, 0, sem="acquire", scope="sys") == word
                while (not fine) & (_now() - began < limit) & (tl.load(state + FAILURE) == 0):
                    fine = tl.atomic_add(flag, 0, sem="acquire", scope="sys") == word
                if not fine:
                    tl.atomic_cas(state + FAILURE, tl.full((), 0, tl.int64), failed | (peer.to(tl.int64) << 52))


@triton.jit
def turn_over(state, word, half, next_half, chunk, PHASE: tl.constexpr):
    """The next exchange of the phase gets the next number. Its word lies elsewhere, so no program here reads it."""
    if chunk == 0:
        tl.store(state + PHASE * HALVES + next_half, word + 1)


@triton.jit
def pointer_at(address, offset, TYPE: tl.constexpr):
    """Into a mailbox that begins at `address`; both are multiples of 256."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(TYPE)), 16)
