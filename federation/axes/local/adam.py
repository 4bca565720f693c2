"""Adam and AdamW: each weight's step is scaled by the size of its own gradients. As PyTorch's.

    m ← β1·m + (1 − β1)·g,   v ← β2·v + (1 − β2)·g²,   direction m̂ / (√v̂ + ε) with m̂ = m/(1 − β1ᵗ), v̂ = v/(1 − β2ᵗ)

Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015. Loshchilov and Hutter, Decoupled Weight Decay
Regularization, ICLR 2019 (AdamW): decay·x is added to the direction, where no moment knows it; a decay of 0 is Adam.
Weight decay as a rule of its own in front of Adam is PyTorch's Adam with weight_decay.

Between two rounds of a device the moments, and t with them, are reset to zero or kept by the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.axes.local.rule import LocalRule, Plain, Running, Start, check_constant
from federation.device_task import DeviceTask, Handover, LocalModel, LocalResult
from federation.errors import FieldError
from federation.space import Vector

FIRST, SECOND = "first_moment", "second_moment"  # m and v: brought and kept
Between = Literal["reset", "keep"]


@dataclass(frozen=True)
class Adam(LocalRule):
    """Scale every step by the moments of its gradients."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    between: Between = "reset"  # what becomes of the moments between two rounds

    def __post_init__(self) -> None:
        check_constant("beta1", self.beta1, below=1)
        check_constant("beta2", self.beta2, below=1)
        if not 1e-30 <= self.epsilon <= 1:
            raise FieldError("epsilon", f"expected a number from 1e-30 to 1, got {self.epsilon}")
        if self.between not in get_args(Between):
            raise FieldError("between", f"expected reset or keep, got {self.between!r}")

    @property
    def keeps(self) -> bool:
        return self.between == "keep"

    @property
    def buffers(self) -> int:
        return 2

    @property
    def rescales(self) -> bool:
        return True

    def begin(self, start: Start) -> Running:
        first, second = (start.brought.get(name) for name in (FIRST, SECOND))
        if first is None or second is None:
            return _Running(self, np.zeros_like(start.x), np.zeros_like(start.x), 0)
        return _Running(self, first.copy(), second.copy(), start.steps_before)

    def begin_task(self, task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
        kept = task.own.vectors if task.own and self.keeps else {}
        return {name: kept[name] for name in (FIRST, SECOND) if name in kept}

    def finish_task(self, task: DeviceTask, result: LocalResult) -> Handover:
        return Handover(kept={name: result.state[name] for name in (FIRST, SECOND)}) if self.keeps else Handover()


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay that the moments do not know."""

    decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_constant("decay", self.decay)


class _Running(Plain):
    def __init__(self, rule: Adam, first: Vector, second: Vector, steps: int) -> None:
        self.rule = rule
        self.first = first
        self.second = second
        self.steps = steps
        self.decay = rule.decay if isinstance(rule, AdamW) else 0.0

    def begin_step(self) -> None:
        self.steps += 1
        self.rest = 1.0 - self.rule.beta1**self.steps, float(np.sqrt(1.0 - self.rule.beta2**self.steps))

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        m, v, rule = self.first[at], self.second[at], self.rule
        np.multiply(m, rule.beta1, out=m)
        np.multiply(g, 1.0 - rule.beta1, out=scratch)
        np.add(m, scratch, out=m)
        np.multiply(v, rule.beta2, out=v)
        np.multiply(g, g, out=scratch)
        np.multiply(scratch, 1.0 - rule.beta2, out=scratch)
        np.add(v, scratch, out=v)
        np.sqrt(v, out=scratch)
        np.divide(scratch, self.rest[1], out=scratch)
        np.add(scratch, rule.epsilon, out=scratch)
        np.divide(m, scratch, out=g)
        np.divide(g, self.rest[0], out=g)
        if self.decay:
            np.multiply(x, self.decay, out=scratch)
            np.add(g, scratch, out=g)

    def state(self) -> dict[str, Vector]:
        return {FIRST: self.first, SECOND: self.second}
