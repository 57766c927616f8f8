"""AheadWeights: the layer that predicts ahead (MTP) as a device's step reads it, with experts in slots of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.drafting import make_stage_role
from engine.model.shapes import ModelShape
from engine.model.slot_form import SlotForm
from engine.model.step_weights import LayerWeights, WeightSource, make_stage_weights
from kernels.forms import HyperWeights, SlotWeights, Weight

PREFIX = "mtp.0"


class ExpertSource(WeightSource, Protocol):
    """A source that also puts single experts into slots.

    Attributes:
        expert_dtype: of slots: uint8 for MXFP4.
    """

    expert_dtype: torch.dtype

    @property
    def put_expert(self) -> Callable[[str, int, SlotWeights, int], None]:
        """Of (stack of experts by the vendor's name, expert, slots, slot)."""
        ...


@dataclasses.dataclass(frozen=True)
class AheadWeights:
    """See the module. Embedding and head are the target's.

    Attributes:
        enter: [hidden, 2 * hidden]; the left half takes a stream, the right half the line of the token after it.
        stream_norm, token_norm: float32[hidden], of both halves' inputs.
        layer: the block; its `expert_to_slot` is for `slots`.
        collapse: coefficients before the head, and the norm in front of it.
        slots: of the experts that are here; None for a rank that only keeps the layer's window.
    """

    enter: Weight
    stream_norm: Tensor
    token_norm: Tensor
    layer: LayerWeights
    collapse: HyperWeights
    slots: SlotWeights | None

    @property
    def dense_bytes(self) -> int:
        """Bytes that each of its passes reads whatever its rows are; the head left out."""
        return self.enter.num_bytes + self.layer.dense_bytes + self.collapse.fn.nbytes


def make_ahead_weights(shape: ModelShape, source: ExpertSource, experts: range | None = None) -> AheadWeights:
    """Gather the layer's weights.

    Args:
        shape: a V4 model.
        source: where they come from.
        experts: those that this rank has; None for all, and an empty range for a rank that never drafts.

    Raises:
        ConfigError: the model has no such layer.
    """
    if not shape.num_predict_layers:
        raise ConfigError("the checkpoint has no layer that predicts ahead")
    experts = range(shape.num_experts) if experts is None else experts
    expert_to_slot = torch.full((shape.num_experts,), -1, dtype=torch.int32)
    expert_to_slot[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
    role = make_stage_role(shape, 0)
    layer, collapse = make_stage_weights(shape, role, source, expert_to_slot.to(source.device))
    slots = None
    if len(experts):
        form = SlotForm(shape.hidden, shape.expert_width, source.expert_dtype)
        slots = form.allocate(len(experts), source.device)
        for slot, expert in enumerate(experts):
            source.put_expert(f"{PREFIX}.ffn.experts", expert, slots, slot)
    streams, token = (source.matrix(f"{PREFIX}.{name}.weight") for name in ("h_proj", "e_proj"))
    return AheadWeights(
        enter=join_columns(streams, token),
        stream_norm=source.vector(f"{PREFIX}.hnorm.weight"),
        token_norm=source.vector(f"{PREFIX}.enorm.weight"),
        layer=layer,
        collapse=collapse,
        slots=slots,
    )


def join_columns(left: Weight, right: Weight) -> Weight:
    """One weight for inputs side by side. Scales of blocks stay what they are, as blocks do not cross the seam."""
    if left.scale is None or right.scale is None:
        return Weight(torch.cat((left.data, right.data), 1))
    assert left.block == right.block and left.data.shape[1] % left.block[1] == 0
    # torch.cat does not know fp8 on every device.
    data = torch.cat((left.data.view(torch.uint8), right.data.view(torch.uint8)), 1)
    scale = torch.cat((left.scale, right.scale), 1)
    return Weight(data.view(left.data.dtype), scale, left.block)
