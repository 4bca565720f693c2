"""Server momentum: m ← μ·m + mean d, x ← x − αηP·m, the server's half of FedAvgSM, SLM and DOMO.

Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022. Updates are Δ = −ηP·d, so the momentum
is kept as M = −ηP·m, in units of the model: M ← μ·M + mean Δ, x ← x + α·M. If the local rate η changes from one round
to the next, M is rescaled by the ratio, so that m is what stays. μ = 0 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from federation.axes.serve.rule import Doubles, RoundFacts, check_rate
from federation.errors import InputError

MOMENTUM = "server_momentum"


@dataclass(frozen=True)
class ServerHeavyBall:
    """Move by a running sum of the mean updates; `rate` is α."""

    factor: float = 0.9
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not 0 <= self.factor < 1:
            raise InputError(f"serve.factor: expected a number in [0, 1), got {self.factor}")

    @property
    def vectors(self) -> tuple[str, ...]:
        return (MOMENTUM,)

    def first(self, name: str) -> float:
        return 0.0

    def step(self, move: Doubles, state: Mapping[str, Doubles], facts: RoundFacts) -> Doubles:
        scale = 1.0 if not facts.rate_before else facts.rate / facts.rate_before
        momentum = state[MOMENTUM]
        momentum *= self.factor * scale
        momentum += move
        return momentum * self.rate
