"""Input side first, the mirror image of EmbracingFL.

InclusiveFL (Liu et al., KDD 2022) as Lee et al. (Embracing Federated Learning, §3.2) compare with it: a weak device
trains the first layers only. Device i trains the layers in front of `end_layer[i]`; the others stay, during the round,
as received, and the loss is that of the whole model.
"""

from __future__ import annotations

from tests.oracles import layerwise
from tests.oracles.layerwise import Round
from tests.oracles.model import Gradient, Model


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    end_layer: dict[int, int],
    steps: int,
    rate: float,
    momentum: float = 0.0,
) -> list[Round]:
    trained = {i: list(range(end)) for i, end in end_layer.items()}
    return layerwise.run(start, gradient, participants, trained, steps, rate, momentum)
