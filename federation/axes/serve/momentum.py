"""Server momentum: m ← μ·m + mean d, x ← x − αηP·m, the server's half of FedAvgSM, SLM and DOMO.

Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022. Updates are Δ = −ηP·d, and the momentum
is kept as M = −P·m, without the local rate η: M ← μ·M + mean Δ/η, x ← x + αη·M. So it means the same after η has
changed, also where elements were not trained in between. μ = 0 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from federation.axes.serve.rule import Doubles, RoundFacts, ServeRule, check_rate
from federation.errors import FieldError

MOMENTUM = "server_momentum"


@dataclass(frozen=True)
class ServerHeavyBall(ServeRule):
    """Move by a running sum of the mean updates; `rate` is α."""

    factor: float = 0.9
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not 0 <= self.factor < 1:
            raise FieldError("factor", f"expected a number in [0, 1), got {self.factor}")

    @property
    def vectors(self) -> tuple[str, ...]:
        return (MOMENTUM,)

    def step(self, move: Doubles, state: Mapping[str, Doubles], facts: RoundFacts) -> Doubles:
        momentum = state[MOMENTUM]
        distance: Doubles = momentum * (self.factor * facts.rate) + move  # not by way of Δ/η: with μ = 0 this is Δ
        momentum *= self.factor
        if facts.rate:  # at the end of a cosine no device moves
            momentum += move / facts.rate
        return distance * self.rate
