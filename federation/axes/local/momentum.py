"""Heavy ball: v ← factor·v + g, and the step goes along v; with Nesterov along g + factor·v. As PyTorch's SGD.

A factor of 0 is plain SGD. Between two rounds of a device v is reset to zero, kept by the device, or averaged over all
devices and handed back (FedAvgLM; twice the bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.axes.local.rule import LocalRule, Pace, Plain, Running, Start, Track, check_constant
from federation.device_task import DeviceTask, Handover, LocalModel, LocalResult
from federation.errors import FieldError
from federation.space import Vector

MOMENTUM = "momentum"  # v: brought, kept, sent, and the server's mean of it
Between = Literal["reset", "keep", "average"]


@dataclass(frozen=True)
class Momentum(LocalRule):
    """Local momentum."""

    factor: float
    nesterov: bool = False
    between: Between = "reset"  # what becomes of it between two rounds

    def __post_init__(self) -> None:
        check_constant("factor", self.factor, below=1)
        if self.between not in get_args(Between):
            raise FieldError("between", f"expected reset, keep or average, got {self.between!r}")

    @property
    def tracks(self) -> tuple[Track, ...]:
        return (Track(MOMENTUM),) if self.between == "average" else ()

    @property
    def keeps(self) -> bool:
        return self.between == "keep"

    @property
    def buffers(self) -> int:
        return 1

    @property
    def pace(self) -> Pace:
        return Pace(inertia=self.factor, nesterov=self.nesterov)

    def begin(self, start: Start) -> Running:
        brought = start.brought.get(MOMENTUM)
        velocity = np.zeros_like(start.x) if brought is None else brought.copy()
        return _Nesterov(self.factor, velocity) if self.nesterov else _HeavyBall(self.factor, velocity)

    def begin_task(self, task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
        if self.between == "average":
            if task.goes_on(MOMENTUM):
                newer = [task.server.state(MOMENTUM, part) for part in task.fresh]
                return {MOMENTUM: task.renewed(MOMENTUM, newer)}
            return {MOMENTUM: task.server.state(MOMENTUM, task.everything)}
        kept = task.own.vectors if task.own and self.between == "keep" else {}
        return {MOMENTUM: kept[MOMENTUM]} if MOMENTUM in kept else {}

    def finish_task(self, task: DeviceTask, result: LocalResult) -> Handover:
        if self.between == "reset":
            return Handover()
        velocity = {MOMENTUM: result.state[MOMENTUM]}
        stays = self.between == "keep" or task.exchange.keeps_model
        return Handover(velocity if self.between == "average" else {}, velocity if stays else {})


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
        return {MOMENTUM: self.velocity}


class _Nesterov(_HeavyBall):
    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        v = self.velocity[at]
        np.multiply(v, self.factor, out=v)
        np.add(v, g, out=v)
        np.multiply(v, self.factor, out=scratch)
        np.add(g, scratch, out=g)
