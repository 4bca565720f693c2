"""DOMO: the server's momentum m_r takes part in the local steps, but not in what the device reports.

Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022.

    before        x ← x − η·β·P·m_r once, before the first of P steps (DOMO)
    every_step    g ← g + β·m_r in every step, behind the local momentum (DOMO-S)

Without an m_r (the first round), or with β = 0, this is plain SGD.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.axes.local.rule import LocalRule, Plain, Running, Start, check_constant
from federation.errors import FieldError
from federation.space import Vector

When = Literal["before", "every_step"]


@dataclass(frozen=True)
class ServerMomentum:
    """Fuse the server's momentum into the local steps. Stands last in a chain, or local momentum would multiply it."""

    beta: float
    when: When

    def __post_init__(self) -> None:
        check_constant("beta", self.beta)
        if self.when not in get_args(When):
            expected = " or ".join(map(repr, get_args(When)))
            raise FieldError("when", f"expected {expected}, got {self.when!r}")

    def begin(self, start: Start) -> Running:
        if start.server_momentum is None or not self.beta:
            return Plain()
        if self.when == "every_step":
            return _EveryStep(self.beta, start.server_momentum)
        before = _Before(start.rate * self.beta * start.steps, start.server_momentum)
        np.add(start.x, before.unreported(), out=start.x)
        return before


def fuses(rules: Iterable[LocalRule]) -> bool:
    """Whether devices use the server's last move."""
    return any(isinstance(rule, ServerMomentum) and rule.beta > 0 for rule in rules)


class _Before(Plain):
    def __init__(self, factor: float, momentum: Vector) -> None:
        self.factor = factor
        self.momentum = momentum

    def unreported(self, rates: float = 0.0) -> Vector:
        return np.multiply(self.momentum, -self.factor)


class _EveryStep(Plain):
    def __init__(self, beta: float, momentum: Vector) -> None:
        self.beta = beta
        self.momentum = momentum

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.multiply(self.momentum[at], self.beta, out=scratch)
        np.add(g, scratch, out=g)

    def unreported(self, rates: float) -> Vector:
        return np.multiply(self.momentum, -rates * self.beta)
