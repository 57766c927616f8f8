"""Tickets: counts by which the programs of a launch find out who comes last, kept between launches."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def tickets_of(owner: Tensor, count: int, place: int = 0) -> Tensor:
    """int32[count] that are 0 whenever no launch is under way: whoever comes last sets them back.

    They belong to a tensor (and a place in it), such as a weight: launches on one must not overlap in time. They are
    never given back, since a captured graph may name them, and made outside of graphs: memory of a graph would be
    cleared in the replays of the graph that made it, and in no other.
    """
    return _tickets(owner.device, owner.data_ptr(), place, count)


@functools.cache
def _tickets(device: torch.device, address: int, place: int, count: int) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a launch whose programs wait for the last one must have run once before it is captured")
    return torch.zeros(count, dtype=torch.int32, device=device)
