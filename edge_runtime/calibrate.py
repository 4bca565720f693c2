"""Static batch norm: statistics are not taken from training, but computed from data for the weights as they are.

Diao, Ding and Tarokh, HeteroFL, ICLR 2021: running statistics of models of different widths do not belong together, so
no step tracks them, and they are computed once, before the model is used. Here from one pass over some samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data import TrainingSamples, shuffled
from edge_runtime.engine.engine import GradientStep
from federation.axes.local import runs
from federation.space import ParameterSpace, Vector

SAMPLES, BATCH = 1024, 128  # that are enough for statistics


def batches_of(samples: TrainingSamples, seed: int = 0) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Take a few batches of some data, the same each time."""
    order = shuffled(len(samples), seed, 0)[:SAMPLES]
    for start in range(0, len(order), BATCH):
        yield samples.batch(order[start : start + BATCH])


def calibrated(
    step: GradientStep, space: ParameterSpace, weights: Vector, batches: Iterable[tuple[NDArray[Any], NDArray[Any]]]
) -> Vector:
    """Replace the statistics by the mean of the batches' own; `step` is that of the whole model.

    A step gives (1 − m)·old + m·batch for a momentum m that it does not tell: from zeros and from ones both follow.
    """
    found: Vector = np.array(weights)
    _, statistics = runs(space, 0)
    if not statistics:
        return found
    seen, count = [np.zeros(at.stop - at.start) for at in statistics], 0
    for inputs, labels in batches:
        zeros, ones = (_statistics(step, weights, statistics, inputs, labels, old) for old in (0.0, 1.0))
        for total, low, high in zip(seen, zeros, ones, strict=True):
            total += low / (1.0 - (high - low))
        count += 1
    for at, total in zip(statistics, seen, strict=True):
        found[at] = total / max(count, 1)
    return found


def _statistics(
    step: GradientStep,
    weights: Vector,
    statistics: list[slice],
    inputs: NDArray[Any],
    labels: NDArray[Any],
    old: float,
) -> list[NDArray[np.float64]]:
    """Run one step on statistics that are all the same, and return what it makes of them."""
    step.parameters[:] = weights
    for at in statistics:
        step.parameters[at] = old
    step.run(inputs, labels)
    return [step.gradients[at].astype(np.float64) for at in statistics]
