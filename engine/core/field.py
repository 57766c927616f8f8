"""The arrays that a search for a placement works on: made from a placement, and a placement made of them.

A search sees problems: layers, or layers x nodes where groups of experts are bound to nodes. Problem i is node
i % nodes of layer i // nodes, with the ranks of that node.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from engine.core.placement import EMPTY, Placement
from engine.core.topology import Topology, check_nodes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Field:
    """Where a descent starts, and what limits it. Borrowed, never written.

    Attributes:
        loads: float64[problems, experts].
        held: int64[problems, ranks, width], expert or `experts` (empty).
        home: bool[problems, experts, ranks], the rank holds the expert in the placement in force: no bytes to move.
        near: bool[problems, experts, hosts], some rank of the host does.
        host: int64[nodes, ranks], the host of each rank; problem i is of node i % nodes.
        room: int64[problems, ranks], empty slots that the problem may fill.
        shared: int64[nodes, ranks], empty slots that any problem of the node may fill.
    """

    loads: Floats
    held: Ints
    home: Bools
    near: Bools
    host: Ints
    room: Ints
    shared: Ints


def build_field(current: Placement, loads: Floats, topology: Topology, *, strict: bool = True) -> Field:
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
        check_nodes(here, topology)
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


def build_placement(current: Placement, held: Ints) -> Placement:
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
