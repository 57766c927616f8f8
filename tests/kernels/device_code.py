"""Device code: compiles the Gluon kernels for sm_90 without a GPU: `python -m tests.kernels.device_code 64`.

Prints, for steps of so many rows, what tells whether the compiler did as meant, of the experts' kernel or of a dense
product's (`--streamed`): registers, bytes of stack (spills), shared memory, matrix instructions, waits for them, and
loads from shared memory. Matrix instructions with a wait for each were serialised, for want of registers as a rule.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels import streamed
from kernels.experts_fp8 import MOST_PAIRS_KNOWN, Config, choose_config
from kernels.experts_products import multiply_tiles_kernel
from kernels.streamed_products import streamed_kernel

HIDDEN, WIDTH = 4096, 2048
POINTERS = {
    "up_scale": "*i32", "split_scale": "*fp32", "down_bytes": "*u8", "inner_bytes": "*u8", "down_scale": "*i32",
    "inner_scale": "*fp32", "weights": "*fp32", "ids": "*i32", "expert_to_slot": "*i32", "pairs": "*i32",
    "tiles": "*i32", "progress": "*i32", "out": "*fp32",
}  # fmt: skip
NUMBERS = {"up_scale_stride": "i64", "down_stride": "i64", "down_scale_stride": "i64", "clamp": "fp32",
           "pair_count": "i32", "own_items": "i32"}  # fmt: skip


def compile_products(config: Config, knows: bool = False) -> dict[str, int]:
    """What `main` prints for one configuration; knows: programs find the tiles themselves."""
    words = f"tensordesc<u8[1, 2, {config.rows // 2}, 128],{gl.NVMMASharedLayout(128, 8, 4)!r}>"
    rows = f"tensordesc<u8[8, {config.tile}, 64],{gl.NVMMASharedLayout(64, 8, 3)!r}>"
    constants = {"HIDDEN": HIDDEN, "WIDTH": WIDTH, "TILE": config.tile, "ROWS": config.rows, "STAGES": config.stages,
                 "CHAIN": config.tile == 64, "MAX_PAIRS": MOST_PAIRS_KNOWN, "HEAD": knows, "EARLY": True}  # fmt: skip
    types = {"up": words, "down": words, "split": rows, "inner": rows, **POINTERS, **NUMBERS,
             **dict.fromkeys(constants, "constexpr")}  # fmt: skip
    names = multiply_tiles_kernel.arg_names
    whole = [name in POINTERS or name.endswith("_stride") for name in names]
    return _compile(multiply_tiles_kernel, types, constants, whole, config.warps, config.registers)


def compile_streamed(rows: int) -> dict[str, int]:
    """The same for a product of so many rows and an fp8 weight of [4096, 8192] in four slices."""
    padded = streamed._padded(rows)
    kept = streamed._kept_blocks(2048, padded)
    constants = {"HEIGHT": 4096, "WIDTH": 8192, "GROUP_TILES": 32, "SLICES": 4, "ROWS": padded,
                 "STAGES": streamed._stages(kept, padded), "KEPT": kept}  # fmt: skip
    pointers = {"x": "*bf16", "scale": "*u8", "out": "*bf16", "partials": "*fp32", "tickets": "*i32"}
    numbers = {"rows": "i32", "x_stride": "i32", "out_stride": "i32"}
    data = f"tensordesc<u8[128, 128],{gl.NVMMASharedLayout(128, 8, 2)!r}>"
    types = {"data": data, **pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    whole = [name in pointers or name.endswith("_stride") for name in streamed_kernel.arg_names]
    return _compile(streamed_kernel, types, constants, whole, 8, streamed._registers(padded))


def _compile(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], whole: Sequence[bool], warps: int, registers: int
) -> dict[str, int]:
    """Compile a kernel, of whose arguments some are multiples of 16."""
    compiled = triton.compile(
        GluonASTSource(
            kernel,
            {name: types[name] for name in kernel.arg_names},
            constants,
            {(i,): [["tt.divisibility", 16]] for i, is_multiple in enumerate(whole) if is_multiple},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "maxnreg": registers},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        code = _dump("--dump-sass", file.name)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "shared": compiled.metadata.shared,
        "products": len(re.findall(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3|HGMMA\.64x\d+x16\.F32", code)),
        "waits": code.count("WARPGROUP.DEPBAR"),
        "loads": len(re.findall(r"LDS\.128 ", code)),
    }


def _dump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--streamed", action="store_true", help="a dense product's, up to 64 rows")
    options = parser.parse_args(argv)
    for rows in options.rows:
        found = compile_streamed(rows) if options.streamed else compile_products(choose_config(rows), rows <= 8)
        print(f"{rows} rows:", *(f"{name}={value}" for name, value in found.items()))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter's functions can not be compiled"
    main()
