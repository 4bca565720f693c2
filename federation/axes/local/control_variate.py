"""Control variates: g ← g + (c − c_i), the local step of SCAFFOLD and of VRL-SGD.

Karimireddy et al., SCAFFOLD, ICML 2020 (option II): c and c_i are exchanged. Liang et al., Variance Reduced Local SGD
with Lower Communication Complexity, 2019: a device makes the difference itself, from its own last model and the mean
that came of it. edge_runtime/participant.py keeps both; without a difference (the first round) this is plain SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.axes.local.rule import Plain, Running, Start
from federation.errors import FieldError
from federation.space import Vector

Origin = Literal["exchanged", "own"]


@dataclass(frozen=True)
class ControlVariate:
    """Correct every gradient by how the device's data differ from the fleet's."""

    origin: Origin = "exchanged"  # 'own': VRL-SGD

    def __post_init__(self) -> None:
        if self.origin not in get_args(Origin):
            raise FieldError("origin", f"expected exchanged or own, got {self.origin!r}")

    def begin(self, start: Start) -> Running:
        return Plain() if start.control is None else _Running(start.control)


class _Running(Plain):
    def __init__(self, control: Vector) -> None:
        self.control = control

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.add(g, self.control[at], out=g)
