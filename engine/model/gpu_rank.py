"""GpuGroup: what a rank of a group on a GPU is made of, opened in order: slots, mailbox, model with its steps, mesh.

Steps are captured before the rank has met anybody: alone in membership 0, which the head never names. Its place is
known by then, since a graph has the place of its mailbox in it. With a device of type cpu all is the same, eagerly and
by interpreted kernels, so that groups of processes can be tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch

from engine.config import RankConfig, model_directory
from engine.errors import ConfigError
from engine.model.device_grouping import DeviceGrouping, open_device_grouping, open_device_parts
from engine.model.device_loads import DeviceLoads
from engine.model.device_slots import DeviceSlotPool, DeviceSource
from engine.model.expert_slots import TorchExpertSlots
from engine.model.gpu_group import GraphSteps
from engine.model.group import Connect
from engine.model.nvlink import NvlinkExchange, NvlinkRows
from engine.model.ops import Ops
from engine.model.passes import StepRunner
from engine.model.peer_memory import SharedMemory, allocate
from engine.model.pipeline import Pipeline
from engine.model.shapes import ModelShape, load_shape
from engine.model.step_forward import Peers
from engine.model.step_loading import Report, activations, choose_prompt_rows, load_step_model
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo
from kernels.mailbox import LEAST_LAYERS, MOST_ROWS, Mailbox, MailboxLayout

ALONE = 0
"""The membership of a rank that has met nobody."""
LOADS_S = 0.5
"""How often loads are brought to the host; the head is told them once a second."""


@dataclasses.dataclass(frozen=True)
class GpuGroup:
    """See the module.

    Attributes:
        grouping: slots, tables, where the others are met.
        exchange: this rank's end.
        share: its mailbox.
        limit_s: longest wait for another rank's rows.
        dense_bytes: that a step reads whatever its rows are.
    """

    grouping: DeviceGrouping
    exchange: NvlinkExchange
    share: SharedMemory
    limit_s: float
    dense_bytes: int

    @property
    def pools(self) -> tuple[DeviceSlotPool, ...]:
        """By part."""
        return self.grouping.pools

    @property
    def sources(self) -> tuple[DeviceSource, ...]:
        """By part."""
        return self.grouping.sources

    @property
    def address(self) -> str:
        """Where the other members dial this device."""
        return self.grouping.address

    @property
    def connect(self) -> Connect:
        """Meets them."""
        return self.grouping.connect

    @property
    def group_s(self) -> float:
        """See `Limits`."""
        return self.grouping.group_s

    @property
    def close(self) -> Callable[[], None]:
        """Ends what was opened, but for the mailbox, which the steps close."""
        return self.grouping.close

    def make_steps(
        self, runner: StepRunner, model: StepModel, pipeline: Pipeline, experts: TorchExpertSlots
    ) -> GraphSteps:
        """The steps of this rank; all arguments are borrowed."""
        parts = self.grouping.parts
        device = self.share.device
        # Pinned memory would make a context on whatever device is the thread's.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return GraphSteps(
                runner,
                model,
                pipeline,
                experts,
                parts,
                self.exchange,
                self.share,
                DeviceLoads(parts, dense_bytes=self.dense_bytes, every_s=LOADS_S),
                limit_s=self.limit_s,
                idle_limit=self.grouping.idle_steps,
            )


def load_gpu_group(
    config: RankConfig,
    report: Report,
    device: torch.device,
    *,
    place: int,
    mesh_address: str,
    poison: bool = False,
    connect: Connect | None = None,
    ops: Ops | None = None,
    prompt_rows: tuple[int, ...] = (),
    peers: Callable[[Mailbox, int], Peers] = NvlinkRows,
) -> tuple[StepModel, DeviceInfo, GpuGroup]:
    """As `load_step_model`, of a rank of a group.

    Args:
        place: of this rank in its group, all its life long.
        mesh_address: path of the socket where the others find it.
        connect: in place of a mesh of sockets, for tests.
        peers: in place of the kernels' exchange, for tests.

    Raises:
        ConfigError: see `load_step_model` and `open_device_parts`; or the mailbox takes no such steps.
        DeviceError: there is no memory that peers could map.
        EngineError, OSError: the socket can not be bound.
    """
    prompt_rows = prompt_rows or choose_prompt_rows(config)
    layout = _lay_out(config, load_shape(model_directory(config.model)), max(prompt_rows))
    limit_s = config.limits.exchange_s
    parts, close = open_device_parts(config, device)
    try:
        share = allocate(layout.num_bytes, device, repr(layout))
        try:
            exchange = NvlinkExchange(layout, place, share.memory, limit_s=limit_s)
            exchange.enter(ALONE, {place: share.address})
            model, info = load_step_model(
                config,
                report,
                device,
                poison=poison,
                ops=ops,
                prompt_rows=prompt_rows,
                parts=parts,
                peers=lambda rows: peers(exchange.mailbox, rows),
                mesh_address=mesh_address,
            )
        except BaseException:
            share.close()
            raise
    except BaseException:
        close()
        raise
    grouping = open_device_grouping(config, parts, close, mesh_address, connect, share)
    return model, info, GpuGroup(grouping, exchange, share, limit_s, model.dense_bytes)


def _lay_out(config: RankConfig, shape: ModelShape, prompt_rows: int) -> MailboxLayout:
    """The mailbox of a rank. Raises ConfigError if there is none for its steps."""
    rows, layers = config.limits.decode_rows, shape.num_layers
    if rows > MOST_ROWS:
        raise ConfigError(f"limits.decode_rows {rows} is more than a rank of a group on GPUs may have ({MOST_ROWS})")
    if layers < LEAST_LAYERS:
        raise ConfigError(f"a model of {layers} layer can not be in a group on GPUs (at least {LEAST_LAYERS})")
    return MailboxLayout(
        ranks=config.group,
        layers=layers,
        capacity=max(rows, prompt_rows),
        hidden=shape.hidden,
        top_k=shape.top_k,
        dtype=activations(config),
    )
