"""DOMO: the server's momentum m_r takes part in the local steps, but not in what the device reports.

Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022.

    before        x ← x − η·β·P·m_r once, before the first of P steps (DOMO)
    every_step    g ← g + β·m_r in every step, behind the local momentum (DOMO-S)

The server's last move says what m_r is: (x_before − x)/(αηP). A device keeps the server's values as they came
(`received`): one that takes part in the next round compares with them, and fetches nothing. Without an m_r (the first
round), or with β = 0, this is plain SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.axes.local.rule import LocalRule, Plain, Running, Start, check_constant
from federation.device_task import OWN_MODEL, REFERENCE, DeviceTask, Handover, LocalModel, LocalResult
from federation.errors import FieldError
from federation.space import Vector

SERVER_MOMENTUM, RECEIVED = "server_momentum", "received"
When = Literal["before", "every_step"]


@dataclass(frozen=True)
class ServerMomentum(LocalRule):
    """Fuse the server's momentum into the local steps. Stands last in a chain, or local momentum would multiply it."""

    beta: float
    when: When

    def __post_init__(self) -> None:
        check_constant("beta", self.beta)
        if self.when not in get_args(When):
            expected = " or ".join(map(repr, get_args(When)))
            raise FieldError("when", f"expected {expected}, got {self.when!r}")

    @property
    def keeps(self) -> bool:
        return self.fuses

    @property
    def fuses(self) -> bool:
        return self.beta > 0

    @property
    def stands_last(self) -> bool:
        # What came later would act on the server's part as well, which could then not be told from the device's.
        return True

    def begin(self, start: Start) -> Running:
        momentum = start.brought.get(SERVER_MOMENTUM)
        if momentum is None or not self.beta:
            return Plain()
        if self.when == "every_step":
            return _EveryStep(self.beta, momentum)
        before = _Before(start.rate * self.beta * start.steps, momentum)
        np.add(start.x, before.unreported(), out=start.x)
        return before

    def begin_task(self, task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
        """What the server's last step says about its momentum, where it has just moved."""
        fuse = task.exchange.fuse
        if fuse is None:
            return {}
        momentum: Vector = np.zeros_like(model.reference)
        known = task.own.vectors.get(RECEIVED) if task.own and task.was_there else None
        for part in task.fresh:
            inside = part.region.inside(task.graph)
            before = task.server.before(part) if known is None else inside.gather(known)
            inside.scatter((before - inside.gather(model.reference)) * np.float32(fuse), momentum)
        return {SERVER_MOMENTUM: momentum}

    def finish_task(self, task: DeviceTask, result: LocalResult) -> Handover:
        kept = _server_values(task, result.model.reference) if self.fuses else {}
        if task.exchange.keeps_model and task.exchange.fuse is not None:
            kept[REFERENCE] = result.x - result.update  # which has moved with the server's part
        return Handover(kept=kept)


def _server_values(task: DeviceTask, reference: Vector) -> dict[str, Vector]:
    """The server's values of this version as far as the device has them, whatever it goes on with itself."""
    if not task.goes_on(OWN_MODEL):
        return {RECEIVED: reference}
    if not task.goes_on(RECEIVED):
        return {}
    return {RECEIVED: task.renewed(RECEIVED, [p.region.inside(task.graph).gather(reference) for p in task.fresh])}


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
