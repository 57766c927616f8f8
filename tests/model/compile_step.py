"""Compiles every kernel of a step for an H200 as the step launches it, on a machine without one.

`python -m tests.model.compile_step --case decode=16*1@1k --as-rank-of 2` runs the step over tensors that have shapes
and no memory, catches each launch, compiles it for sm_90 and prints registers, spills and shared memory. It finds what
a compiler finds, at real sizes, and counts the launches of a step.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from engine.bench.cases import cut_layers, load_model_config, parse_case
from engine.bench.rig import PAGE_TOKENS, count_pages
from engine.model.checkpoint import tensor_specs
from engine.model.engram import engram_tables
from engine.model.ops import triton_ops
from engine.model.records import plan_records
from engine.model.shapes import ModelShape, shape_from_config
from engine.model.step_forward import PeerRows, StepForward, StepSize
from engine.model.step_shared import open_step
from engine.model.step_weights import local_experts, make_step_weights
from kernels.forms import SlotWeights, Weight

META = torch.device("meta")
TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_LIMIT = 232448
"""Bytes of shared memory that a program may have on sm_90."""


class ShapeSource:
    """A `WeightSource` of tensors without memory, quantised as a vendor's."""

    def __init__(self, shape: ModelShape) -> None:
        self.device = META
        self._shape = shape
        self._specs = tensor_specs(shape)

    def matrix(self, *names: str) -> Weight:
        rows = sum(self._specs[name].shape[0] for name in names)
        columns = self._specs[names[0]].shape[1]
        if any(self._specs[name].store != "fp8" for name in names):
            return Weight(torch.empty((rows, columns), dtype=torch.bfloat16, device=META))
        block = self._shape.weight_block or (128, 128)
        scale = torch.empty((-(-rows // block[0]), -(-columns // block[1])), dtype=torch.uint8, device=META)
        return Weight(torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=META), scale, block)

    def vector(self, name: str) -> Tensor:
        return torch.empty(self._specs[name].shape, device=META)

    def embedding(self, name: str) -> Tensor:
        return torch.empty(self._specs[name].shape, dtype=torch.bfloat16, device=META)

    def ids(self, name: str) -> Tensor:
        return torch.empty(self._specs[name].shape, dtype=torch.int32, device=META)

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        rows, columns = self._specs[name].shape
        data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=META)
        return data, torch.empty((rows, -(-columns // 32)), dtype=torch.uint8, device=META)

    def slots(self, owned: Sequence[tuple[int, int]]) -> SlotWeights:
        width, hidden, count = self._shape.expert_width, self._shape.hidden, len(owned)
        sizes = ((2 * width, hidden // 2), (2 * width, hidden // 32), (hidden, width // 2), (hidden, width // 32))
        return SlotWeights(*(torch.empty((count, *size), dtype=torch.uint8, device=META) for size in sizes))


class NoDevice:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return META

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


class Launches:
    """Catches launches of kernels; compiles each that is new."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.kernels: dict[int, tuple[str, Any]] = {}
        self.failed: dict[str, str] = {}
        run = jit.JITFunction.run

        def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **more: Any) -> Any:
            name = function.__name__
            self.counts[name] += 1
            try:
                kernel = run(function, *arguments, grid=grid, warmup=True, **more)
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {error}"
                return None
            if id(kernel) not in self.kernels:
                self.kernels[id(kernel)] = (name, kernel)
            return kernel

        jit.JITFunction.run = compile_only


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack and local bytes of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)}


def open_case(options: argparse.Namespace, case_text: str) -> StepForward:
    """A step of the case's size over tensors without memory."""
    config = load_model_config(options.model)
    shape = shape_from_config(cut_layers(config, options.layers) if options.layers else config)
    case = parse_case(case_text)
    experts = local_experts(shape.num_experts, options.ranks, 0)
    engram = (
        None if shape.engram is None else engram_tables(shape, np.arange(shape.vocab_size) % shape.engram.num_classes)
    )
    weights = make_step_weights(shape, ShapeSource(shape), max_tokens=1024, experts=experts, engram=engram)
    size = StepSize(case.requests, case.rows, count_pages(case))
    records = plan_records(
        shape,
        page_tokens=PAGE_TOKENS,
        num_pages=case.requests * size.pages,
        num_slabs=case.requests,
        format=options.records,
    )
    arena = torch.empty(records.num_bytes, dtype=torch.uint8, device=META)
    peers = None
    if options.ranks > 1:
        places = (shape.num_layers, size.rows * options.ranks, shape.top_k)
        peers = PeerRows(
            torch.empty((size.rows * options.ranks, shape.hidden), dtype=torch.bfloat16, device=META),
            torch.empty(places, dtype=torch.int32, device=META),
            torch.empty(places, device=META),
        )
    return open_step(shape, weights, records, arena, triton_ops(), size, peers=peers)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a kernel does not compile or does not fit; spills are marked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="v4-flash")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--as-rank-of", type=int, default=2, dest="ranks")
    parser.add_argument("--records", default="fp8")
    parser.add_argument("--layers", type=int, default=5, help="0 for all")
    options = parser.parse_args(argv)
    driver.set_active(NoDevice())
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=150 << 30)
    launches = Launches()
    wrong = 0
    for case in options.case or ["decode=16*1@1k"]:
        launches.counts.clear()
        launches.failed.clear()
        seen = set(launches.kernels)
        began = time.perf_counter()
        open_case(options, case).run()
        total = sum(launches.counts.values())
        print(f"{case}: {total} launches of kernels, compiled in {time.perf_counter() - began:.0f} s")
        for name, count in launches.counts.most_common():
            print(f"  {count:5d} {name}")
        for name, error in launches.failed.items():
            print(f"  WRONG {name}: {error[:1000]}")
            wrong += 1
        for key, (name, kernel) in launches.kernels.items():
            if key in seen:
                continue
            found = resources(kernel)
            shared = kernel.metadata.shared
            wrong += shared > SHARED_LIMIT
            spills = found.get("LOCAL", 0) > 0 or found.get("STACK", 0) > 0
            word = "WRONG" if shared > SHARED_LIMIT else "spill" if spills else "ok"
            print(
                f"  {word:5s} {name:28s} {kernel.metadata.num_warps:2d} warps"
                f" {found.get('REG', 0):3d} registers, stack {found.get('STACK', 0)}, local {found.get('LOCAL', 0)},"
                f" shared {shared}"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
