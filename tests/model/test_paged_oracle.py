"""The paged path against golden numbers that other implementations computed: logits, choices and greedy text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.model.conftest import Golden
from tests.model.paged_cases import Source, make_model, open_sequence

LIMIT = 1e-4
"""Two float32 implementations of these models differ by at most 4e-5; the smallest real mistake shows as 1.3e-4."""

SETS = ("v41-tiny", "v41-tiny-quant")


def source_of(golden: Golden) -> Source:
    return Source(golden.shape, golden.weights, golden.tables)


@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("name", SETS)
def test_one_shot_reproduces_logits_and_choices(golden: Callable[[str], Golden], name: str, page_tokens: int) -> None:
    gold = golden(name)
    model = make_model(source_of(gold), page_tokens=page_tokens, choices=True)
    probe = model.probe
    assert probe is not None
    cases = sorted({key.split(".")[0] for key in gold.cases if key.startswith(("len", "wide"))})
    assert len(cases) >= 8
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


@pytest.mark.parametrize("name", SETS)
def test_gaps_are_those_of_the_golden_choices(golden: Callable[[str], Golden], name: str) -> None:
    gold = golden(name)
    model = make_model(source_of(gold), choices=True)
    ids = gold.cases["len200.ids"].numpy().astype(np.int64)
    open_sequence(model, len(ids)).run(ids)
    assert model.probe is not None
    wanted = gold.cases["len200.min_gap"]
    # A gap is a difference of scores of order 1, each good to 1e-5.
    assert torch.allclose(model.probe.gaps.smallest, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SETS)
def test_greedy_text_is_reproduced_token_by_token(golden: Callable[[str], Golden], name: str) -> None:
    gold = golden(name)
    model = make_model(source_of(gold))
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
