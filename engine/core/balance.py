"""Decides whether experts should move: loads, the current placement, the topology and prices in, a target with a bill out.

One objective: microseconds per step that a placement is predicted to save, times the horizon, less the time that the
links need for the bytes it moves. `descend` lays a trail of ever better placements from the current one for each
layer; per layer the point with the best balance of gain and price is taken, which is "stay" where nothing pays. The
reason is always said in words.

`pack_placement` ignores the current placement and all prices: the start-up of a group whose loads are known, and the
yardstick against other balancers.

Not here: in which order experts move and what is done when a rank dies meanwhile (`moves`, `migrate`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from engine.core.descend import Field, Trail, descend
from engine.core.load import Skew, measure_skew
from engine.core.pack import choose_counts, pack, spread_room
from engine.core.placement import EMPTY, Placement

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ROUNDS = 24
_FLOOR_PLAN = 0.002
_FLOOR_PACK = 0.0005
_THRIFT = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """What a placement has to respect.

    Attributes:
        hosts: the host of each rank; moves within a host are cheaper.
        reserve_slots: slots of each rank left empty, for the next plan's moves to go into.
        layer_slots: at most so many slots of a rank for one layer; None pools a rank's slots over all layers.
        groups, nodes: experts e * groups // experts form groups, ranks r * nodes // ranks nodes; each node holds
            groups / nodes whole groups of each layer, all replicas of their experts included. 1 and 1: no such limit.
    """

    hosts: tuple[int, ...]
    reserve_slots: int = 0
    layer_slots: int | None = None
    groups: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.groups < 1 or self.nodes < 1 or self.groups % self.nodes or len(self.hosts) % self.nodes:
            raise ValueError(
                f"{self.groups} groups and {len(self.hosts)} ranks do not divide over {self.nodes} nodes"
            )
        if self.reserve_slots < 0:
            raise ValueError(f"reserve_slots is {self.reserve_slots}, not below 0")


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """What a saved token is worth, and what a moved byte costs.

    Attributes:
        us_per_token: expert time of one rank per token and layer, microseconds.
        horizon_steps: for how many steps the loads are trusted to last.
        slot_bytes: one expert's weights.
        link_bytes_per_us: rate of a link within a host (300 GB/s is 300,000).
        far_bytes_per_us: rate between hosts.
    """

    us_per_token: float
    horizon_steps: float
    slot_bytes: int
    link_bytes_per_us: float
    far_bytes_per_us: float

    def __post_init__(self) -> None:
        if min(self.us_per_token, self.horizon_steps, self.slot_bytes) < 0:
            raise ValueError("us_per_token, horizon_steps and slot_bytes are not negative")
        if min(self.link_bytes_per_us, self.far_bytes_per_us) <= 0:
            raise ValueError("a link's bytes per microsecond are above 0")


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """What a plan is predicted to bring and to cost.

    Attributes:
        moved_slots, moved_bytes: experts to copy to ranks that do not hold them.
        far_slots: those that no rank of the same host holds.
        saved_us_per_step: less time lost to skew per step.
        gain_us: that over the horizon. cost_us: link time of the moved bytes.
        before, after: skew of the current placement and the target under the loads of the plan.
    """

    moved_slots: int
    moved_bytes: int
    far_slots: int
    saved_us_per_step: float
    gain_us: float
    cost_us: float
    before: Skew
    after: Skew

    @property
    def net_us(self) -> float:
        return self.gain_us - self.cost_us


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A target to move to, or the current placement itself with the reason to stay.

    Attributes:
        target: slots of arriving experts in it are a proposal; `moves.order_moves` settles them.
        pays: False: `target` is the current placement.
        reason: in words, for people.
    """

    target: Placement
    bill: Bill
    pays: bool
    reason: str


def plan_placement(current: Placement, loads: Floats, topology: Topology, prices: Prices) -> Plan:
    """The placement that pays most under `loads` (float64[layers, experts], tokens per step).

    Raises:
        ValueError: shapes differ, or `current` breaks the topology's limits.
    """
    _check(current, loads, topology)
    before = measure_skew(current.sum_rank_loads(loads), prices.us_per_token)
    trail = descend(_build_field(current, loads, topology), rounds=_ROUNDS, floor=_FLOOR_PLAN, thrift=_THRIFT)
    nodes = topology.nodes
    most = trail.most.reshape(len(trail.held), current.layers, nodes).max(axis=2)
    moved = trail.moved.reshape(len(trail.held), current.layers, nodes).sum(axis=2)
    far = trail.far.reshape(len(trail.held), current.layers, nodes).sum(axis=2)
    gain = (most[0] - most) * (prices.us_per_token * prices.horizon_steps)
    near_us = prices.slot_bytes / prices.link_bytes_per_us
    far_us = prices.slot_bytes / prices.far_bytes_per_us
    cost = (moved - far) * near_us + far * far_us
    net = gain - cost
    # Of equal points the one with the fewest moves, then the earliest, so that nothing moves for nothing.
    best = net.max(axis=0)
    slack = 1e-9 * np.maximum(1.0, np.abs(best))
    point = np.where(net >= best - slack, moved, np.iinfo(np.int64).max).argmin(axis=0)
    layer = np.arange(current.layers)
    held = trail.pick(np.repeat(point, nodes)).reshape(current.layers, current.ranks, -1)
    target = _rebuild(current, held) if (point > 0).any() else current
    after = measure_skew(target.sum_rank_loads(loads), prices.us_per_token)
    num_moved, num_far = int(moved[point, layer].sum()), int(far[point, layer].sum())
    saved = before.lost_us_per_step - after.lost_us_per_step
    bill = Bill(
        moved_slots=num_moved,
        moved_bytes=num_moved * prices.slot_bytes,
        far_slots=num_far,
        saved_us_per_step=saved,
        gain_us=saved * prices.horizon_steps,
        cost_us=(num_moved - num_far) * near_us + num_far * far_us,
        before=before,
        after=after,
    )
    if target is current:
        return Plan(current, bill, False, _say_why_not(before, gain, cost, moved, prices))
    return Plan(target, bill, True, _say_why(bill, prices))


def pack_placement(current: Placement, loads: Floats, topology: Topology) -> Placement:
    """The most even placement found under `loads`, whatever moves it takes from `current`.

    Raises:
        ValueError: shapes differ, or the topology leaves too few slots.
    """
    _check(current, loads, topology)
    layers, experts, nodes = current.layers, current.experts, topology.nodes
    ranks = current.ranks // nodes
    members = _assign_groups(loads, topology)
    inside = np.take_along_axis(loads[:, None, :], members, axis=2).reshape(layers * nodes, -1)
    counts, room, shared = _share_slots(current, inside, topology, ranks)
    width = int(room.max()) + (0 if topology.layer_slots is not None else 2)
    held = pack(inside, counts, room, width)
    names = np.concatenate([members.reshape(layers * nodes, -1), np.full((layers * nodes, 1), experts)], axis=1)
    held = np.take_along_axis(names, held.reshape(layers * nodes, -1), axis=1).reshape(held.shape)
    base = _build_field(current, loads, topology, strict=False)
    spare = room - (held < experts).sum(axis=2)
    alone = np.zeros((layers * nodes, experts))
    np.put_along_axis(alone, names[:, :-1], inside, axis=1)
    field = dataclasses.replace(base, loads=alone, held=held, room=spare, shared=shared)
    trail = descend(field, rounds=_ROUNDS, floor=_FLOOR_PACK, thrift=0.0)
    point = trail.most.argmin(axis=0)
    return _rebuild(current, trail.pick(point).reshape(layers, current.ranks, -1))


def _check(current: Placement, loads: Floats, topology: Topology) -> None:
    if loads.shape != (current.layers, current.experts):
        raise ValueError(f"loads of shape {loads.shape} for {current.layers} layers x {current.experts} experts")
    if not np.isfinite(loads).all() or float(loads.min()) < 0:
        raise ValueError("loads are finite and not negative")
    if len(topology.hosts) != current.ranks:
        raise ValueError(f"{len(topology.hosts)} hosts for {current.ranks} ranks")
    if current.experts % topology.groups:
        raise ValueError(f"{current.experts} experts do not divide into {topology.groups} groups")


def _share_slots(current: Placement, inside: Floats, topology: Topology, ranks: int) -> tuple[Ints, Ints, Ints]:
    """Replica counts and slots per rank of each problem, and shared slots left over, for a packing from nothing."""
    problems, members = inside.shape
    nodes = topology.nodes
    layers = problems // nodes
    if topology.layer_slots is not None:
        if topology.layer_slots * ranks < members:
            raise ValueError(f"layer_slots {topology.layer_slots} x {ranks} ranks can not hold {members} experts")
        if topology.layer_slots * layers > current.slots - topology.reserve_slots:
            raise ValueError(f"{layers} layers x layer_slots {topology.layer_slots} exceed {current.slots} slots")
        counts = choose_counts(inside, topology.layer_slots * ranks - members, ranks, pooled=False)
        room = np.full((problems, ranks), topology.layer_slots, dtype=np.int64)
        return counts, room, np.zeros((nodes, ranks), dtype=np.int64)
    usable = current.slots - topology.reserve_slots
    extra = ranks * usable - layers * members
    if extra < 0:
        raise ValueError(
            f"{ranks} ranks x {usable} slots (reserve_slots {topology.reserve_slots} left empty) can not hold "
            f"{layers} layers x {members} experts"
        )
    counts = np.empty(inside.shape, dtype=np.int64)
    room = np.empty((problems, ranks), dtype=np.int64)
    for node in range(nodes):
        counts[node::nodes] = choose_counts(inside[node::nodes], extra, ranks, pooled=True)
        room[node::nodes] = spread_room(counts[node::nodes].sum(axis=1), ranks)
    shared = usable - room.reshape(layers, nodes, ranks).sum(axis=0)
    return counts, room, shared


def _assign_groups(loads: Floats, topology: Topology) -> Ints:
    """Experts of each node, int64[layers, nodes, experts / nodes]: whole groups, as evenly loaded as can be found."""
    layers, experts = loads.shape
    groups, nodes = topology.groups, topology.nodes
    size = experts // groups
    if nodes == 1:
        return np.broadcast_to(np.arange(experts), (layers, 1, experts)).copy()
    sums = loads.reshape(layers, groups, size).sum(axis=2)
    each = groups // nodes
    ones = np.ones((layers, groups), dtype=np.int64)
    held = pack(sums, ones, np.full((layers, nodes), each, dtype=np.int64), each)
    anywhere = np.ones((layers, groups, nodes), dtype=np.bool_)
    field = Field(
        loads=sums,
        held=held,
        home=anywhere,
        near=anywhere[:, :, :1],
        host=np.zeros((1, nodes), dtype=np.int64),
        room=np.zeros((layers, nodes), dtype=np.int64),
        shared=np.zeros((1, nodes), dtype=np.int64),
    )
    trail = descend(field, rounds=_ROUNDS, floor=_FLOOR_PACK, thrift=0.0)
    held = np.sort(trail.pick(trail.most.argmin(axis=0)), axis=2)
    members = held[:, :, :, None] * size + np.arange(size)
    return members.reshape(layers, nodes, each * size)


def _build_field(current: Placement, loads: Floats, topology: Topology, *, strict: bool = True) -> Field:
    """The current placement as a start for `descend`; `strict` checks it against the topology's limits."""
    layers, experts, ranks = current.layers, current.experts, current.ranks
    nodes, inner = topology.nodes, current.ranks // topology.nodes
    rank, slot = np.nonzero(current.table != EMPTY)
    keys = current.table[rank, slot].astype(np.int64)
    layer, expert = np.divmod(keys, experts)
    cell = layer * ranks + rank
    used = np.bincount(cell, minlength=layers * ranks)
    order = np.argsort(cell, kind="stable")
    ordered = cell[order]
    at = np.arange(ordered.size) - (np.cumsum(used) - used)[ordered]
    limit = topology.layer_slots
    most = int(used.max())
    if strict and limit is not None and most > limit:
        where = divmod(int(used.argmax()), ranks)
        raise ValueError(f"rank {where[1]} holds {most} experts of layer {where[0]}, layer_slots is {limit}")
    width = max(most, limit) if limit is not None else most + 2
    held = np.full((layers * ranks, width), experts, dtype=np.int64)
    held[ordered, at] = expert[order]
    here = np.zeros((layers, experts, ranks), dtype=np.bool_)
    here[layer, expert, rank] = True
    host = np.unique(np.array(topology.hosts), return_inverse=True)[1]
    near = np.zeros((layers, experts, int(host.max()) + 1), dtype=np.bool_)
    near[layer, expert, host[rank]] = True
    if strict and nodes > 1:
        _check_nodes(here, topology)
    per_rank = used.reshape(layers, nodes, inner)
    if limit is not None:
        room = limit - per_rank
        shared = np.zeros((nodes, inner), dtype=np.int64)
    else:
        room = np.zeros_like(per_rank)
        shared = np.maximum(current.slots - topology.reserve_slots - per_rank.sum(axis=0), 0)
    if nodes == 1:
        return Field(loads, held.reshape(layers, ranks, width), here, near, host[None, :], room[:, 0], shared)
    owned = here.reshape(layers, experts, nodes, inner).transpose(0, 2, 1, 3)
    return Field(
        loads=np.where(owned.any(axis=3), loads[:, None, :], 0.0).reshape(layers * nodes, experts),
        held=held.reshape(layers * nodes, inner, width),
        home=owned.reshape(layers * nodes, experts, inner),
        near=np.repeat(near, nodes, axis=0),
        host=host.reshape(nodes, inner),
        room=room.reshape(layers * nodes, inner),
        shared=shared,
    )


def _check_nodes(here: Bools, topology: Topology) -> None:
    """Raises unless each layer's groups lie whole on one node each, equally many on all."""
    layers, experts, ranks = here.shape
    groups, nodes = topology.groups, topology.nodes
    shape = (layers, groups, experts // groups, nodes, ranks // nodes)
    held = here.reshape(shape).any(axis=(2, 4))
    for layer in range(layers):
        if not (held[layer].sum(axis=1) == 1).all() or not (held[layer].sum(axis=0) == groups // nodes).all():
            raise ValueError(f"layer {layer} has groups of experts on several nodes, or nodes with unequal groups")


def _rebuild(current: Placement, held: Ints) -> Placement:
    """The placement in which each rank holds `held` (int64[layers, ranks, width]): what stays keeps its slot, what
    arrives gets a slot that is empty now, or else one that is given up."""
    experts = current.experts
    layer, rank, at = np.nonzero(held < experts)
    keys = layer * experts + held[layer, rank, at]
    old_rank, old_slot = np.nonzero(current.table != EMPTY)
    old_keys = current.table[old_rank, old_slot].astype(np.int64)
    size = current.layers * experts
    wanted, present = _tell_apart(rank * size + keys), _tell_apart(old_rank * size + old_keys)
    span = int(max(wanted.max(), present.max())) + 1
    there = np.zeros(span, dtype=np.bool_)
    there[wanted] = True
    stays = there[present]
    there[:] = False
    there[present] = True
    arrives = np.flatnonzero(~there[wanted])
    result = np.full_like(current.table, EMPTY)
    result[old_rank[stays], old_slot[stays]] = old_keys[stays]
    arrives = arrives[np.argsort(rank[arrives], kind="stable")]
    new_rank = rank[arrives]
    # Free slots of each rank, those that are empty now first.
    order = np.argsort((result != EMPTY) * np.int8(2) + (current.table != EMPTY), axis=1, kind="stable")
    turn = np.arange(new_rank.size) - np.searchsorted(new_rank, new_rank)
    result[new_rank, order[new_rank, turn]] = keys[arrives]
    return Placement(current.layers, experts, result)


def _tell_apart(cells: Ints) -> Ints:
    """The same numbers where all differ; else numbers that differ, so that the n-th of a kind meets the n-th."""
    order = np.argsort(cells, kind="stable")
    ordered = cells[order]
    if not (ordered[1:] == ordered[:-1]).any():
        return cells
    result = np.empty_like(cells)
    result[order] = np.arange(cells.size) - np.searchsorted(ordered, ordered)
    return result * (int(ordered[-1]) + 1) + cells


def _say_why(bill: Bill, prices: Prices) -> str:
    if bill.moved_slots == 0:
        return f"giving up replicas saves {bill.saved_us_per_step:.1f} us per step and moves nothing"
    return (
        f"moving {bill.moved_slots} slots ({bill.moved_bytes / 1e6:.1f} MB, {bill.far_slots} between hosts) costs "
        f"{bill.cost_us / 1e3:.1f} ms of link time and saves {bill.saved_us_per_step:.1f} us per step, "
        f"{bill.gain_us / 1e3:.1f} ms over {prices.horizon_steps:.0f} steps"
    )


def _say_why_not(before: Skew, gain: Floats, cost: Floats, moved: Ints, prices: Prices) -> str:
    if before.lost_us_per_step <= 0:
        return "nothing is lost to skew under these loads"
    worth = np.where((gain > 0) & (moved > 0), gain / np.maximum(cost, 1e-30), -1.0)
    if not (worth > 0).any():
        return f"{before.lost_us_per_step:.1f} us per step are lost to skew, but no move found lowers that"
    point, layer = np.unravel_index(int(worth.argmax()), worth.shape)
    return (
        f"{before.lost_us_per_step:.1f} us per step are lost to skew, but moves do not pay: the best, "
        f"{int(moved[point, layer])} slots of layer {int(layer)}, would cost {cost[point, layer] / 1e3:.3f} ms of link "
        f"time and save {gain[point, layer] / 1e3:.3f} ms over {prices.horizon_steps:.0f} steps"
    )
