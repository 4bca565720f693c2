"""Adaptive servers: m ← β1·m + (1 − β1)·Δ, x ← x + η·m / (√v + τ), with three ways to keep v.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.

    Adagrad   v ← v + Δ²
    Yogi      v ← v − (1 − β2)·Δ²·sign(v − Δ²)
    Adam      v ← β2·v + (1 − β2)·Δ²
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from federation.axes.serve.rule import Doubles, RoundFacts, ServeRule, check_rate
from federation.errors import FieldError

FIRST, SECOND = "first_moment", "second_moment"


@dataclass(frozen=True)
class _Adaptive(ServeRule):
    """`tau` is the degree of adaptivity; v begins at `initial`, τ² unless it is given."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    initial: float | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not 0 <= self.beta1 < 1:
            raise FieldError("beta1", f"expected a number in [0, 1), got {self.beta1}")
        if not 0 <= self.beta2 <= 1:
            raise FieldError("beta2", f"expected a number in [0, 1], got {self.beta2}")
        if not 0 < self.tau < 1e6:
            raise FieldError("tau", f"expected a number above 0 and below 10^6, got {self.tau}")
        if self.initial is not None and not 0 <= self.initial < 1e6:
            raise FieldError("initial", f"expected a number in [0, 10^6), got {self.initial}")

    @property
    def vectors(self) -> tuple[str, ...]:
        return (FIRST, SECOND)

    def first(self, name: str) -> float:
        return 0.0 if name == FIRST else self.tau**2 if self.initial is None else self.initial

    def step(self, move: Doubles, state: Mapping[str, Doubles], facts: RoundFacts) -> Doubles:
        mean, variance = state[FIRST], state[SECOND]
        mean *= self.beta1
        mean += (1 - self.beta1) * move
        self.vary(variance, np.square(move))
        return self.rate * mean / (np.sqrt(variance) + self.tau)

    @abstractmethod
    def vary(self, variance: Doubles, squares: Doubles) -> None:
        """Change v in place, given Δ²."""


@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam."""

    def vary(self, variance: Doubles, squares: Doubles) -> None:
        variance *= self.beta2
        variance += (1 - self.beta2) * squares


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi."""

    def vary(self, variance: Doubles, squares: Doubles) -> None:
        variance -= (1 - self.beta2) * squares * np.sign(variance - squares)


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad; it has no beta2."""

    beta1: float = 0.0

    def vary(self, variance: Doubles, squares: Doubles) -> None:
        variance += squares
