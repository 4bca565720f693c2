"""Generalised FedAvg with two-sided learning rates.

Yang, Fang, Liu: Achieving Linear Speedup with Partial Worker Participation in Non-IID Federated Learning, ICLR 2021,
Algorithm 1. The listing's Δ_t is the plain mean; weights (FedAvg's n_i) make it a weighted one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, mean, minus, plus


@dataclass(frozen=True)
class Round:
    local: dict[int, Model]  # x^i_{t,K}
    deltas: dict[int, Model]  # Δ^i_t
    mean_delta: Model  # Δ_t
    model: Model  # x_{t+1}


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    steps: int,
    local_rate: float,
    server_rate: float = 1.0,
    weights: dict[int, float] | None = None,
) -> list[Round]:
    """`participants[t]` is S_t. With replacement, a device is in the list, and counts, as often as it was drawn."""
    rounds: list[Round] = []
    x = copy(start)
    for t, selected in enumerate(participants):
        local: dict[int, Model] = {}
        deltas: dict[int, Model] = {}
        for i in selected:
            y = copy(x)
            for k in range(steps):
                g = gradient(i, y, t * steps + k)
                y = plus(y, -local_rate, g)
            local[i] = y
            deltas[i] = minus(y, x)
        counts = [weights[i] for i in selected] if weights else None
        mean_delta = mean([deltas[i] for i in selected], counts)
        x = plus(x, server_rate, mean_delta)
        rounds.append(Round(local, deltas, mean_delta, x))
    return rounds
