"""What a placement of experts has to respect: hosts, slots to leave empty, limits per layer and per node."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


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
            raise ValueError(f"{self.groups} groups and {len(self.hosts)} ranks do not divide over {self.nodes} nodes")
        if self.reserve_slots < 0:
            raise ValueError(f"reserve_slots is {self.reserve_slots}, not below 0")


def check_nodes(here: Bools, topology: Topology) -> None:
    """Raises unless each layer's groups lie whole on one node each, equally many on all."""
    layers, experts, ranks = here.shape
    groups, nodes = topology.groups, topology.nodes
    shape = (layers, groups, experts // groups, nodes, ranks // nodes)
    held = np.logical_or.reduce(here.reshape(shape), axis=(2, 4)).astype(np.int64)
    whole = (held.sum(axis=2) == 1).all(axis=1) & (held.sum(axis=1) == groups // nodes).all(axis=1)
    for layer in range(layers):
        if not whole[layer]:
            raise ValueError(f"layer {layer} has groups of experts on several nodes, or nodes with unequal groups")
