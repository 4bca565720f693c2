"""Weight decay, as a gradient: g ← g + factor·x. A factor of 0 is plain SGD."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from federation.axes.local.rule import LocalRule, Plain, Running, Start, check_constant
from federation.space import Vector


@dataclass(frozen=True)
class WeightDecay(LocalRule):
    """Pull every weight towards zero."""

    factor: float

    def __post_init__(self) -> None:
        check_constant("factor", self.factor)

    def begin(self, start: Start) -> Running:
        return _Running(self.factor) if self.factor else Plain()


class _Running(Plain):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.multiply(x, self.factor, out=scratch)
        np.add(g, scratch, out=g)
