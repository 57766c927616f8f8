"""Launch order: the launches of whole steps as on an H200, and whether they keep the rule of `launch_rule.py`.

`python -m tests.model.launch_order --case draft=4*4` runs a step over tensors that have shapes and no memory, reads of
each kernel's code what it does before it waits (`launch_facts.py`), and prints who breaks the rule: exit code 1 then.
With `--list` all launches. Kernels are not compiled, so a step takes seconds.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any


class _AsOnGpu(importlib.machinery.SourceFileLoader):
    """Loads a module of `kernels` that takes tensors without memory for a GPU's."""

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        return data.replace(b'.device.type == "cuda"', b'.device.type in ("cuda", "meta")')

    def get_code(self, fullname: str) -> Any:
        # Not what was compiled from the file itself.
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if not fullname.startswith("kernels."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _AsOnGpu(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())

# All of these behind the finder.
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton._C.libtriton import ir, passes  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from engine.bench.cases import cut_layers, load_model_config  # noqa: E402
from engine.model import step_forward  # noqa: E402
from engine.model.ahead_weights import make_ahead_weights  # noqa: E402
from engine.model.engram import engram_tables  # noqa: E402
from engine.model.nvlink import NvlinkRows  # noqa: E402
from engine.model.ops import triton_ops  # noqa: E402
from engine.model.records import plan_records  # noqa: E402
from engine.model.shapes import ModelShape, shape_from_config  # noqa: E402
from engine.model.step_ahead import StepAhead  # noqa: E402
from engine.model.step_drafts import DraftStep  # noqa: E402
from engine.model.step_forward import StepSize  # noqa: E402
from engine.model.step_greedy import GreedyStep  # noqa: E402
from engine.model.step_shared import open_step  # noqa: E402
from engine.model.step_weights import local_experts, make_step_weights  # noqa: E402
from kernels.forms import DraftState, SlotWeights  # noqa: E402
from kernels.mailbox import STATE_WORDS, Mailbox, MailboxLayout  # noqa: E402
from tests.model.compile_step import META, NoDevice, ShapeSource  # noqa: E402
from tests.model.launch_facts import ANYWHERE, Facts, read_facts  # noqa: E402
from tests.model.launch_rule import Launch, find_breaks  # noqa: E402

PAGE_TOKENS, PAGES = 256, 8
AHEAD = {
    ("_attend_kernel", "arena"): "records of earlier steps only, which positions tell from those of this one",
    ("_enter_attention_kernel", "arena"): "the same of its rings",
}
"""What may be read ahead against the rule: by kernel and the beginning of an argument's name, why."""
WHOLE = frozenset({"streamed_kernel", "streamed_pair_kernel"})
"""Kernels whose programs take more than half of a multiprocessor's shared memory."""
REHEARSALS = "rehearsals"
"""Argument of kernels that go through their code that often before they wait, with nothing that they read or write."""


class Enough(Exception):
    """As many launches as were asked for."""


class Recorder(TorchDispatchMode):
    """Catches launches of kernels, and torch's own, in the order in which a stream has them.

    Attributes:
        launches: see `launch_rule`.
        mailbox: what kernels may write by addresses that they have read; None for nothing.
        front: what the next launch has in front of it.
    """

    def __init__(self, most: int) -> None:
        """Args: `most`: launches, after which `Enough` is raised; 0 for all."""
        super().__init__()
        self.launches: list[Launch] = []
        self._most = most
        self.mailbox: Tensor | None = None
        self.front: tuple[int, ...] = ()
        self._kept: list[Any] = []

    def note(
        self, name: str, facts: Facts, arguments: dict[str, Any], *, is_early: bool, grid: Sequence[int] = ()
    ) -> None:
        """A launch, with what its arguments are."""
        buffers: dict[str, int] = {ANYWHERE: -1 if self.mailbox is None else self._buffer(self.mailbox)}
        for key, value in arguments.items():
            tensor = getattr(value, "base", value)
            if isinstance(tensor, Tensor):
                buffers[key] = self._buffer(tensor)

        def find(names: set[str]) -> frozenset[int]:
            return frozenset(buffers[name] for name in names if name in buffers)

        self.launches.append(
            Launch(
                name, self.front, is_early, waits=facts.waits, lets_in_ahead=facts.lets_in_ahead,
                reads_ahead=find(facts.reads_ahead - self._find_allowed(name, facts)),
                writes_ahead=find(facts.writes_ahead), writes=find(facts.writes),
                names={buffer: key for key, buffer in buffers.items()},
                whole=math.prod(grid) if name in WHOLE else 0,
            )
        )  # fmt: skip
        self.front = (len(self.launches) - 1,)
        if len(self.launches) == self._most:
            raise Enough

    @staticmethod
    def _find_allowed(name: str, facts: Facts) -> set[str]:
        return {arg for arg in facts.reads_ahead for kernel, part in AHEAD if kernel == name and arg.startswith(part)}

    def _buffer(self, tensor: Tensor) -> int:
        # Kept, so that no other one gets its number.
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return int(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        storages = {each.untyped_storage()._cdata for each in given}
        outs = [each for each in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(each, Tensor)]
        is_new = any(each.untyped_storage()._cdata not in storages for each in outs)
        if (is_new and "empty" not in name) or name.endswith("_"):
            written = {f"out{at}": each for at, each in enumerate(outs)}
            self.note(f"torch.{name}", Facts(writes=set(written)), written, is_early=False)
        return found

    def fork(self, call: Callable[[], Tensor], back: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """What a branch runs, behind what it has run (`back`) and the main line; its end."""
        main, self.front = self.front, (*self.front, *back)
        found = call()
        end, self.front = self.front, main
        return found, end

    def join(self, end: tuple[int, ...]) -> None:
        """The main line goes on behind a branch."""
        self.front = (*self.front, *end)


def record_branches(recorder: Recorder) -> type:
    """In place of `step_forward._Branch`."""

    class Branch:
        def __init__(self, device: torch.device, *, is_on: bool) -> None:
            self._end: tuple[int, ...] = ()

        def start(self, call: Callable[[], Tensor]) -> Tensor:
            found, self._end = recorder.fork(call, self._end)
            return found

        def join(self) -> None:
            recorder.join(self._end)
            self._end = ()

    return Branch


@contextmanager
def caught(recorder: Recorder) -> Iterator[None]:
    """Launches go to the recorder; nothing is compiled or run."""
    run, compile_one = jit.JITFunction.run, jit.JITFunction._do_compile

    def read(function: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, *_: Any):
        cache, _, target, backend, _ = function.device_caches[device]
        for place, name in enumerate(signature):
            if name == REHEARSALS and signature[name] != "constexpr":
                signature, constexprs = {**signature, name: "constexpr"}, {**constexprs, (place,): 0}
                attrs = {path: attr for path, attr in attrs.items() if path != (place,)}
        source = function.ASTSource(function, signature, constexprs, attrs)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(
            target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )
        manager = ir.pass_manager(module.context)
        passes.common.add_inliner(manager)
        passes.common.add_canonicalizer(manager)
        manager.run(module, "inline")
        cache[key] = SimpleNamespace(facts=read_facts(str(module)))
        return cache[key]

    def record(function: Any, *arguments: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        kernel = run(function, *arguments, grid=grid, warmup=True, **more)
        bound, _, _ = function.device_caches[0][4](*arguments, **more)
        recorder.note(function.__name__, kernel.facts, dict(bound), is_early=bool(more.get("launch_pdl")), grid=grid)
        return kernel

    jit.JITFunction.run, jit.JITFunction._do_compile = record, read
    try:
        with recorder:
            yield
    finally:
        jit.JITFunction.run, jit.JITFunction._do_compile = run, compile_one


class ExpertShapes(ShapeSource):
    """Also of single experts."""

    expert_dtype = torch.uint8

    @property
    def put_expert(self) -> Callable[[str, int, SlotWeights, int], None]:
        return lambda *_: None


def open_rows(model: str, layers: int, *, ranks: int, requests: int, span: int, rounds: int, recorder: Recorder) -> Any:
    """A step of a few layers: what is run."""
    config = cut_layers(load_model_config(model), layers)
    if rounds:
        config |= {"num_nextn_predict_layers": 1, "compress_ratios": [*config["compress_ratios"], 0]}
    shape: ModelShape = shape_from_config(config)
    experts = local_experts(shape.num_experts, ranks, 0)
    engram = None
    if shape.engram is not None:
        engram = engram_tables(shape, np.arange(shape.vocab_size) % shape.engram.num_classes)
    weights = make_step_weights(shape, ExpertShapes(shape), max_tokens=1024, experts=experts, engram=engram)
    size = StepSize(requests, span, PAGES)
    records = plan_records(shape, page_tokens=PAGE_TOKENS, num_pages=requests * PAGES, num_slabs=requests, format="fp8")
    arena = torch.empty(records.num_bytes, dtype=torch.uint8, device=META)
    peers = None
    if ranks > 1:
        layout = MailboxLayout(ranks, layers, size.rows, shape.hidden, shape.top_k)
        recorder.mailbox = torch.empty(layout.num_bytes, dtype=torch.uint8, device=META)
        words = [torch.empty(count, dtype=torch.int64, device=META) for count in (ranks, STATE_WORDS)]
        peers = NvlinkRows(Mailbox(layout, 0, recorder.mailbox, *words), size.rows)
    step_forward._Branch = record_branches(recorder)  # type: ignore[misc]
    ops = triton_ops()
    step = open_step(shape, weights, records, arena, ops, size, peers=peers)
    cells = torch.empty(requests + 1, dtype=torch.int32, device=META)
    state = DraftState(cells, cells.clone(), cells.clone(), cells.new_empty((requests + 1, span - 1)))
    if not rounds:
        return GreedyStep(step, state, ops) if span == 1 else step
    assert records.streams is not None
    layer = StepAhead(shape, weights, make_ahead_weights(shape, ExpertShapes(shape)), records.stages[0], arena, ops)
    return DraftStep(step, layer, state, records.streams, ops, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a step breaks the rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", default=[], help="draft=SEQUENCES*ROWS or rows=SEQUENCES*ROWS")
    parser.add_argument("--model", default="v4-flash")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="only so many launches")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    driver.set_active(NoDevice())
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=150 << 30)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[method-assign]
    wrong = 0
    for case in options.case or ["draft=4*4"]:
        kind, _, numbers = case.partition("=")
        requests, span = map(int, numbers.split("*"))
        recorder = Recorder(options.first)
        step = open_rows(
            options.model, options.layers, ranks=options.ranks, requests=requests, span=span,
            rounds=span - 1 if kind == "draft" else 0, recorder=recorder,
        )  # fmt: skip
        with caught(recorder), suppress(Enough):
            # As a capture does it: what is made once is made before.
            step.run()
            recorder.launches.clear()
            recorder.front = ()
            step.run()
        early = sum(launch.is_early for launch in recorder.launches)
        print(f"{case}: {len(recorder.launches)} launches, {early} of them early")
        if options.list:
            for number, launch in enumerate(recorder.launches):
                ahead = ", ".join(sorted(launch.names[buffer] for buffer in launch.reads_ahead))
                words = ["early" if launch.is_early else "plain", "lets in ahead" if launch.lets_in_ahead else ""]
                print(f"{number:4d} {launch.name:28s} {' '.join(words):20s} front {launch.front} ahead: {ahead}")
        breaks = find_breaks(recorder.launches)
        wrong += len(breaks)
        print("".join(f"  {each}\n" for each in breaks), end="")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
