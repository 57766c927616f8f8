"""DeviceGrouping: what a rank of a group has on a GPU beyond its model: slots, tables, where experts are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from engine.config import RankConfig, model_directory
from engine.model.checkpoint import ExpertReader
from engine.model.device_slots import DevicePart, DeviceSlotPool, DeviceSource, PutExpert
from engine.model.device_tables import DeviceTables
from engine.model.dummy import DummySource
from engine.model.group import Connect
from engine.model.grouping import open_meeting, plan_parts
from engine.model.peer_memory import SharedMemory
from engine.model.shapes import ModelShape, load_shape
from engine.model.slot_form import SlotForm
from engine.model.step_loading import activations, keeps_stored_bytes
from engine.model.weight_sources import PlainExperts, StoredSource

Close = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class DeviceGrouping:
    """See the module.

    Attributes:
        parts: of the model, in the order of `PARTS`.
        address: where the other members dial this device.
        connect: meets them.
        idle_steps, group_s: of the limits.
        close: ends what was opened for it.
    """

    parts: tuple[DevicePart, ...]
    address: str
    connect: Connect
    idle_steps: int
    group_s: float
    close: Close

    @property
    def pools(self) -> tuple[DeviceSlotPool, ...]:
        """By part."""
        return tuple(part.pool for part in self.parts)

    @property
    def sources(self) -> tuple[DeviceSource, ...]:
        """By part."""
        return tuple(part.source for part in self.parts)


def open_device_parts(
    config: RankConfig, device: torch.device, *, routed: bool = False, drafts: bool = False
) -> tuple[tuple[DevicePart, ...], Close]:
    """Allocates the slots and tables of a rank of a group, all of them empty; before the model is loaded.

    Args:
        routed: see `DeviceTables`.
        drafts: whether there is to be a part for the drafter, of a model that has one.

    Returns:
        (parts, what closes the files that experts are read from).

    Raises:
        ConfigError: the model can not be read, or its slots do not fit the device's memory.
    """
    shape = load_shape(model_directory(config.model))
    dtype, put, close = _open_experts(config, shape, device)
    form = SlotForm(shape.hidden, shape.expert_width, dtype)
    parts = []
    try:
        for size in plan_parts(config, shape)[: 2 if drafts else 1]:
            pool = DeviceSlotPool(size.name, size.layers, size.experts, size.slots, form, device)
            tables = DeviceTables(pool.info, device, routed=routed)
            parts.append(DevicePart(pool, tables, DeviceSource(pool, size.stack, put)))
    except BaseException:
        close()
        raise
    return tuple(parts), close


def open_device_grouping(
    config: RankConfig,
    parts: tuple[DevicePart, ...],
    close: Close,
    address: str,
    connect: Connect | None = None,
    share: SharedMemory | None = None,
) -> DeviceGrouping:
    """Listens for the other members.

    Args:
        parts, close: of `open_device_parts`; taken.
        address: path of a socket.
        connect: in place of a mesh of sockets, for tests.
        share: memory for them, see `open_mesh`; borrowed.

    Raises:
        EngineError, OSError: the socket can not be bound.
    """
    connect, close = open_meeting(config, address, connect, close, share)
    return DeviceGrouping(parts, address, connect, config.limits.idle_steps, config.limits.group_s, close)


def _open_experts(config: RankConfig, shape: ModelShape, device: torch.device) -> tuple[torch.dtype, PutExpert, Close]:
    """The type of slots, what fills them, and what closes it."""
    directory = model_directory(config.model)
    if config.load_format == "dummy":
        return torch.uint8, DummySource(shape, device).put_expert, _close_nothing
    if keeps_stored_bytes(config, shape):
        stored = StoredSource(directory, shape, device)
        return torch.uint8, stored.put_expert, stored.close
    reader = ExpertReader(directory, shape)
    return activations(config), PlainExperts(reader).put_expert, reader.close


def _close_nothing() -> None:
    """Dummy experts are in no file."""
