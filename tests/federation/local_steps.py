"""Gradients, a run of local rules over them, and plain SGD to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from federation.axes.local import (
    LocalRule,
    LocalStep,
    Start,
)
from federation.space import Vector

N, STEPS, RATE = 37, 25, 0.05


def draw(*shape: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


GRADIENTS = draw(STEPS, N, seed=1)


def work(
    rules: Sequence[LocalRule],
    gradients: Vector = GRADIENTS,
    *,
    block: int = 8,
    x: Vector | None = None,
    **brought: Vector,
) -> LocalStep:
    """Run the rules over the gradients, everything a weight; blocks are small and do not divide the length."""
    x = (draw(gradients.shape[1]) if x is None else x).copy()
    begun = Start(x, len(gradients), RATE, brought=brought)
    step = LocalStep(rules, begun, [slice(0, 5), slice(5, x.size)], [], block=block)
    for gradient in gradients:
        step.step(gradient.copy(), RATE)
    return step


def plain(gradients: Vector = GRADIENTS) -> Vector:
    x = draw(gradients.shape[1])
    for gradient in gradients:
        x -= np.float32(RATE) * gradient
    return x
