"""Chips: what a launch asks of the GPU that it is for, asked once."""

from __future__ import annotations

import functools

import torch


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device has Hopper's matrix unit and copy engine."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
