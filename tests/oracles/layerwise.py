"""Devices that train some of the layers: what EmbracingFL and its mirror image have in common.

Lee et al.: Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, §3.1: the
update rule of y and z, for any sets of layers. A layer becomes the mean over the participants that trained it; a layer
that nobody trained keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, zeros


@dataclass(frozen=True)
class Round:
    local: dict[int, Model]  # x^i after τ steps; the layers a device does not train are those it received
    trained_by: list[list[int]]  # for every layer, the devices whose values are averaged
    model: Model  # x_{t+1}


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    trained: dict[int, list[int]],
    steps: int,
    rate: float,
    momentum: float = 0.0,
) -> list[Round]:
    """LocalUpdate is SGD with momentum on the layers `trained[i]`; the buffer is 0 at the beginning of every round."""
    rounds: list[Round] = []
    x = copy(start)
    for t, selected in enumerate(participants):
        local: dict[int, Model] = {}
        for i in selected:
            y = copy(x)
            buffer = zeros(x)
            for j in range(steps):
                g = gradient(i, y, t * steps + j)
                for layer in trained[i]:
                    for name in y[layer]:
                        buffer[layer][name] = momentum * buffer[layer][name] + g[layer][name]
                        y[layer][name] = y[layer][name] - rate * buffer[layer][name]
            local[i] = y
        trained_by = [[i for i in selected if layer in trained[i]] for layer in range(len(x))]
        following = copy(x)
        for layer, who in enumerate(trained_by):
            for name in x[layer]:
                if who:
                    following[layer][name] = sum(local[i][layer][name] for i in who) / len(who)
        x = following
        rounds.append(Round(local, trained_by, x))
    return rounds
