"""Grouping: what a rank of a group has beyond its model: slots, where experts are read, where the others are met."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import RankConfig
from engine.core.group import Membership
from engine.core.pact import PARTS
from engine.errors import ConfigError
from engine.model.checkpoint import ExpertReader
from engine.model.dispatch import Mesh
from engine.model.expert_slots import PartSource
from engine.model.group import Connect
from engine.model.layers import WeightMap
from engine.model.mesh import MeshListener, open_mesh
from engine.model.shapes import ModelShape
from engine.model.slots import SlotPool


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
    sizes = [("layers", shape.num_layers, shape.num_experts, config.experts_main.spare_slots)]
    if shape.drafter is not None:
        drafter = shape.drafter
        sizes.append(("mtp", drafter.num_stages, drafter.num_experts, config.experts_draft.spare_slots))
    elif shape.num_predict_layers:
        sizes.append(("mtp", shape.num_predict_layers, shape.num_experts, config.experts_draft.spare_slots))
    pools = tuple(
        SlotPool(
            part, layers, experts, count_slots(layers, experts, config.group, spare),
            shape.hidden, shape.expert_width, shape.clamp,
        )
        for part, (_, layers, experts, spare) in zip(PARTS, sizes, strict=False)
    )  # fmt: skip
    reader = ExpertReader(directory, shape)
    sources = tuple(_make_source(reader, stack, layers, weights) for stack, layers, _, _ in sizes)
    if connect is not None:
        return Grouping(pools, sources, address, connect, config.limits.idle_steps, config.limits.group_s, reader.close)
    try:
        listener = MeshListener(address)
    except BaseException:
        reader.close()
        raise

    def meet(membership: Membership, place: int, is_wanted: Callable[[], bool]) -> Mesh:
        limits = config.limits
        return open_mesh(
            listener, membership, place, limit_s=limits.exchange_s, is_wanted=is_wanted, meet_s=limits.group_s
        )

    def close() -> None:
        listener.close()
        reader.close()

    return Grouping(pools, sources, address, meet, config.limits.idle_steps, config.limits.group_s, close)


def _make_source(reader: ExpertReader, stack: str, layers: int, weights: WeightMap) -> PartSource:
    # Copies: a view would keep all of the checkpoint's tensor that it is of.
    folds = tuple(weights[f"{stack}.{layer}.ffn_norm.weight"].to(torch.float32, copy=True) for layer in range(layers))
    return PartSource(lambda layer, expert: reader.read(f"{stack}.{layer}.ffn.experts", expert), folds)
