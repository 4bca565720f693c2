"""VRL-SGD: variance-reduced local SGD.

Liang et al.: Variance Reduced Local SGD with Lower Communication Complexity, 2019, Algorithm 1. The listing has all
workers in every period; with fewer, as `participants` allows, those that take part do what the listing says among
themselves and the others keep their Δ_i.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, mean, minus, plus, zeros


@dataclass(frozen=True)
class Round:
    local: dict[int, Model]  # x_i at the end of the period, before the averaging
    model: Model  # x̂
    corrections: dict[int, Model]  # Δ_i of all devices after the period


def run(
    start: Model, gradient: Gradient, participants: list[list[int]], devices: int, steps: int, rate: float
) -> list[Round]:
    rounds: list[Round] = []
    x = copy(start)
    corrections = {i: zeros(start) for i in range(devices)}
    for t, selected in enumerate(participants):
        local: dict[int, Model] = {}
        for i in selected:
            y = copy(x)
            for k in range(steps):
                v = minus(gradient(i, y, t * steps + k), corrections[i])
                y = plus(y, -rate, v)
            local[i] = y
        x = mean([local[i] for i in selected])
        for i in selected:
            changed = plus(corrections[i], 1.0 / (steps * rate), minus(x, local[i]))
            corrections = {**corrections, i: changed}
        rounds.append(Round(local, x, corrections))
    return rounds
