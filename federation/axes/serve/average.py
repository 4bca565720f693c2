"""x ← x + η·mean Δ: generalised FedAvg with two-sided rates; η = 1 is FedAvg.

Yang, Fang and Liu, Achieving Linear Speedup with Partial Worker Participation in Non-IID Federated Learning, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from federation.axes.serve.rule import Doubles, RoundFacts, ServeRule, check_rate


@dataclass(frozen=True)
class Average(ServeRule):
    """Move by the mean of the updates, times a rate."""

    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def step(self, move: Doubles, state: Mapping[str, Doubles], facts: RoundFacts) -> Doubles:
        return move * self.rate
