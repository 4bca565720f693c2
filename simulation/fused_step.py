"""Take SGD's local step in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from federation.axes.local import LocalRule, LocalStep, Momentum, Start, WeightDecay
from federation.axes.local.momentum import MOMENTUM
from federation.space import Vector


class FusedStep(LocalStep):
    """A local step by PyTorch's own kernel where the rules are SGD's: weight decay, momentum, in this order.

    numpy needs seven operations, each over a block of the vector: with 6.6 million weights 7.7 ms, and this takes 2.7.
    """

    def __init__(
        self, rules: Sequence[LocalRule], start: Start, weights: Sequence[slice], statistics: Sequence[slice]
    ) -> None:
        super().__init__(rules, start, weights, statistics)
        kinds = tuple(type(rule) for rule in rules)
        self._is_sgd = kinds in ((), (WeightDecay,), (Momentum,), (WeightDecay, Momentum))
        self._decay = sum(rule.factor for rule in rules if isinstance(rule, WeightDecay))
        self._momentum = next((rule for rule in rules if isinstance(rule, Momentum)), Momentum(0.0))

    def step(self, gradients: Vector, rate: float) -> None:
        if not self._is_sgd:
            return super().step(gradients, rate)
        torch._fused_sgd_(
            self._views(self.x),
            self._views(gradients),
            [view for velocity in self.state().values() for view in self._views(velocity)],
            weight_decay=self._decay,
            momentum=self._momentum.factor if MOMENTUM in self.state() else 0.0,
            lr=rate,
            dampening=0.0,
            nesterov=self._momentum.nesterov,
            maximize=False,
            is_first_step=False,
        )
        self._count(gradients, rate)

    def _views(self, vector: Vector) -> list[torch.Tensor]:
        return [torch.from_numpy(vector[run]) for run in self._weights]
