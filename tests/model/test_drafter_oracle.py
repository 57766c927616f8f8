"""The block drafter against golden hidden states, logits, tokens and confidences."""

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.model.drafter import draft_blocks, drafter_of, forward_blocks
from engine.model.reference import forward

LIMIT = 1e-4
BLOCKS = [(a, 5) for a in (1, 2, 15, 16, 17, 18, 32, 44)] + [(a, b) for a in (1, 16) for b in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def stored(oracle):
    return load_file(oracle / "dspark" / "v41.safetensors")


def test_every_golden_block_is_covered(stored):
    found = {tuple(key.split(".")[1:3]) for key in stored if key.endswith(".hidden")}
    assert found == {(f"a{anchor}", f"b{block}") for anchor, block in BLOCKS}
    assert set(stored["s0.anchors"].tolist()) == {anchor for anchor, _ in BLOCKS}


def test_features_of_the_target_match(tiny, stored):
    with torch.no_grad():
        output = forward(tiny.weights, tiny.shape, stored["s0.ids"].long()[None], engram=tiny.tables)
    assert (output.features[0] - stored["s0.features"]).abs().max() <= LIMIT


@pytest.mark.parametrize(("anchor", "block"), BLOCKS)
def test_a_drafted_block_matches_the_golden_one(tiny, stored, anchor, block):
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
