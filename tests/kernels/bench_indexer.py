"""Times the indexer at V4-Flash's sizes, keys in pages at random places of a pool: scores, choice, and both."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from kernels import indexer, reference
from kernels.choice import ChoiceConfig, choose_entries
from kernels.forms import Plane, StepRows
from tests.kernels.bench import Case

HEADS, WIDTH, TOP_K, RATIO = 64, 128, 512, 4
PAGE = 256 // RATIO
STRIDE = 987_904
"""Bytes of a page with all layers."""
POOL = 54_000
"""Pages: enough for 16 sequences of 855K tokens."""
KEYS = Plane(
    data=16 * 1024,
    scale=16 * 1024 + 21 * PAGE * WIDTH,
    stride=STRIDE,
    rows=PAGE,
    width=WIDTH,
    rope=0,
    format="fp8",
    data_bytes=WIDTH,
    scale_bytes=4,
)
SETS = 6


@functools.cache
def pool() -> Tensor:
    """The arena. Keys and scales of one layer are filled in; the rest is never touched."""
    arena = torch.empty(POOL * STRIDE, dtype=torch.uint8, device="cuda")
    pages = arena.view(POOL, STRIDE)
    generator = torch.Generator("cuda").manual_seed(1)
    for first in range(0, POOL, 6000):
        part = pages[first : first + 6000]
        values = torch.randn(len(part), PAGE * WIDTH, generator=generator, device="cuda") * 60
        # Every 64th number is small enough for e4m3's subnormal numbers.
        values[:, ::64] *= 1e-4
        data = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        part[:, KEYS.data : KEYS.data + PAGE * WIDTH] = data.view(torch.uint8)
        powers = torch.randint(-8, -4, (len(part), PAGE), generator=generator, device="cuda")
        scales = torch.ldexp(torch.ones(powers.shape, device="cuda"), powers)
        part[:, KEYS.scale : KEYS.scale + PAGE * 4] = scales.view(torch.uint8)
    return arena


@dataclasses.dataclass(frozen=True)
class Set:
    query: Tensor
    share: Tensor
    turns: Tensor
    rows: StepRows


def draw(sequences: int, span: int, tokens: int) -> list[Set]:
    generator = torch.Generator("cuda").manual_seed(sequences)
    pages = -(-tokens // 256)
    angle = torch.rand(tokens, 32, generator=generator, device="cuda") * 6.28
    turns = torch.stack((angle.cos(), angle.sin()), -1)
    positions = tokens - 1 + torch.arange(-span + 1, 1, device="cuda").repeat(sequences)
    return [
        Set(
            query=torch.randn(sequences * span, HEADS, WIDTH, generator=generator, device="cuda").bfloat16(),
            share=torch.randn(sequences * span, HEADS, generator=generator, device="cuda"),
            turns=turns,
            rows=StepRows(
                positions=positions.int(),
                slabs=torch.arange(sequences, dtype=torch.int32, device="cuda"),
                tables=torch.randperm(POOL, generator=generator, device="cuda")[: sequences * pages]
                .int()
                .view(sequences, pages),
                span=span,
            ),
        )
        for _ in range(SETS)
    ]


def check_choice(chosen: Tensor, given: Set) -> None:
    """The last row's choice against scores in float32, up to rounding."""
    last = given.rows.rows - 1
    visible = (int(given.rows.positions[last]) + 1) // RATIO
    held = chosen[last]
    if visible <= TOP_K:
        assert held.tolist() == [*range(visible), *[-1] * (TOP_K - visible)]
        return
    pages = pool().view(POOL, STRIDE)[given.rows.tables[-1].long()]
    keys = pages[:, KEYS.data : KEYS.data + PAGE * WIDTH].contiguous().view(torch.float8_e4m3fn).float()
    scales = pages[:, KEYS.scale : KEYS.scale + PAGE * 4].contiguous().view(torch.float32)
    table = keys.view(-1, WIDTH)[:visible] * scales.view(-1, 1)[:visible]
    torch.backends.cuda.matmul.allow_tf32 = False
    query = reference.prepare_queries(given.query[last:], given.rows.positions[last:], given.turns, None)[0]
    scores = (given.share[last].unsqueeze(1) * (query.float() @ table.T).relu()).sum(0)
    assert bool((held[1:] > held[:-1]).all())
    assert int(held[0]) >= 0
    assert int(held[-1]) < visible
    lowest = float(scores[held.long()].min())
    scores[held.long()] = -torch.inf
    # Scores are sums of 64 products near 100.
    assert float(scores.max()) <= lowest + 1e-2, f"{float(scores.max())} was left, {lowest} was taken"


def cases() -> list[Case]:
    made = []
    # Predictions. Score: a launch (2 us), lengths, queries and the first keys (2 us), then bytes at 3.5 TB/s; with 4
    # rows of a sequence the products at 500 TFLOP/s. Choice: a launch (2 us) and, for 32,768 scores, 128 KB into one
    # processor (2,000 cycles), the bound from 1,024 maxima (5 steps of 330 cycles), the list of candidates (5,000), the
    # best of them (9 steps, 3,000, and 2,000 around them): 9.5 us, 6 us for 2,048; where rows have several segments the
    # same in each, and a merge of 5 us. 64 x 4 rows come in two waves.
    predicted = {
        (1, 1, 1): (2.5, 2.5),
        (1, 1, 8): (6, 6),
        (1, 1, 128): (9, 9.5),
        (16, 1, 1): (2.5, 2.5),
        (16, 1, 8): (8, 6),
        (16, 1, 128): (26, 9.5),
        (64, 1, 1): (3, 3),
        (64, 1, 8): (12, 6),
        (64, 1, 128): (84, 10),
        (64, 4, 1): (3, 3.5),
        (64, 4, 8): (24, 9),
        (64, 4, 128): (280, 18),
        (16, 1, 855): (125, 16),
    }
    for (sequences, span, kilo), (score, choice) in predicted.items():
        made += _cases(sequences, span, kilo * 1024, indexer.DEFAULT, "", score, choice)
    default = indexer.DEFAULT
    variants = {
        " converts": dataclasses.replace(default, shifts=False),
        " 396 programs, all registers": dataclasses.replace(default, programs=396, registers=None),
        " 660 programs, 96 registers": dataclasses.replace(default, programs=660, registers=96),
        " chunk 512": dataclasses.replace(default, chunk=512),
        " chunk 2048": dataclasses.replace(default, chunk=2048),
        " 3 stages": dataclasses.replace(default, stages=3),
        " 6 stages": dataclasses.replace(default, stages=6),
    }
    for sequences, span, kilo in ((16, 1, 128), (64, 1, 128), (16, 1, 8)):
        for name, config in variants.items():
            score = predicted[sequences, span, kilo][0]
            made += _cases(sequences, span, kilo * 1024, config, name, score, 0.0)
    for name, cut in {
        " segment 8192": ChoiceConfig(segment=8192),
        " 8 warps": ChoiceConfig(warps=8),
        " 32 warps": ChoiceConfig(warps=32),
    }.items():
        for sequences, kilo in ((1, 128), (16, 128), (16, 855)):
            config = dataclasses.replace(default, choice=cut)
            made += _cases(sequences, 1, kilo * 1024, config, name, 0.0, predicted[sequences, 1, kilo][1])
    return made


def _cases(
    sequences: int, span: int, tokens: int, config: indexer.IndexerConfig, name: str, score: float, choice: float
) -> list[Case]:
    """Cases of one size: the parts that a prediction is given for, and both together where both have one."""
    sets: list[Set] = []
    scored: list[Tensor] = []

    def at(i: int) -> Set:
        if not sets:
            sets.extend(draw(sequences, span, tokens))
        return sets[i % SETS]

    def run_scores(i: int) -> object:
        given = at(i)
        return indexer.score_entries(
            given.query, given.share, given.turns, RATIO, TOP_K, given.rows, pool(), KEYS, config=config
        )

    def run_choice(i: int) -> object:
        if not scored:
            generator = torch.Generator("cuda").manual_seed(2)
            shape = (sequences * span, -(-tokens // 256) * PAGE)
            scored.extend(torch.randn(shape, generator=generator, device="cuda") for _ in range(SETS))
        return choose_entries(scored[i % SETS], RATIO, TOP_K, at(i).rows, config=config.choice)

    def check_random(out: object) -> None:
        assert isinstance(out, Tensor)
        visible = (int(sets[0].rows.positions[-1]) + 1) // RATIO
        if visible > TOP_K:
            scores = scored[0][-1, :visible]
            best = torch.sort(scores, descending=True, stable=True).indices[:TOP_K].sort().values
            assert torch.equal(out[-1].long(), best)

    def run_both(i: int) -> object:
        given = at(i)
        return indexer.select_entries(
            given.query, given.share, given.turns, RATIO, TOP_K, given.rows, pool(), KEYS, config=config
        )

    def check_both(out: object) -> None:
        assert isinstance(out, Tensor)
        check_choice(out, sets[0])

    entries = tokens // RATIO if tokens // RATIO > TOP_K else 0
    size = f"{sequences} x {span}, {tokens // 1024}K{name}"
    rows = sequences * span
    key_bytes = sequences * entries * (WIDTH + 4)
    flops = rows * entries * HEADS * WIDTH * 2
    made = []
    if score:
        made.append(Case(f"score {size}", run_scores, key_bytes + rows * entries * 4, flops, score))
    if choice:
        made.append(Case(f"choose {size}", run_choice, rows * (entries + TOP_K) * 4, 0.0, choice, check_random))
    if score and choice:
        made.append(Case(f"both {size}", run_both, key_bytes + rows * TOP_K * 4, flops, score + choice, check_both))
    return made
