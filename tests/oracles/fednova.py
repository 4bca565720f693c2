"""FedNova: every update is divided by the number of steps behind it.

Wang et al.: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020:
Δ_i = −η G_i a_i, d_i = G_i a_i / ‖a_i‖₁ and x ← x − τ_eff Σ p_i η d_i with τ_eff = Σ p_i ‖a_i‖₁. The columns of G_i are
the device's gradients, and a_i says how much of each is in its update.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, minus, plus, times, zeros


@dataclass(frozen=True)
class Round:
    local: dict[int, Model]
    norms: dict[int, float]  # ‖a_i‖₁
    normalised: dict[int, Model]  # d_i
    effective: list[float]  # τ_eff, for every layer over those that trained it
    model: Model


def coefficients(steps: int, momentum: float = 0.0, shrink: float = 0.0) -> list[float]:
    """a_i: plain SGD gives 1, 1, ..., 1.

    With momentum ρ the j-th gradient is in all later buffers: 1 + ρ + ρ² + ... With a proximal term (`shrink` = ημ)
    what it did is shortened by 1 − ημ in each later step.
    """
    result: list[float] = []
    for j in range(steps):
        later = steps - 1 - j
        if momentum:
            result.append(sum(momentum**power for power in range(later + 1)))
        else:
            result.append((1.0 - shrink) ** later)
    return result


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    steps: dict[int, int],
    rate: float,
    weights: dict[int, float] | None = None,
    momentum: float = 0.0,
    trained: dict[int, list[int]] | None = None,
) -> list[Round]:
    """`trained[i]` are the layers that device i trains, without it all; p_i and τ_eff are of those that trained it."""
    most = max(steps.values())
    rounds: list[Round] = []
    x = copy(start)
    for t, selected in enumerate(participants):
        local: dict[int, Model] = {}
        norms: dict[int, float] = {}
        normalised: dict[int, Model] = {}
        for i in selected:
            y = copy(x)
            buffer = zeros(x)
            for k in range(steps[i]):
                g = gradient(i, y, t * most + k)
                for layer in trained[i] if trained else range(len(x)):
                    for name in y[layer]:
                        buffer[layer][name] = momentum * buffer[layer][name] + g[layer][name]
                        y[layer][name] = y[layer][name] - rate * buffer[layer][name]
            local[i] = y
            norms[i] = sum(coefficients(steps[i], momentum))
            normalised[i] = times(1.0 / (rate * norms[i]), minus(x, y))
        effective: list[float] = []
        following = copy(x)
        for layer in range(len(x)):
            who = [i for i in selected if trained is None or layer in trained[i]]
            total = sum(weights[i] if weights else 1.0 for i in who)
            share = {i: (weights[i] if weights else 1.0) / total for i in who}
            tau_eff = sum(share[i] * norms[i] for i in who)
            effective.append(tau_eff)
            for i in who:
                moved = plus([following[layer]], -tau_eff * share[i] * rate, [normalised[i][layer]])
                following[layer] = moved[0]
        x = following
        rounds.append(Round(local, norms, normalised, effective, x))
    return rounds
