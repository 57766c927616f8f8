"""Cases of other libraries on what the experts' kernels do, over as many experts and pairs as they have there.

`torch._scaled_grouped_mm` multiplies fp8 experts with fp8 rows: twice the bytes, no turning of four bits. Humming
(Apache-2.0, vLLM's kernels for quantised experts) reads MXFP4, packed anew, with rows in bf16 (W4A16) or fp8 (W4A8).
Both do the two products alone: no list of pairs, no gate, no sum over places.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from tests.kernels.bench import Case
from tests.kernels.bench_experts import HIDDEN, LAYERS, LOCAL, PLACES, WIDTH, Inputs, inputs, slots

SETS = 2
"""Sets of weights that calls take in turn; each is far larger than the L2 cache."""
MOST_ROWS = 1 << 30


def scaled_grouped(rows: int) -> Case:
    """Up and down projection in fp8 over the experts that a layer touches."""
    chosen = len(inputs(rows)[0].touched())
    # Groups start at multiples of 16 rows, as the library wants them.
    per_expert = 16
    count = chosen * per_expert
    ends = torch.arange(per_expert, count + 1, per_expert, dtype=torch.int32, device="cuda")

    def weights(columns: int, width: int) -> list[tuple[Tensor, Tensor]]:
        made = []
        for _ in range(SETS):
            drawn = torch.randn(chosen, width, columns, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
            made.append((drawn.transpose(1, 2), torch.ones(chosen, width, device="cuda")))
        return made

    up, down = weights(HIDDEN, 2 * WIDTH), weights(WIDTH, HIDDEN)
    x = torch.randn(count, HIDDEN, device="cuda").to(torch.float8_e4m3fn)
    inner = torch.randn(count, WIDTH, device="cuda").to(torch.float8_e4m3fn)
    ones = torch.ones(count, device="cuda")

    def run(call: int) -> tuple[Tensor, Tensor]:
        (a, a_scale), (b, b_scale) = up[call % SETS], down[call % SETS]
        return (
            torch._scaled_grouped_mm(x, a, ones, a_scale, ends, out_dtype=torch.bfloat16),
            torch._scaled_grouped_mm(inner, b, ones, b_scale, ends, out_dtype=torch.bfloat16),
        )

    moved = chosen * 3 * HIDDEN * WIDTH
    return Case(
        name=f"T={rows} {chosen} experts, fp8, torch._scaled_grouped_mm",
        run=run,
        bytes=moved,
        flops=count * 6 * HIDDEN * WIDTH,
        predicted_us=moved / 3.5e6,
    )


def align(one: Inputs, layer: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pairs by expert, each expert's filled up to whole blocks; expert of each block; pairs with the filling)."""
    here = one.expert_to_slot[one.ids.flatten().long()].cpu() - layer * LOCAL
    nobody = here.numel()
    pairs: list[int] = []
    experts: list[int] = []
    for expert in range(LOCAL):
        mine = (here == expert).nonzero().flatten().tolist()
        blocks = -(-len(mine) // block)
        pairs += mine + [nobody] * (blocks * block - len(mine))
        experts += [expert] * blocks
    return tuple(torch.tensor(column, dtype=torch.int32, device="cuda") for column in (pairs, experts, [len(pairs)]))  # type: ignore[return-value]


@functools.cache
def packed(layer: int, rows_dtype: str) -> dict[str, Any]:
    """Humming's form of one layer's experts."""
    from humming.layer import HummingLayer

    one, first = slots(), layer * LOCAL
    made = {}
    for name, data, scale in (("up", one.up, one.up_scale), ("down", one.down, one.down_scale)):
        width, columns = data.shape[1], data.shape[2] * 2
        group = {} if rows_dtype == "bfloat16" else {"input_scale_group_size": 128}
        part = HummingLayer(
            shape_n=width,
            shape_k=columns,
            weight_config={"quant_method": "mxfp4"},
            input_config={"quant_method": "humming", "dtype": rows_dtype} | group,
            num_experts=LOCAL,
            torch_dtype=torch.bfloat16,
        ).cuda()
        assert scale is not None
        part.weight.data.copy_(data[first : first + LOCAL])
        part.weight_scale.data.copy_(scale[first : first + LOCAL])
        part.transform()
        made[name] = part
    return made


def humming(rows: int, rows_dtype: str) -> Case:
    """The two products of `mix_experts` by Humming, with the tiles that its own heuristics choose."""
    from humming.tune import get_heuristics_config

    touched = sum(len(inputs(rows)[layer].touched()) for layer in range(SETS)) / SETS
    compute = json.dumps({"use_f16_accum": False, "gemm_type": "indexed"})
    calls = []
    for layer in range(SETS):
        one = inputs(rows)[layer]
        inner = torch.randn(rows * PLACES, WIDTH, dtype=torch.bfloat16, device="cuda")
        for name, x, places in (("up", one.x, PLACES), ("down", inner, 1)):
            part = packed(layer, rows_dtype)[name]
            table = get_heuristics_config(
                layer_config=part.humming_config, gemm_type="indexed", device=torch.device("cuda")
            )
            config = next(config for low, high, config in table if low < rows * PLACES <= high)
            block = config["block_shape"][0]
            out = torch.empty(rows * PLACES, part.shape_n, dtype=torch.bfloat16, device="cuda")
            calls.append((layer, part, x, places, align(one, layer, block), out, json.dumps([[0, MOST_ROWS, config]])))

    def run(call: int) -> list[Tensor]:
        results = []
        for layer, part, x, places, (pairs, experts, count), out, tuning in calls:
            if layer == call % SETS:
                results.append(
                    part(
                        x, outputs=out, sorted_ids=pairs, expert_ids=experts, num_tokens_padded=count, top_k=places,
                        valid_shape_m=rows * PLACES, compute_config=compute, tuning_config=tuning,
                    )
                )  # fmt: skip
        return results

    def check(result: object) -> None:
        """Its up projection is the one of our slots, so that both multiply the same weights."""
        from kernels.reference import dequantise_mxfp4

        assert isinstance(result, list)
        one, data = inputs(rows)[0], slots()
        slot = one.touched()[0]
        assert data.up_scale is not None
        weight = dequantise_mxfp4(data.up[slot], data.up_scale[slot])
        pair = int((one.expert_to_slot[one.ids.flatten().long()] == slot).nonzero()[0])
        want = weight @ one.x[pair // PLACES].float()
        error = float((result[0][pair].float() - want).norm() / want.norm())
        if not error < (0.01 if rows_dtype == "bfloat16" else 0.06):
            raise AssertionError(f"relative error {error}")

    moved = touched * slots().slot_bytes
    return Case(
        name=f"T={rows} {touched:.1f} experts, Humming, MXFP4 with rows in {rows_dtype}",
        run=run,
        bytes=moved,
        flops=rows * PLACES / 2 * 6 * HIDDEN * WIDTH,
        predicted_us=15 + moved / 3.2e6,
        check=check,
    )


def cases() -> list[Case]:
    """Humming where it is installed."""
    assert SETS <= LAYERS
    listed = [scaled_grouped(rows) for rows in (32, 128)]
    for rows in (2, 32, 128, 512):
        listed += [humming(rows, dtype) for dtype in ("bfloat16", "float8e4m3")]
    return listed
