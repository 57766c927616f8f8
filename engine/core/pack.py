"""Packs experts onto ranks from nothing: how many replicas each gets, and which rank each replica goes to.

Both are greedy. Replicas: one by one to whoever has the largest load per replica. Ranks: heaviest replica first, to the
lightest rank that has room. Works on many independent problems at once (layers, or layers x nodes); the vector axis is
the problem, so that a Python loop runs over replicas only.

*Source:* the two rules are those of DeepSeek's EPLB (global policy); here replica counts come from one threshold (the
same counts, but for ties), two replicas never share a rank, and `descend` improves the result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_HALVINGS = 18


def choose_counts(loads: Floats, extra: int, most: int, *, pooled: bool) -> Ints:
    """Replicas of each expert, int64[problems, experts].

    Args:
        loads: float64[problems, experts].
        extra: replicas beyond one per expert: of each problem, or of all together if `pooled`.
        most: no expert gets more (the number of ranks).
    """
    shape = loads.shape
    if pooled:
        loads = loads.reshape(1, -1)
    # Loads per replica at or below a threshold: find the lowest threshold that the extra replicas reach.
    high = np.maximum(loads.max(axis=1, keepdims=True), 1e-9)
    low = np.maximum(loads.sum(axis=1, keepdims=True) / (loads.shape[1] + extra), 1e-12) * 0.999
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        used = np.clip(np.ceil(loads / middle), 1, most).sum(axis=1, keepdims=True) - loads.shape[1]
        fits = used <= extra
        high = np.where(fits, middle, high)
        low = np.where(fits, low, middle)
    counts = np.clip(np.ceil(loads / high), 1, most).astype(np.int64)
    # The threshold is near, not exact: a few are left for the largest loads per replica.
    left = extra - (counts.sum(axis=1) - loads.shape[1])
    for problem in np.flatnonzero(left > 0):
        rest = int(left[problem])
        while rest > 0:
            share = np.where(counts[problem] < most, loads[problem] / counts[problem], 0.0)
            # Not for experts without load: a replica of them is a waste.
            chosen = np.argsort(-share, kind="stable")[: min(rest, int(np.count_nonzero(share)))]
            if chosen.size == 0:
                break
            counts[problem, chosen] += 1
            rest -= chosen.size
    result: Ints = counts.reshape(shape)
    return result


def vary_counts(loads: Floats, extra: int, most: int, bits: int) -> Ints:
    """int64[variants, problems, experts]: `choose_counts` first, then others to try where replicas are few and large.

    Variant v leaves those of the heaviest experts unreplicated whose bit is set in v, and gives what that frees to the
    rest. 2**bits variants, at most 64.
    """
    bits = min(bits, 6, loads.shape[1])
    order = np.argsort(-loads, axis=1, kind="stable")[:, :bits]
    variants = []
    for code in range(2**bits):
        rest = loads.copy()
        np.put_along_axis(rest, order[:, [bit for bit in range(bits) if code >> bit & 1]], 0.0, axis=1)
        variants.append(choose_counts(rest, extra, most, pooled=False))
    return np.stack(variants)


def pack(loads: Floats, counts: Ints, room: Ints, width: int) -> Ints:
    """Puts replicas onto ranks.

    Args:
        loads, counts: [problems, experts].
        room: int64[problems, ranks], slots; together at least the replicas.
        width: last axis of the answer, at least the largest room.

    Returns:
        int64[problems, ranks, width]: expert, or `experts` for an empty slot. A replica for which only ranks were left
        that hold the expert already is left out.
    """
    problems, experts = loads.shape
    ranks = room.shape[1]
    items, weights = _list_items(loads, counts)
    held = np.full((problems, ranks, width), experts, dtype=np.int64)
    held_flat = held.reshape(-1)
    key = np.where(room > 0, 0.0, np.inf)
    key_flat = key.reshape(-1)
    room_flat = room.reshape(-1).copy()
    used = np.zeros(problems * ranks, dtype=np.int64)
    start = np.arange(problems) * ranks
    repeated = np.zeros(items.shape[1], dtype=bool)
    repeated[1:] = ((items[:, 1:] == items[:, :-1]) & (items[:, 1:] < experts)).any(axis=0)
    full = (items < experts).all(axis=0)
    taken = np.zeros((problems, ranks), dtype=bool)
    where = start
    for column in range(items.shape[1]):
        expert, weight = items[:, column], weights[:, column]
        if repeated[column]:
            # Replicas of one expert are neighbours in the order: remember where the last one went.
            taken[expert != items[:, column - 1]] = False
            taken.reshape(-1)[where] |= expert == items[:, column - 1]
            where = start + np.where(taken, np.inf, key).argmin(axis=1)
            good = ~taken.reshape(-1)[where] & np.isfinite(key_flat[where]) & (expert < experts)
        else:
            taken[:] = False
            where = start + key.argmin(axis=1)
            good = expert < experts
        if repeated[column] or not full[column]:
            index, expert, weight = where[good], expert[good], weight[good]
        else:
            index = where
        key_flat[index] += weight
        held_flat[index * width + used[index]] = expert
        used[index] += 1
        key_flat[index[used[index] == room_flat[index]]] = np.inf
    return held


def _list_items(loads: Floats, counts: Ints) -> tuple[Ints, Floats]:
    """Replicas of each problem, heaviest first, padded with `experts`: int64 and float64 [problems, most replicas]."""
    problems, experts = loads.shape
    share = loads / counts
    order = np.argsort(-share, axis=1, kind="stable")
    times = np.take_along_axis(counts, order, axis=1)
    totals = times.sum(axis=1)
    problem = np.repeat(np.arange(problems), totals)
    at = np.arange(problem.size) - np.repeat(np.cumsum(totals) - totals, totals)
    items = np.full((problems, int(totals.max())), experts, dtype=np.int64)
    items[problem, at] = np.repeat(order.ravel(), times.ravel())
    weights = np.take_along_axis(np.concatenate([share, np.zeros((problems, 1))], axis=1), items, axis=1)
    return items, weights


def spread_room(totals: Ints, ranks: int) -> Ints:
    """int64[problems, ranks]: `totals` slots of each problem over ranks, so that ranks' sums differ by one at most."""
    base, rest = np.divmod(totals, ranks)
    offset = np.cumsum(rest) - rest
    turn = (np.arange(ranks)[None, :] - offset[:, None]) % ranks
    room: Ints = base[:, None] + (turn < rest[:, None])
    return room
