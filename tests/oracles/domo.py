"""Server and local momentum together: DOMO and its family.

Xu, Huang: Coordinating Momenta for Cross-silo Federated Learning (DOMO), AAAI 2022, Algorithm 1; line numbers below are
those of the listing. The other members of the family are named in its section "Settings": 1) FedAvg ... 8) DOMO-S.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Model, copy, mean, minus, plus, times, zeros


@dataclass(frozen=True)
class Method:
    server_momentum: bool
    local_momentum: bool
    buffers: str = "reset"  # "reset": line 5; "average": the mean of the local buffers is handed back (twice the bytes)
    fusion: str = "none"  # "before": Option I; "every": Option II; "none": Option III


METHODS = {
    "fedavg": Method(False, False),
    "fedavg_sm": Method(True, False),
    "fedavg_lm": Method(False, True, "average"),
    "fedavg_lm_z": Method(False, True),
    "fedavg_slm": Method(True, True, "average"),
    "fedavg_slm_z": Method(True, True),
    "domo": Method(True, True, fusion="before"),
    "domo_s": Method(True, True, fusion="every"),
}


@dataclass(frozen=True)
class Round:
    inferred: Model  # m_r as the device gets it from two versions of the model, line 5; 0 in the first round
    local: dict[int, Model]  # x^(k)_{r,P}
    buffers: dict[int, Model]  # m^(k)_{r,P}
    directions: dict[int, Model]  # d^(k)_r
    server_momentum: Model  # m_{r+1}
    model: Model  # x_{r+1}


def run(
    method: str,
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    steps: int,
    local_rate: float | list[float],
    server_rate: float = 1.0,
    mu_server: float = 0.9,
    mu_local: float = 0.6,
    beta: float = 0.9,
) -> list[Round]:
    """The listing has all K clients in every round; here `participants[r]` are those of round r.

    Its η is one number; with a rate for every round, m_r comes of the rate with which the last version was made.
    """
    chosen = METHODS[method]
    mu_s = mu_server if chosen.server_momentum else 0.0
    mu_l = mu_local if chosen.local_momentum else 0.0
    rates = local_rate if isinstance(local_rate, list) else [local_rate] * len(participants)
    rounds: list[Round] = []
    x = copy(start)
    previous = copy(start)
    m = zeros(start)  # line 2
    averaged = zeros(start)
    for r, selected in enumerate(participants):  # line 3
        rate, rate_before = rates[r], rates[max(r - 1, 0)]
        inferred = times(1.0 / (server_rate * rate_before * steps), minus(previous, x))  # line 5
        local: dict[int, Model] = {}
        buffers: dict[int, Model] = {}
        directions: dict[int, Model] = {}
        for k in selected:
            y = copy(x)
            v = copy(averaged) if chosen.buffers == "average" else zeros(x)  # line 5
            total = zeros(x)
            for p in range(steps):  # line 6
                if chosen.fusion == "before" and p == 0:
                    y = plus(y, -rate * beta * steps, inferred)  # line 7
                v = plus(times(mu_l, v), 1.0, gradient(k, y, r * steps + p))  # line 8
                y = plus(y, -rate, v)  # line 9
                if chosen.fusion == "every":
                    y = plus(y, -rate * beta, inferred)  # line 10
                total = plus(total, 1.0, v)
            local[k] = y
            buffers[k] = v
            directions[k] = times(1.0 / steps, total)  # line 12
        m = plus(times(mu_s, m), 1.0, mean([directions[k] for k in selected]))  # line 14
        averaged = mean([buffers[k] for k in selected])
        previous = x
        x = plus(x, -server_rate * rate * steps, m)  # line 15
        rounds.append(Round(inferred, local, buffers, directions, m, x))
    return rounds
