"""Clip a step's gradient by its norm, before any rule sees it. As PyTorch's clip_grad_norm_."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from federation.axes.local.chain import BLOCK
from federation.space import Vector

_TINY = 1e-6  # PyTorch's: a norm of zero divides nothing


def clip(gradients: Vector, weights: Sequence[slice], most: float) -> None:
    """Shorten the gradient of the weights to the length `most`, in place; a shorter one stays as it is."""
    with np.errstate(over="ignore", invalid="ignore"):  # a gradient that is not finite stays: the trainer reports it
        norm = math.sqrt(math.fsum(_squares(gradients[run]) for run in weights))
        factor = shortening(norm, most)
        if factor < 1:
            for run in weights:
                np.multiply(gradients[run], factor, out=gradients[run])


def _squares(gradients: Vector) -> float:
    """Sum the squares in float64, block by block: float32 loses digits over millions of elements."""
    blocks = (gradients[start : start + BLOCK].astype(np.float64) for start in range(0, gradients.size, BLOCK))
    return math.fsum(float(np.dot(block, block)) for block in blocks)


def shortening(norm: float, most: float) -> float:
    """Return the factor that shortens a gradient of a norm to `most`; 1: it is short enough, or not finite.

    >>> shortening(4.0, 1.0), shortening(0.5, 1.0), shortening(float("inf"), 1.0)
    (0.2499999375000156, 1.0, 1.0)
    """
    return min(1.0, most / (norm + _TINY)) if math.isfinite(norm) else 1.0
