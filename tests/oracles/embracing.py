"""EmbracingFL: weak devices train the output side.

Lee et al.: Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, Algorithm 2,
with more than two kinds of devices: device i trains the layers from `first_layer[i]` on. What lies in front of them it
only runs forward, once per round, at the value received (Algorithm 1): its gradient is therefore taken at a model whose
input side stays where it was at the beginning of the round.
"""

from __future__ import annotations

from tests.oracles import layerwise
from tests.oracles.layerwise import Round
from tests.oracles.model import Gradient, Model


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    first_layer: dict[int, int],
    steps: int,
    rate: float,
    momentum: float = 0.0,
) -> list[Round]:
    trained = {i: list(range(first, len(start))) for i, first in first_layer.items()}
    return layerwise.run(start, gradient, participants, trained, steps, rate, momentum)
