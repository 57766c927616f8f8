"""Device code: compiles the experts' Gluon kernel for sm_90 without a GPU: `python -m tests.kernels.device_code 64`.

Prints, for steps of so many rows, what tells whether the compiler did as meant: registers, bytes of stack (spills),
shared memory, matrix instructions, and waits for them. Matrix instructions with a wait for each were serialised, for
want of registers as a rule.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.experts_fp8 import Config, choose_config
from kernels.experts_products import multiply_tiles_kernel

HIDDEN, WIDTH = 4096, 2048
POINTERS = {
    "up_scale": "*i32", "split_scale": "*fp32", "down_bytes": "*u8", "inner_bytes": "*u8", "down_scale": "*i32",
    "inner_scale": "*fp32", "weights": "*fp32", "pairs": "*i32", "tiles": "*i32", "progress": "*i32", "out": "*fp32",
}  # fmt: skip
NUMBERS = {"up_scale_stride": "i64", "down_stride": "i64", "down_scale_stride": "i64", "clamp": "fp32"}


def compile_products(config: Config) -> dict[str, int]:
    """What `main` prints for one configuration."""
    words = f"tensordesc<u8[1, 2, {config.rows // 2}, 128],{gl.NVMMASharedLayout(128, 8, 4)!r}>"
    rows = f"tensordesc<u8[8, {config.tile}, 64],{gl.NVMMASharedLayout(64, 8, 3)!r}>"
    constants = {"HIDDEN": HIDDEN, "WIDTH": WIDTH, "TILE": config.tile, "ROWS": config.rows, "STAGES": config.stages,
                 "EARLY": True}  # fmt: skip
    types = {"up": words, "down": words, "split": rows, "inner": rows, **POINTERS, **NUMBERS,
             **dict.fromkeys(constants, "constexpr")}  # fmt: skip
    names = multiply_tiles_kernel.arg_names
    whole = [name in POINTERS or name.endswith("_stride") for name in names]
    compiled = triton.compile(
        GluonASTSource(
            multiply_tiles_kernel,
            {name: types[name] for name in names},
            constants,
            {(i,): [["tt.divisibility", 16]] for i, is_multiple in enumerate(whole) if is_multiple},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.warps, "maxnreg": config.registers},
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
        "products": len(re.findall(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3", code)),
        "waits": code.count("WARPGROUP.DEPBAR"),
    }


def _dump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[1, 64, 512])
    for rows in parser.parse_args(argv).rows:
        found = compile_products(choose_config(rows))
        print(f"{rows} rows:", *(f"{name}={value}" for name, value in found.items()))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter's functions can not be compiled"
    main()
