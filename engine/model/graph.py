"""Graph: a step captured once as a CUDA graph and replayed, one for each size of step.

The step's inputs are its static buffers, so a replay computes whatever the host put there. Graphs may share a
memory pool, since steps run one after another: what a step allocates in between is the same memory in all of them then.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import torch

Outputs = TypeVar("Outputs", covariant=True)

WARM_UPS = 2
"""Runs before a capture: kernels compile and libraries make their handles."""
KERNEL, COPY, FILL = 0, 1, 2
"""Node types as the driver numbers them."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What a graph consists of."""

    kernels: int
    copies: int
    fills: int
    others: int


class Step(Protocol[Outputs]):
    """What can be captured: launches only, whose inputs and results stay where they are."""

    def run(self) -> Outputs:
        """Enqueues it."""
        ...


class StepGraph(Generic[Outputs]):
    """A captured step, whose input buffers it borrows.

    Attributes:
        outputs: of the latest replay.
    """

    def __init__(self, step: Step[Outputs], pool: Any = None) -> None:
        """Runs the step on its present inputs, then captures it.

        Args:
            pool: of another graph, to share memory with; None for one of its own.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step.run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.outputs = step.run()
        self._graph.instantiate()

    @property
    def pool(self) -> Any:
        """Memory that the next graph may share."""
        return self._graph.pool()

    def count_nodes(self) -> Nodes:
        """What the graph consists of."""
        return _count_nodes(self._graph.raw_cuda_graph())

    def replay(self) -> Outputs:
        """Enqueue the step on the current stream."""
        self._graph.replay()
        return self.outputs


def _count_nodes(graph: int) -> Nodes:
    """Asks the driver, whose library the process has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    total = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(total)))
    nodes = (ctypes.c_void_p * total.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(total)))
    found = {KERNEL: 0, COPY: 0, FILL: 0}
    others = 0
    for node in nodes:
        kind = ctypes.c_int(-1)
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value in found:
            found[kind.value] += 1
        else:
            others += 1
    return Nodes(found[KERNEL], found[COPY], found[FILL], others)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver returned {code}")
