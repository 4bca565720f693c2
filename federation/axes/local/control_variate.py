"""Control variates: g ← g + (c − c_i), the local step of SCAFFOLD and of VRL-SGD.

Karimireddy et al., SCAFFOLD, ICML 2020; Liang et al., Variance Reduced Local SGD, 2019. How c and c_i are made is not
decided here: the task brings their difference, and without one (the first round) this is plain SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from federation.axes.local.rule import Plain, Running, Start
from federation.space import Vector


@dataclass(frozen=True)
class ControlVariate:
    """Correct every gradient by how the device's data differ from the fleet's."""

    def begin(self, start: Start) -> Running:
        return Plain() if start.control is None else _Running(start.control)


class _Running(Plain):
    def __init__(self, control: Vector) -> None:
        self.control = control

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.add(g, self.control[at], out=g)
