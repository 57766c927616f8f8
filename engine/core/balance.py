"""Decides whether experts should move: loads, current placement, topology and prices in; a target with a bill out.

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

from engine.core.descend import descend
from engine.core.field import Field, build_field, build_placement
from engine.core.load import Skew, measure_skew
from engine.core.pack import choose_counts, pack, spread_room, vary_counts
from engine.core.placement import Placement
from engine.core.topology import Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROUNDS = 20
_FLOOR_PLAN = 0.002
_FLOOR_PACK = 0.0005
_THRIFT = 0.2
_VARIED_SLOTS = 20_000


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
    field = build_field(current, loads, topology)
    trail = descend(field, rounds=_ROUNDS, floor=_FLOOR_PLAN, thrift=_THRIFT)
    if topology.layer_slots is not None and current.has_doubles():
        # Two replicas on one rank (no plan of ours makes them): to give one up need not be the best use of it.
        trail = trail.join(descend(field, rounds=_ROUNDS, floor=_FLOOR_PLAN, thrift=_THRIFT, keep_doubles=True))
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
    target = build_placement(current, held) if (point > 0).any() else current
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
    names = np.concatenate([members.reshape(layers * nodes, -1), np.full((layers * nodes, 1), experts)], axis=1)
    alone = np.zeros((layers * nodes, experts))
    np.put_along_axis(alone, names[:, :-1], inside, axis=1)
    base = dataclasses.replace(build_field(current, loads, topology, strict=False), loads=alone)
    variants, room, shared = _share_slots(current, inside, topology)
    times = variants.shape[0]
    width = int(room.max()) + (0 if topology.layer_slots is not None else 2)
    held = pack(np.tile(inside, (times, 1)), variants.reshape(-1, inside.shape[1]), np.tile(room, (times, 1)), width)
    names = np.tile(names, (times, 1))
    held = np.take_along_axis(names, held.reshape(len(held), -1), axis=1).reshape(held.shape)
    field = dataclasses.replace(
        base,
        loads=np.tile(base.loads, (times, 1)),
        held=held,
        home=np.tile(base.home, (times, 1, 1)),
        near=np.tile(base.near, (times, 1, 1)),
        room=np.tile(room, (times, 1)) - (held < experts).sum(axis=2),
        shared=shared,
    )
    trail = descend(field, rounds=_ROUNDS, floor=_FLOOR_PACK, thrift=0.0)
    most = trail.most.min(axis=0).reshape(times, -1)
    variant = most.argmin(axis=0)
    held = trail.pick(trail.most.argmin(axis=0)).reshape(times, layers * nodes, ranks, width)
    held = held[variant, np.arange(layers * nodes)]
    return build_placement(current, held.reshape(layers, current.ranks, width))


def _check(current: Placement, loads: Floats, topology: Topology) -> None:
    if loads.shape != (current.layers, current.experts):
        raise ValueError(f"loads of shape {loads.shape} for {current.layers} layers x {current.experts} experts")
    if not np.isfinite(loads).all() or float(loads.min()) < 0:
        raise ValueError("loads are finite and not negative")
    if len(topology.hosts) != current.ranks:
        raise ValueError(f"{len(topology.hosts)} hosts for {current.ranks} ranks")
    if current.experts % topology.groups:
        raise ValueError(f"{current.experts} experts do not divide into {topology.groups} groups")


def _share_slots(current: Placement, inside: Floats, topology: Topology) -> tuple[Ints, Ints, Ints]:
    """For a packing from nothing: replica counts to try (int64[variants, problems, experts]), slots per rank of each
    problem, and shared slots left over."""
    problems, members = inside.shape
    nodes = topology.nodes
    layers, ranks = problems // nodes, current.ranks // nodes
    usable = current.slots - topology.reserve_slots
    if topology.layer_slots is not None:
        if topology.layer_slots * ranks < members:
            raise ValueError(f"layer_slots {topology.layer_slots} x {ranks} ranks can not hold {members} experts")
        if topology.layer_slots * layers > usable:
            raise ValueError(f"{layers} layers x layer_slots {topology.layer_slots} exceed {usable} slots of a rank")
        room = np.full((problems, ranks), topology.layer_slots, dtype=np.int64)
        bits = int(np.log2(max(1.0, _VARIED_SLOTS / room.sum())))
        counts = vary_counts(inside, topology.layer_slots * ranks - members, ranks, bits)
        return counts, room, np.zeros((nodes, ranks), dtype=np.int64)
    extra = ranks * usable - layers * members
    if extra < 0:
        raise ValueError(
            f"{ranks} ranks x {usable} slots ({topology.reserve_slots} reserved) can not hold "
            f"{layers} layers x {members} experts"
        )
    counts = np.empty(inside.shape, dtype=np.int64)
    room = np.empty((problems, ranks), dtype=np.int64)
    for node in range(nodes):
        counts[node::nodes] = choose_counts(inside[node::nodes], extra, ranks, pooled=True)
        room[node::nodes] = spread_room(counts[node::nodes].sum(axis=1), ranks)
    shared = usable - room.reshape(layers, nodes, ranks).sum(axis=0)
    return counts[None], room, shared


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
    result: Ints = members.reshape(layers, nodes, each * size)
    return result


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
