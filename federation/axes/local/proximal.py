"""FedProx: g ← g + μ(x − x_0), the gradient of the loss plus μ/2·‖x − x_0‖². μ = 0 is plain SGD.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from federation.axes.local.rule import LocalRule, Pace, Plain, Running, Start, check_constant
from federation.space import Vector


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Pull every weight towards its value as received."""

    mu: float

    def __post_init__(self) -> None:
        check_constant("mu", self.mu)

    @property
    def pace(self) -> Pace:
        return Pace(pull=self.mu)

    def begin(self, start: Start) -> Running:
        return _Running(self.mu, start.origin) if self.mu else Plain()


class _Running(Plain):
    def __init__(self, mu: float, received: Vector) -> None:
        self.mu = mu
        self.received = received

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.subtract(x, self.received[at], out=scratch)
        np.multiply(scratch, self.mu, out=scratch)
        np.add(g, scratch, out=g)
