"""SCAFFOLD: control variates against client drift.

Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1, option II.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, mean, minus, plus, times, zeros


@dataclass(frozen=True)
class Round:
    local: dict[int, Model]  # y_i
    deltas: dict[int, Model]  # Δy_i
    control_deltas: dict[int, Model]  # Δc_i
    controls: dict[int, Model]  # c_i of all N devices after the round
    control: Model  # c after the round
    model: Model  # x after the round


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    devices: int,
    steps: int,
    local_rate: float,
    server_rate: float = 1.0,
    known: list[int] | None = None,
) -> list[Round]:
    """`devices` is N; all control variates begin at 0. A participant is listed once per round.

    A server that is not told N takes what it knows: `known` has the number of devices seen so far, round by round.
    """
    rounds: list[Round] = []
    x = copy(start)
    c = zeros(start)
    controls = {i: zeros(start) for i in range(devices)}
    for t, selected in enumerate(participants):
        local: dict[int, Model] = {}
        deltas: dict[int, Model] = {}
        control_deltas: dict[int, Model] = {}
        for i in selected:
            y = copy(x)
            for k in range(steps):
                g = gradient(i, y, t * steps + k)
                corrected = plus(minus(g, controls[i]), 1.0, c)
                y = plus(y, -local_rate, corrected)
            following = plus(minus(controls[i], c), 1.0 / (steps * local_rate), minus(x, y))  # option II
            local[i] = y
            deltas[i] = minus(y, x)
            control_deltas[i] = minus(following, controls[i])
            controls = {**controls, i: following}
        mean_delta = mean([deltas[i] for i in selected])
        mean_control_delta = mean([control_deltas[i] for i in selected])
        x = plus(x, server_rate, mean_delta)
        c = plus(c, 1.0, times(len(selected) / (known[t] if known else devices), mean_control_delta))
        rounds.append(Round(local, deltas, control_deltas, controls, c, x))
    return rounds
