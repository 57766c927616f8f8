"""The block drafter against golden hidden states, logits, tokens and confidences."""

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.model.drafter import draft_blocks, drafter_of, forward_blocks
from engine.model.reference import forward

LIMIT = 1e-4
ANCHORS = {"v41": ((1, 2, 15, 16, 17, 18, 32, 44), (1, 16)), "v4": ((1, 2, 12, 13, 14, 15, 26, 39), (1, 13))}
BLOCKS = [
    (form, a, b)
    for form, (whole, parts) in ANCHORS.items()
    for a, b in [(a, 5) for a in whole] + [(a, b) for a in parts for b in (1, 2, 3, 4)]
]
MODELS = {"v41": "v41-tiny", "v4": "v4-tiny-fast"}


@pytest.fixture(scope="module")
def golden_blocks(oracle):
    return {form: load_file(oracle / "dspark" / f"{form}.safetensors") for form in MODELS}


@pytest.fixture(scope="module")
def stored(golden_blocks):
    return golden_blocks["v41"]


@pytest.mark.parametrize("form", MODELS)
def test_every_golden_block_is_covered(golden_blocks, form):
    found = {tuple(key.split(".")[1:3]) for key in golden_blocks[form] if key.endswith(".hidden")}
    assert found == {(f"a{anchor}", f"b{block}") for owner, anchor, block in BLOCKS if owner == form}
    assert set(golden_blocks[form]["s0.anchors"].tolist()) == {a for owner, a, _ in BLOCKS if owner == form}


@pytest.mark.parametrize("form", MODELS)
def test_features_of_the_target_match(golden, golden_blocks, form):
    model, stored = golden(MODELS[form]), golden_blocks[form]
    with torch.no_grad():
        output = forward(model.weights, model.shape, stored["s0.ids"].long()[None], engram=model.tables)
    assert (output.features[0] - stored["s0.features"]).abs().max() <= LIMIT


@pytest.mark.parametrize(("form", "anchor", "block"), BLOCKS)
def test_a_drafted_block_matches_the_golden_one(golden, golden_blocks, form, anchor, block):
    tiny, stored = golden(MODELS[form]), golden_blocks[form]
    want = {k.split(".")[-1]: v for k, v in stored.items() if k.startswith(f"s0.a{anchor}.b{block}.")}
    ids = stored["s0.ids"].long()[None]
    with torch.no_grad():
        anchors = torch.tensor([[anchor]])
        blocks = draft_blocks(tiny.weights, tiny.shape, stored["s0.features"][None], ids, anchors, block)
    for field in ("hidden", "base_logits", "logits", "confidence_logit"):
        assert (getattr(blocks, field)[0, 0] - want.pop(field)).abs().max() <= LIMIT
    assert (blocks.confidence_logit[0, 0].sigmoid() - want.pop("confidence")).abs().max() <= LIMIT
    assert blocks.tokens[0, 0].tolist() == want.pop("tokens").tolist()
    assert not want, "a stored field was not compared"


def test_many_anchors_at_once_give_the_same_blocks(tiny, stored):
    ids = stored["s0.ids"].long()[None].repeat(2, 1)
    features = stored["s0.features"][None].repeat(2, 1, 1)
    anchors = torch.tensor([[1, 2, 15, 16], [18, 17, 32, 44]])
    with torch.no_grad():
        blocks = draft_blocks(tiny.weights, tiny.shape, features, ids, anchors, 5)
    for row in range(2):
        for column in range(4):
            key = f"s0.a{anchors[row, column]}.b5"
            assert (blocks.logits[row, column] - stored[f"{key}.logits"]).abs().max() <= LIMIT


def test_an_anchor_at_the_start_sees_no_context_and_stays_finite(tiny, stored):
    ids, features = stored["s0.ids"].long()[None], stored["s0.features"][None]
    with torch.no_grad():
        first = draft_blocks(tiny.weights, tiny.shape, features, ids, torch.tensor([[0]]), 5)
        other = draft_blocks(tiny.weights, tiny.shape, features * 3, ids, torch.tensor([[0]]), 5)
    assert first.logits.isfinite().all()
    assert torch.equal(first.logits, other.logits)


def test_features_at_or_after_the_anchor_are_not_read(tiny, stored):
    ids, features = stored["s0.ids"].long()[None], stored["s0.features"][None]
    poisoned = features.clone()
    poisoned[:, 20:] = 1e6
    poisoned[:, : 20 - tiny.shape.window] = -1e6
    with torch.no_grad():
        clean = draft_blocks(tiny.weights, tiny.shape, features, ids, torch.tensor([[20]]), 5)
        other = draft_blocks(tiny.weights, tiny.shape, poisoned, ids, torch.tensor([[20]]), 5)
    assert torch.equal(clean.logits, other.logits)


def test_teacher_forcing_with_the_drafted_tokens_reproduces_the_draft(tiny, stored):
    ids, features = stored["s0.ids"].long()[None], stored["s0.features"][None]
    anchors = torch.tensor([[16]])
    with torch.no_grad():
        drawn = draft_blocks(tiny.weights, tiny.shape, features, ids, anchors, 5)
        told = ids.clone()
        told[0, 17:21] = drawn.tokens[0, 0, :4]
        forced = forward_blocks(tiny.weights, tiny.shape, features, told, anchors, 5)
    assert torch.equal(forced.tokens, drawn.tokens)
    assert (forced.logits - drawn.logits).abs().max() <= 1e-5
    assert (forced.confidence_logit - drawn.confidence_logit).abs().max() <= 1e-5


def test_training_the_drafter_reaches_all_its_weights_and_only_through_them(tiny, stored):
    weights = {name: value.clone().requires_grad_() for name, value in tiny.weights.items() if name[:4] == "mtp."}
    shared = {name: tiny.weights[name] for name in ("embed.weight", "head.weight")}
    ids, features = stored["s0.ids"].long()[None], stored["s0.features"][None]
    blocks = forward_blocks(weights | shared, tiny.shape, features, ids, torch.tensor([[1, 7, 30, 40]]), 5)
    (blocks.logits.square().mean() + blocks.confidence_logit.square().mean()).backward()
    without = {name for name, value in weights.items() if value.grad is None}
    assert without == {name for name in weights if ".gate.bias" in name}
    assert all(routing.ids.shape == (1, 4, 5, 2) for routing in blocks.routings)


def test_a_checkpoint_without_drafter_says_so(quant):
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        drafter_of(quant.shape)
