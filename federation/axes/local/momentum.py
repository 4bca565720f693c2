"""Heavy ball: v ← factor·v + g, and the step goes along v; with Nesterov along g + factor·v. As PyTorch's SGD.

A factor of 0 is plain SGD. Between two rounds of a device v is reset to zero, kept by the device, or averaged over all
devices and handed back (FedAvgLM; twice the bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.axes.local.rule import Plain, Running, Start, check_constant
from federation.errors import FieldError
from federation.space import Vector

Between = Literal["reset", "keep", "average"]


@dataclass(frozen=True)
class Momentum:
    """Local momentum. It starts at `Start.momentum`, or at zero; its state is `momentum`."""

    factor: float
    nesterov: bool = False
    between: Between = "reset"  # what becomes of it between two rounds

    def __post_init__(self) -> None:
        check_constant("factor", self.factor, below=1)
        if self.between not in get_args(Between):
            raise FieldError("between", f"expected reset, keep or average, got {self.between!r}")

    def begin(self, start: Start) -> Running:
        velocity = np.zeros_like(start.x) if start.momentum is None else start.momentum.copy()
        return _Nesterov(self.factor, velocity) if self.nesterov else _HeavyBall(self.factor, velocity)


class _HeavyBall(Plain):
    def __init__(self, factor: float, velocity: Vector) -> None:
        self.factor = factor
        self.velocity = velocity

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        v = self.velocity[at]
        np.multiply(v, self.factor, out=v)
        np.add(g, v, out=g)
        np.copyto(v, g)

    def state(self) -> dict[str, Vector]:
        return {"momentum": self.velocity}


class _Nesterov(_HeavyBall):
    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        v = self.velocity[at]
        np.multiply(v, self.factor, out=v)
        np.add(v, g, out=v)
        np.multiply(v, self.factor, out=scratch)
        np.add(g, scratch, out=g)
