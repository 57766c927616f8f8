"""Times the indexer at real sizes, keys in pages at random places of a pool: scores, choice, and both."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from kernels import indexer, reference
from kernels.choice import EACH, ChoiceConfig, choose_entries
from kernels.forms import Plane, StepRows
from kernels.indexer_fp8 import Config, Cut
from tests.kernels.bench import Case

WIDTH, TOP_K = 128, 512
POOL = 54_720
"""Pages: enough for 16 sequences of 855K tokens."""
SETS = 3


@dataclasses.dataclass(frozen=True)
class Form:
    """Keys of a layer.

    Attributes:
        heads: that ask.
        ratio: tokens of an entry.
        stride: bytes of a page of 256 tokens with all layers.
    """

    heads: int
    ratio: int
    stride: int

    @property
    def keys(self) -> Plane:
        page = 256 // self.ratio
        return Plane(16384, 16384 + 21 * page * WIDTH, self.stride, page, WIDTH, 0, "fp8", WIDTH, 4)


FLASH = Form(64, 4, 987_904)
HALVES = Form(32, 2, 987_904)
"""The first layers of V4.1 that have keys."""
WHOLE = Form(32, 1, 987_904)
"""The last one, which also ranks candidate blocks."""


@functools.cache
def arena() -> Tensor:
    return torch.empty(POOL * FLASH.stride, dtype=torch.uint8, device="cuda")


@functools.lru_cache(maxsize=1)
def pool(form: Form) -> Tensor:
    """The arena. Keys and scales of one layer are filled in; the rest is never touched."""
    keys = form.keys
    pages = arena().view(POOL, form.stride)
    generator = torch.Generator("cuda").manual_seed(1)
    for first in range(0, POOL, 6000):
        part = pages[first : first + 6000]
        values = torch.randn(len(part), keys.rows * WIDTH, generator=generator, device="cuda") * 60
        # Every 64th number is small enough for e4m3's subnormal numbers.
        values[:, ::64] *= 1e-4
        data = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        part[:, keys.data : keys.data + keys.rows * WIDTH] = data.view(torch.uint8)
        powers = torch.randint(-8, -4, (len(part), keys.rows), generator=generator, device="cuda")
        scales = torch.ldexp(torch.ones(powers.shape, device="cuda"), powers)
        part[:, keys.scale : keys.scale + keys.rows * 4] = scales.view(torch.uint8)
    return arena()


@dataclasses.dataclass(frozen=True)
class Set:
    query: Tensor
    share: Tensor
    turns: Tensor
    rows: StepRows


def draw(form: Form, sequences: int, span: int, tokens: int) -> list[Set]:
    generator = torch.Generator("cuda").manual_seed(sequences)
    pages = -(-tokens // 256)
    angle = torch.rand(tokens, 32, generator=generator, device="cuda") * 6.28
    turns = torch.stack((angle.cos(), angle.sin()), -1)
    positions = tokens - 1 + torch.arange(-span + 1, 1, device="cuda").repeat(sequences)
    return [
        Set(
            query=torch.randn(sequences * span, form.heads, WIDTH, generator=generator, device="cuda").bfloat16(),
            share=torch.randn(sequences * span, form.heads, generator=generator, device="cuda"),
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


def check_choice(form: Form, chosen: Tensor, given: Set) -> None:
    """The last row's choice against scores in float32, up to rounding."""
    keys = form.keys
    last = given.rows.rows - 1
    visible = (int(given.rows.positions[last]) + 1) // form.ratio
    held = chosen[last]
    if visible <= TOP_K:
        assert held.tolist() == [*range(visible), *[-1] * (TOP_K - visible)]
        return
    pages = pool(form).view(POOL, form.stride)[given.rows.tables[-1].long()]
    data = pages[:, keys.data : keys.data + keys.rows * WIDTH].contiguous().view(torch.float8_e4m3fn).float()
    scales = pages[:, keys.scale : keys.scale + keys.rows * 4].contiguous().view(torch.float32)
    table = data.view(-1, WIDTH)[:visible] * scales.view(-1, 1)[:visible]
    torch.backends.cuda.matmul.allow_tf32 = False
    query = reference.prepare_queries(given.query[last:], given.rows.positions[last:], given.turns, None)[0]
    scores = (given.share[last].unsqueeze(1) * (query.float() @ table.T).relu()).sum(0)
    assert bool((held[1:] > held[:-1]).all())
    assert int(held[0]) >= 0
    assert int(held[-1]) < visible
    lowest = float(scores[held.long()].min())
    scores[held.long()] = -torch.inf
    # Scores are sums of 64 products near 100, of which the fp8 unit keeps some 14 bits.
    assert float(scores.max()) <= lowest + 0.2, f"{float(scores.max())} was left, {lowest} was taken"


def cases() -> list[Case]:
    made = []
    # Predictions. Score: a launch (2 us), lengths, queries and the first keys (2 us), then bytes at 3.6 TB/s; with more
    # rows of a sequence the products at 600 TFLOP/s. Choice by maxima: a launch (2 us), 16 KB of maxima for 32,768
    # scores, the bound, the candidates, the best of their scores: 9 us; where rows have several segments a merge of 5.
    bf16, unit = None, Config()
    one = Config(split=False)
    predicted: dict[tuple[Form, int, int, int], dict[Config | None, float]] = {
        (FLASH, 1, 1, 8): {bf16: 5, unit: 5},
        (FLASH, 1, 1, 128): {bf16: 5.5, unit: 5.5},
        (FLASH, 16, 1, 8): {bf16: 5.7, unit: 5.5},
        (FLASH, 16, 1, 128): {bf16: 32, unit: 22},
        (FLASH, 64, 1, 128): {bf16: 113, unit: 78},
        (FLASH, 64, 4, 128): {bf16: 322, unit: 240},
        (FLASH, 16, 1, 855): {bf16: 196, unit: 126},
        (HALVES, 16, 6, 128): {bf16: 150, unit: 85, one: 52},
        (HALVES, 16, 6, 855): {bf16: 1000, unit: 550, one: 330},
        (WHOLE, 16, 6, 855): {bf16: 2000, unit: 1100, one: 640},
    }
    for (form, sequences, span, kilo), by_config in predicted.items():
        for unit_config, score in by_config.items():
            config = dataclasses.replace(indexer.DEFAULT, unit=unit_config)
            name = " bf16" if unit_config is None else "" if unit_config.split else " one e4m3"
            made += _cases(form, sequences, span, kilo * 1024, config, name, score)
    cuts = {
        " from shared memory": Cut(loads=False),
        " 5 programs": Cut(programs=5, registers=96, stages=3),
        " 3 programs, 6 stages": Cut(programs=3, registers=168, stages=6),
        " 2 programs, 8 stages": Cut(programs=2, stages=8),
    }
    for name, cut in cuts.items():
        config = dataclasses.replace(indexer.DEFAULT, unit=Config(cut=cut))
        for kilo, score in ((128, 22), (855, 126)):
            made += _cases(FLASH, 16, 1, kilo * 1024, config, name, score)
    for sequences, span, kilo, ratio in (
        (16, 1, 128, 4),
        (16, 1, 855, 4),
        (16, 6, 128, 2),
        (16, 6, 855, 2),
        (16, 6, 855, 1),
    ):
        for by_maxima in (False, True):
            for cut_choice in (ChoiceConfig(), ChoiceConfig(warps=8)):
                made.append(_choice_case(sequences, span, kilo * 1024, ratio, by_maxima, cut_choice))
    return made


def _cases(
    form: Form, sequences: int, span: int, tokens: int, config: indexer.IndexerConfig, name: str, predicted: float
) -> list[Case]:
    """Scores of one size, and scores with the choice from them."""
    sets: list[Set] = []

    def arguments(i: int) -> tuple[Tensor, Tensor, Tensor, int, int, StepRows, Tensor, Plane]:
        if not sets:
            sets.extend(draw(form, sequences, span, tokens))
        given = sets[i % SETS]
        return given.query, given.share, given.turns, form.ratio, TOP_K, given.rows, pool(form), form.keys

    def run_scores(i: int) -> object:
        return indexer.score_entries(*arguments(i), config=config)

    def run_both(i: int) -> object:
        return indexer.select_entries(*arguments(i), config=config)

    def check_both(out: object) -> None:
        assert isinstance(out, Tensor)
        if config.unit is None or config.unit.split:
            check_choice(form, out, sets[0])

    entries = tokens // form.ratio
    size = f"{sequences} x {span}, {tokens // 1024}K / {form.ratio}{name}"
    rows = sequences * span
    key_bytes = sequences * entries * (WIDTH + 4)
    flops = rows * entries * form.heads * WIDTH * 2
    return [
        Case(f"score {size}", run_scores, key_bytes + rows * entries * 4, flops, predicted),
        Case(f"both {size}", run_both, key_bytes + rows * TOP_K * 4, flops, predicted + 12, check_both),
    ]


def _choice_case(sequences: int, span: int, tokens: int, ratio: int, by_maxima: bool, config: ChoiceConfig) -> Case:
    steps: list[StepRows] = []
    scored: list[Tensor] = []
    best: list[Tensor | None] = []
    rows = sequences * span
    entries = tokens // ratio

    def run(i: int) -> object:
        if not scored:
            positions = torch.full((rows,), tokens - 1, dtype=torch.int32, device="cuda")
            steps.append(StepRows(positions, positions[:sequences], positions[:sequences].view(-1, 1), span))
            generator = torch.Generator("cuda").manual_seed(2)
            scored.extend(torch.randn((rows, entries), generator=generator, device="cuda") for _ in range(SETS))
            best.extend(scores.view(rows, -1, EACH).amax(2) if by_maxima else None for scores in scored)
        return choose_entries(scored[i % SETS], ratio, TOP_K, steps[0], best[i % SETS], config=config)

    def check(out: object) -> None:
        assert isinstance(out, Tensor)
        wanted = torch.sort(scored[0][-1], descending=True, stable=True).indices[:TOP_K].sort().values
        assert torch.equal(out[-1].long(), wanted)

    name = f"choose {sequences} x {span}, {tokens // 1024}K / {ratio}, {config.warps} warps"
    moved = rows * (entries * 4 / (EACH if by_maxima else 1) + TOP_K * 4)
    return Case(name + (" by maxima" if by_maxima else ""), run, moved, 0.0, 12 if by_maxima else 20, check)
