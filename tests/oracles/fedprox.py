"""FedProx: a proximal term holds the local model near the one received.

Li et al.: Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2: device i lessens
h(w) = F_i(w) + (μ/2)‖w − w_t‖², here by steps of SGD, as many as it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, mean, minus, plus


@dataclass(frozen=True)
class Round:
    local: dict[int, Model]
    model: Model


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    steps: dict[int, int],
    rate: float,
    mu: float,
    weights: dict[int, float] | None = None,
) -> list[Round]:
    most = max(steps.values())
    rounds: list[Round] = []
    x = copy(start)
    for t, selected in enumerate(participants):
        local: dict[int, Model] = {}
        for i in selected:
            w = copy(x)
            for k in range(steps[i]):
                of_the_loss = gradient(i, w, t * most + k)
                w = plus(w, -rate, plus(of_the_loss, mu, minus(w, x)))
            local[i] = w
        x = mean([local[i] for i in selected], [weights[i] for i in selected] if weights else None)
        rounds.append(Round(local, x))
    return rounds
