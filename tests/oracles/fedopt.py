"""Adaptive server optimisers: FedAdagrad, FedYogi, FedAdam.

Reddi et al.: Adaptive Federated Optimization, ICLR 2021, Algorithm 2. No bias correction; v starts at τ² (the listing
asks for at least that much), m at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracles.model import Gradient, Model, copy, mean, minus, plus, times, zeros


@dataclass(frozen=True)
class Round:
    mean_delta: Model  # Δ_t
    first: Model  # m_t
    second: Model  # v_t
    model: Model  # x_{t+1}


def run(
    kind: str,
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    steps: int,
    local_rate: float,
    server_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    second_start: float | None = None,
) -> list[Round]:
    rounds: list[Round] = []
    x = copy(start)
    m = zeros(start)
    v = [
        {name: np.full(value.shape, tau**2 if second_start is None else second_start) for name, value in layer.items()}
        for layer in start
    ]
    for t, selected in enumerate(participants):
        deltas: list[Model] = []
        for i in selected:
            y = copy(x)
            for k in range(steps):
                y = plus(y, -local_rate, gradient(i, y, t * steps + k))
            deltas.append(minus(y, x))
        delta = mean(deltas)
        m = plus(times(beta1, m), 1.0 - beta1, delta)
        v = copy(v)
        x = copy(x)
        for layer in range(len(x)):
            for name in x[layer]:
                squared = delta[layer][name] ** 2
                v[layer][name] = next_second(kind, v[layer][name], squared, beta2)
                x[layer][name] = x[layer][name] + server_rate * m[layer][name] / (np.sqrt(v[layer][name]) + tau)
        rounds.append(Round(delta, m, v, x))
    return rounds


def next_second(kind: str, v: np.ndarray, squared: np.ndarray, beta2: float) -> np.ndarray:
    if kind == "adagrad":
        return v + squared
    if kind == "yogi":
        return v - (1.0 - beta2) * squared * np.sign(v - squared)
    assert kind == "adam", kind
    return beta2 * v + (1.0 - beta2) * squared
