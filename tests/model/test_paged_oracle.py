"""The paged path against golden numbers that other implementations computed: logits, choices and greedy text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.model.kv import SPARE_ROWS
from tests.model.conftest import Golden
from tests.model.paged_cases import Source, make_model, open_sequence, random_ids

LIMIT = 1e-4
"""Two float32 implementations of these models differ by at most 4e-5; the smallest real mistake shows as 1.3e-4."""

PAGE_TOKENS = {
    "v41-tiny": (8, 16),
    "v41-tiny-quant": (8, 16),
    "v4-tiny": (128, 256),
    "v4-tiny-fast": (16, 32),
    "v4-tiny-quant": (128,),
}
LONG = {"v41-tiny": "len200", "v41-tiny-quant": "len200", "v4-tiny": "len260", "v4-tiny-fast": "len100"}


def source_of(golden: Golden) -> Source:
    return Source(golden.shape, golden.weights, golden.tables)


@pytest.mark.parametrize(("name", "page_tokens"), [(name, n) for name, sizes in PAGE_TOKENS.items() for n in sizes])
def test_one_shot_reproduces_logits_and_choices(golden: Callable[[str], Golden], name: str, page_tokens: int) -> None:
    gold = golden(name)
    model = make_model(source_of(gold), page_tokens=page_tokens, choices=True)
    probe = model.probe
    assert probe is not None
    cases = sorted({key.split(".")[0] for key in gold.cases if key.startswith(("len", "wide"))})
    assert len(cases) >= 7
    for slab, case in enumerate(cases):
        ids = gold.cases[f"{case}.ids"].numpy().astype(np.int64)
        got = open_sequence(model, len(ids), slab=slab % 8).run(ids)
        if f"{case}.logits" in gold.cases:
            wanted, compared = gold.cases[f"{case}.logits"], got
        else:
            wanted, compared = gold.cases[f"{case}.logits_at"], got[gold.cases[f"{case}.pos"].long()]
        assert (compared - wanted).abs().max() < LIMIT, case
        clear = gold.cases[f"{case}.margin"] > 1e-3
        assert torch.equal(got.argmax(-1)[clear], gold.cases[f"{case}.argmax"].long()[clear]), case
        experts = np.stack([probe.experts[layer] for layer in range(gold.shape.num_layers)], 1)
        np.testing.assert_array_equal(experts, gold.cases[f"{case}.experts"].numpy(), err_msg=case)
        for column, layer in enumerate(gold.shape.index_sources):
            ratio = gold.shape.layer_roles[layer].ratio
            visible = (torch.arange(len(ids)).unsqueeze(1) + 1) // ratio
            entries = probe.entries[layer].masked_fill(probe.entries[layer] >= visible, -1)
            assert torch.equal(entries, gold.cases[f"{case}.index_topk"][:, column].long()), (case, layer)


@pytest.mark.parametrize(("name", "case"), LONG.items())
def test_gaps_are_those_of_the_golden_choices(golden: Callable[[str], Golden], name: str, case: str) -> None:
    gold = golden(name)
    model = make_model(source_of(gold), page_tokens=PAGE_TOKENS[name][0], choices=True)
    ids = gold.cases[f"{case}.ids"].numpy().astype(np.int64)
    open_sequence(model, len(ids)).run(ids)
    assert model.probe is not None
    wanted = gold.cases[f"{case}.min_gap"]
    # A gap is a difference of scores of order 1, each good to 1e-5.
    assert torch.allclose(model.probe.gaps.smallest, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PAGE_TOKENS)
def test_greedy_text_is_reproduced_token_by_token(golden: Callable[[str], Golden], name: str) -> None:
    gold = golden(name)
    model = make_model(source_of(gold), page_tokens=PAGE_TOKENS[name][0])
    cases = sorted({key.split(".")[0] for key in gold.cases if key.startswith("greedy")})
    assert cases
    for case in cases:
        prompt = gold.cases[f"{case}.prompt"].numpy().astype(np.int64)
        wanted = gold.cases[f"{case}.tokens"].tolist()
        sequence = open_sequence(model, len(prompt) + len(wanted))
        logits = sequence.run_chunks(prompt, [5, 24])[-1]
        for step, token in enumerate(wanted):
            assert (logits - gold.cases[f"{case}.logits"][step]).abs().max() < LIMIT
            assert int(logits.argmax()) == token, (case, step)
            logits = sequence.run(np.array([token]), len(prompt) + step)[-1]


@pytest.fixture(scope="module")
def long_v4(golden: Callable[[str], Golden]) -> tuple[Source, np.ndarray, torch.Tensor]:
    """The golden case that closes two entries of 128, and its rows in one pass."""
    gold = golden("v4-tiny")
    ids = gold.cases["len260.ids"].numpy().astype(np.int64)
    whole = open_sequence(make_model(source_of(gold)), len(ids)).run(ids)
    assert (whole[gold.cases["len260.pos"].long()] - gold.cases["len260.logits_at"]).abs().max() < LIMIT
    return source_of(gold), ids, whole


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 127, 128, 129, 131, 255, 256, 257, 259])
def test_v4_state_moved_at_any_boundary_goes_on(long_v4: tuple[Source, np.ndarray, torch.Tensor], length: int) -> None:
    source, ids, whole = long_v4
    sender, receiver = make_model(source, pages=8, slabs=2), make_model(source, pages=12, slabs=3)
    here, there = open_sequence(sender, length, slab=1), open_sequence(receiver, len(ids), slab=2)
    here.run_chunks(ids[:length], [100])
    for source_page, target_page in zip(here.pages.tolist(), there.pages.tolist(), strict=False):
        receiver.arena.page_bytes_of(target_page).copy_(sender.arena.page_bytes_of(source_page))
    receiver.arena.slab_bytes_of(2).copy_(sender.arena.slab_bytes_of(1))
    rows = torch.cat([there.run(ids[at : at + 1], at) for at in range(length, min(len(ids), length + 10))])
    assert torch.equal(rows, whole[length : length + 10])


@pytest.mark.parametrize("accepted", range(SPARE_ROWS))
@pytest.mark.parametrize("start", [1, 3, 124, 127, 252])
def test_v4_drafts_over_a_boundary_leave_nothing_behind(
    long_v4: tuple[Source, np.ndarray, torch.Tensor], start: int, accepted: int
) -> None:
    source, ids, whole = long_v4
    sequence = open_sequence(make_model(source, pages=8, slabs=2), len(ids))
    sequence.run(ids[:start])
    drafts = ids[start : start + SPARE_ROWS].copy()
    drafts[accepted + 1 :] = random_ids(SPARE_ROWS, source.shape.vocab_size, seed=4)[accepted + 1 :]
    rows = sequence.run(drafts[: len(ids) - start], start)
    assert torch.equal(rows[: accepted + 1], whole[start : start + accepted + 1])
    after = start + accepted + 1
    again = [sequence.run(ids[at : at + 1], at) for at in range(after, min(after + 12, len(ids)))]
    assert not again or torch.equal(torch.cat(again), whole[after : after + 12])
