"""Has Triton's interpreter do once what it does for each call or operation, and leave out what comes to nothing.

Interpreted kernels run several times as fast then.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction


@functools.cache
def hurry() -> None:
    """For the rest of the process; once is enough."""
    _prepare_once()
    _keep_types()
    # The interpreter computes whether each sum of integers overflows, in five operations, and asserts that where its
    # option `debug` is set, which it never is.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *given: None


def _prepare_once() -> None:
    """Its language, for each launch and module, not for each call in it."""
    prepared: set[int] = set()
    launch = GridExecutor.__call__

    def launch_quickly(self: Any, *given: Any, **named: Any) -> Any:
        prepared.clear()
        return launch(self, *given, **named)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if id(self.fn.__globals__) not in prepared:
            prepared.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*given, **named)

    GridExecutor.__call__ = launch_quickly
    InterpretedFunction.__call__ = call


def _keep_types() -> None:
    """What tensors of one shape, and of one type, share."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    @functools.cache
    def block(*sizes: int) -> tuple[tl.tuple, int, str]:
        shape = tl.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    @functools.cache
    def shaped(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
        numel = functools.reduce(int.__mul__, sizes, 1)
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)

    make_block = tl.block_type.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        # The usual kinds of shapes, of which some hold constants.
        given = shape.values if isinstance(shape, tl.tuple) else shape if isinstance(shape, list) else ()
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in given or core._unwrap_shape(shape)]
        if not sizes:
            make_block(self, element_ty, shape)  # which says what is wrong
        self.element_ty = element_ty
        self.shape, self.numel, said = block(*sizes)
        self.name = f"<{said}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shaped(*type.shape.values) if type.is_block() else shaped()

    interpreter._get_np_dtype = find_once
    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor
