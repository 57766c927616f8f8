"""Ops: the one place that says which implementation of the kernels' operations a step runs.

On a CUDA device these are the Triton launchers; elsewhere the plain ones of `kernels.reference`, which have the same
names, arguments and results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

MODULES = {
    "ends": ("open_streams", "likeliest"),
    "linear": ("linear", "paired_linear", "grouped_linear", "gated_linear"),
    "hyper": ("connect", "collapse_head"),
    "rows": ("norm_rows", "prepare_queries", "write_window"),
    "compressor": ("compress",),
    "latents": ("compress_latents",),
    "entrance": ("enter_attention",),
    "indexer": ("select_entries", "prepare_and_select"),
    "candidates": ("select_and_rank", "select_among"),
    "memory": ("read_memory", "add_memory"),
    "attention": ("attend",),
    "gate": ("route",),
    "experts": ("mix_experts", "multiply_pairs"),
    "drafts": ("open_rows", "judge_rows", "keep_drafts", "open_slots", "pick_rows", "keep_streams"),
}
"""Operations by the module of `kernels` that has their launcher."""
OPERATIONS = tuple(name for names in MODULES.values() for name in names)

Ops = Any
"""A namespace with the names in OPERATIONS."""


def reference_ops() -> Ops:
    """Plain torch, on any device; loops over rows."""
    module = importlib.import_module("kernels.reference")
    return SimpleNamespace(**{name: getattr(module, name) for name in OPERATIONS})


def triton_ops(plain: frozenset[str] = frozenset()) -> Ops:
    """The launchers.

    Args:
        plain: operations that are taken from the reference instead, to find the one that is wrong.
    """
    ops = reference_ops()
    for module_name, names in MODULES.items():
        for name in names:
            if name not in plain:
                setattr(ops, name, getattr(importlib.import_module(f"kernels.{module_name}"), name))
    return ops


def ops_for(device: torch.device) -> Ops:
    """What a step on this device runs."""
    return triton_ops() if device.type == "cuda" else reference_ops()


def wrap_ops(ops: Ops, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Ops:
    """The same operations, each within what `around` makes of its name and itself."""
    return SimpleNamespace(**{name: around(name, call) for name, call in vars(ops).items()})
