"""Which proposer a model has."""

from __future__ import annotations

from engine.model.ahead import AheadProposer
from engine.model.blocks import BlockProposer
from engine.model.drafting import Proposer
from engine.model.layers import WeightMap
from engine.model.transformer import PagedTransformer


def make_proposer(model: PagedTransformer, weights: WeightMap) -> Proposer | None:
    """The proposer of a model, which shows it its passes from now on; None for a model without drafter.

    Args:
        model: borrowed.
        weights: vendor-named tensors with `mtp.*`; without the experts where the model has a `mixture`. Not kept.

    Raises:
        ConfigError: the model's bounded replay leaves out what the drafter needs.
    """
    drafter = model.shape.drafter
    if drafter is not None:
        return BlockProposer(model, weights, drafter)
    return AheadProposer(model, weights) if model.shape.num_predict_layers else None
