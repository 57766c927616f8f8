"""The layer that predicts ahead against golden logits, streams and drafts."""

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.model.predictor import predict
from engine.model.reference import forward

LIMIT = 1e-4
CASES = ("L5", "L16", "L40")


@pytest.fixture(scope="module")
def stored(oracle):
    return load_file(oracle / "v4-mtp" / "cases.safetensors")


def test_every_golden_case_is_covered(stored):
    assert {key.split(".")[0] for key in stored} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_drafts_of_every_prefix_match_the_golden_case(golden, stored, case):
    model = golden("v4-tiny")
    want = {key.removeprefix(f"{case}."): value for key, value in stored.items() if key.startswith(f"{case}.")}
    ids = want["ids"].long()
    with torch.no_grad():
        target = forward(model.weights, model.shape, ids[None])
        assert (target.streams[0] - want["target_streams"]).abs().max() <= LIMIT
        assert (target.logits[0, -1] - want["target_logits_last"]).abs().max() <= LIMIT
        follow = torch.cat((ids[1:], want["next_token"].long().view(1)))
        logits, _ = predict(model.weights, model.shape, target.streams, follow[None])
        assert (logits[0] - want["slot_logits"]).abs().max() <= LIMIT
        for last in range(len(ids)):
            # Slots up to `last` have the target's streams, the ones after it the layer's own.
            streams, tokens, drafts = target.streams[:, : last + 1], follow[None, : last + 1], []
            for step in range(3):
                logits, own = predict(model.weights, model.shape, streams, tokens)
                drafts.append(int(logits[0, -1].argmax()))
                if last == len(ids) - 1:
                    assert (logits[0, -1] - want["draft_logits"][step]).abs().max() <= LIMIT
                    assert (own[0, -1] - want["draft_streams"][step]).abs().max() <= LIMIT
                streams = torch.cat((streams, own[:, -1:]), 1)
                tokens = torch.cat((tokens, torch.tensor([[drafts[-1]]])), 1)
            assert drafts == want["drafts_at"][last].tolist()


def test_a_model_without_the_layer_says_so(tiny):
    with pytest.raises(ConfigError, match="no layer that predicts ahead"):
        predict(tiny.weights, tiny.shape, torch.zeros(1, 1, 4, tiny.shape.hidden), torch.zeros(1, 1, dtype=torch.int64))
