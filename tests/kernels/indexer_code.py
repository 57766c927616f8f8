"""Code of the index scores on the fp8 unit, compiled for sm_90 without a GPU.

`python -m tests.kernels.indexer_code 64x1 32x6` prints what `device_code` does, for so many heads and rows of a
sequence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from triton.experimental.gluon import language as gl

from kernels.indexer_fp8 import choose_cut
from kernels.indexer_scores import score_keys_kernel
from tests.kernels.device_code import _compile

FLOATS = ("powers", "share", "turns", "scores", "maxima")
NUMBERS = (
    "powers_stride", "heads_stride", "preparers", "query_stride", "share_stride", "sequences", "pages", "capacity",
    "maxima_stride",
)  # fmt: skip
WHOLE = {*FLOATS, "heads", "prepared", "query", "positions", "tables", "heads_stride", "query_stride", "share_stride",
         "capacity", "maxima_stride"}  # fmt: skip


def compile_scores(heads: int, span: int, split: bool = True) -> dict[str, int]:
    cut = choose_cut(heads * span, split)
    constants = {
        "TURNED": 64, "RATIO": 128 // heads, "TOP_K": 512, "SEQUENCES": 16, "SPAN": span, "HEADS": heads, "PAGE": 128,
        "STAGES": cut.stages, "MOST": cut.most, "SPLIT": split, "LOADS": cut.loads, "HOLDS": cut.holds,
        "EARLY": True, "PREPARED_HEADS": 64,
        "PREPARED_WIDTH": 512, "PREPARED_TILE": 4, "PREPARED_NORM": True,
    }  # fmt: skip
    types = {
        "keys": f"tensordesc<fp8e4nv[1, 64, 128],{gl.NVMMASharedLayout(128, 8, 3)!r}>",
        **dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(("heads", "prepared", "query"), "*bf16"),
        **dict.fromkeys(("positions", "tables"), "*i32"), **dict.fromkeys(NUMBERS, "i32"),
        **dict.fromkeys(("eps", "share_scale"), "fp32"), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    whole = [name in WHOLE for name in score_keys_kernel.arg_names]
    return _compile(score_keys_kernel, types, constants, whole, 4, cut.registers)


def main(argv: Sequence[str]) -> None:
    for text in argv:
        heads, span = map(int, text.split("x"))
        found = compile_scores(heads, span)
        print(f"{text}:", *(f"{name}={value}" for name, value in found.items()))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter's functions can not be compiled"
    main(sys.argv[1:])
