"""Graph: a step captured once as a CUDA graph and replayed, one for each size of step.

The step's inputs are its static buffers, so a replay computes whatever the host put there. Graphs of one arena share a
memory pool: what a step allocates in between is the same memory in all of them.

**Why they may.** Torch asks that graphs of a pool run one at a time, and in the order of their captures, because memory
that one had freed by its end may be another's result. All steps of an arena go on one stream, and the order does not
matter where nothing in the pool is read behind a later replay of any of them. So it is a rule: inputs and whatever
outlives a step are buffers from outside, and results are read or copied, in the stream, before another graph is
replayed. `tests/model/test_graph.py` has what happens otherwise.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Outputs = TypeVar("Outputs", covariant=True)

WARM_UPS = 2
"""Runs before a capture: kernels compile and libraries make their handles."""
KERNEL, COPY, FILL = 0, 1, 2
"""Node types as the driver numbers them."""
NON_BLOCKING = 1
"""Of a stream: it does not wait for the default one."""


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


class GraphPool:
    """Memory that graphs share, see the module. All are captured on one stream: the allocator gives what was freed on
    a stream to that one only.

    Attributes:
        handle: as `torch.cuda.graph` takes it.
        stream: where to capture.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes no memory yet."""
        self.handle: Any = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            # Not one of torch's, which come in turn: after some, a step's branch would be on the same one.
            torch.cuda.current_stream().synchronize()
            stream = ctypes.c_void_p()
            _check(ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), NON_BLOCKING))
        self.stream = torch.cuda.ExternalStream(stream.value, device)


def pool_of(arena: Tensor) -> GraphPool:
    """That of all steps on an arena."""
    return _pool_at(arena.device, arena.data_ptr())


@functools.cache
def _pool_at(device: torch.device, address: int) -> GraphPool:
    # Never given up: one without graphs has no memory.
    return GraphPool(device)


class StepGraph(Generic[Outputs]):
    """A captured step, whose input buffers it borrows.

    Attributes:
        outputs: of the latest replay; with a pool, only until another of its graphs is replayed.
    """

    def __init__(self, step: Step[Outputs], pool: GraphPool | None = None) -> None:
        """Runs the step on its present inputs, then captures it.

        Args:
            pool: to share memory with others; None for memory of its own.
        """
        stream: torch.cuda.Stream = torch.cuda.Stream() if pool is None else pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step.run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        handle = None if pool is None else pool.handle
        with torch.cuda.graph(self._graph, pool=handle, stream=stream, capture_error_mode="thread_local"):
            self.outputs = step.run()
        self._graph.instantiate()

    @property
    def handle(self) -> int:
        """What can be launched, as the driver has it."""
        return self._graph.raw_cuda_graph_exec()

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
