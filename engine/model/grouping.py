"""Grouping: what a rank of a group has beyond its model: slots, where experts are read, where the others are met."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import RankConfig
from engine.core.group import Membership
from engine.core.pact import PARTS
from engine.errors import ConfigError
from engine.model.checkpoint import ExpertReader
from engine.model.dispatch import Mesh
from engine.model.group import Connect
from engine.model.layers import WeightMap
from engine.model.mesh import MeshListener, open_mesh
from engine.model.peer_memory import SharedMemory
from engine.model.shapes import ModelShape
from engine.model.slots import PartSource, SlotPool
from transport.messages import Part


@dataclasses.dataclass(frozen=True)
class Grouping:
    """See the module.

    Attributes:
        pools, sources: by part.
        address: where the other members dial this device.
        connect: meets them.
        idle_steps, group_s: of the limits.
        close: ends what was opened for it.
    """

    pools: tuple[SlotPool, ...]
    sources: tuple[PartSource, ...]
    address: str
    connect: Connect
    idle_steps: int
    group_s: float
    close: Callable[[], None]


class PartSize(NamedTuple):
    """A part of the model and its slots on one rank.

    Attributes:
        stack: prefix of its layers' names in a checkpoint.
    """

    name: Part
    stack: str
    layers: int
    experts: int
    slots: int


def plan_parts(config: RankConfig, shape: ModelShape) -> tuple[PartSize, ...]:
    """The parts of a model whose experts are in slots, in the order of `PARTS`."""
    sizes = [("layers", shape.num_layers, shape.num_experts, config.experts_main.spare_slots)]
    if shape.drafter is not None:
        drafter = shape.drafter
        sizes.append(("mtp", drafter.num_stages, drafter.num_experts, config.experts_draft.spare_slots))
    elif shape.num_predict_layers:
        sizes.append(("mtp", shape.num_predict_layers, shape.num_experts, config.experts_draft.spare_slots))
    return tuple(
        PartSize(part, stack, layers, experts, count_slots(layers, experts, config.group, spare))
        for part, (stack, layers, experts, spare) in zip(PARTS, sizes, strict=False)
    )


def count_slots(layers: int, experts: int, ranks: int, spare: int) -> int:
    """Slots of each rank of a group for one part."""
    return -(-layers * experts // ranks) + spare


def open_grouping(
    config: RankConfig, directory: Path, shape: ModelShape, weights: WeightMap, address: str, connect: Connect | None
) -> Grouping:
    """Allocates the slots and listens.

    Args:
        weights: without experts; the norms are read.
        address: path of a socket.
        connect: in place of a mesh of sockets, for tests.

    Raises:
        ConfigError: the checkpoint can not be used, or `replay_rows` is not 0.
        EngineError, OSError: the socket can not be bound.
    """
    if config.replay_rows:
        raise ConfigError(
            f"replay_rows must be 0 for ranks of a group (group is {config.group}), found {config.replay_rows}"
        )
    sizes = plan_parts(config, shape)
    pools = tuple(
        SlotPool(size.name, size.layers, size.experts, size.slots, shape.hidden, shape.expert_width, shape.clamp)
        for size in sizes
    )
    reader = ExpertReader(directory, shape)
    sources = tuple(_make_source(pool, reader, size.stack, weights) for pool, size in zip(pools, sizes, strict=True))
    connect, close = open_meeting(config, address, connect, reader.close)
    return Grouping(pools, sources, address, connect, config.limits.idle_steps, config.limits.group_s, close)


def open_meeting(
    config: RankConfig,
    address: str,
    connect: Connect | None,
    close: Callable[[], None],
    share: SharedMemory | None = None,
) -> tuple[Connect, Callable[[], None]]:
    """Listens for the other members, unless a test has them met otherwise.

    Args:
        close: what is to be closed with it, and is where this fails.
        share: memory for the others, see `open_mesh`; borrowed.

    Returns:
        (how members are met, what closes all).

    Raises:
        EngineError, OSError: the socket can not be bound.
    """
    if connect is not None:
        return connect, close
    try:
        listener = MeshListener(address)
    except BaseException:
        close()
        raise

    def meet(membership: Membership, place: int, is_wanted: Callable[[], bool]) -> Mesh:
        limits = config.limits
        return open_mesh(
            listener,
            membership,
            place,
            limit_s=limits.exchange_s,
            is_wanted=is_wanted,
            meet_s=limits.group_s,
            share=share,
        )

    def close_both() -> None:
        listener.close()
        close()

    return meet, close_both


def _make_source(pool: SlotPool, reader: ExpertReader, stack: str, weights: WeightMap) -> PartSource:
    # Copies: a view would keep all of the checkpoint's tensor that it is of.
    folds = tuple(
        weights[f"{stack}.{layer}.ffn_norm.weight"].to(torch.float32, copy=True) for layer in range(pool.info.layers)
    )
    return PartSource(pool, lambda layer, expert: reader.read(f"{stack}.{layer}.ffn.experts", expert), folds)
