"""What the oracles share: a model is a list of layers, input side first; a layer is name -> float64 array.

The oracles are slow, literal transcriptions of the listings in the papers. They import nothing of the product, so
that an error in the product cannot be in them as well.

Every oracle takes `gradient(device, model, step)`: the gradient of that device's loss at that model. `step` tells a
stochastic gradient which batch to draw; it is the number of the local step since the beginning of the run, 0-based,
where each round counts as many steps as the most that any device makes in it, whoever takes part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Layer = dict[str, np.ndarray]
Model = list[Layer]
Gradient = Callable[[int, Model, int], Model]  # device, model, step


def copy(model: Model) -> Model:
    return [{name: np.array(value, dtype=np.float64) for name, value in layer.items()} for layer in model]


def zeros(model: Model) -> Model:
    return [{name: np.zeros(np.shape(value)) for name, value in layer.items()} for layer in model]


def plus(model: Model, factor: float, other: Model) -> Model:
    """model + factor · other, as a new model."""
    result = copy(model)
    for layer, addend in zip(result, other, strict=True):
        for name in layer:
            layer[name] = layer[name] + factor * addend[name]
    return result


def minus(model: Model, other: Model) -> Model:
    return plus(model, -1.0, other)


def times(factor: float, model: Model) -> Model:
    return plus(zeros(model), factor, model)


def mean(models: list[Model], weights: list[float] | None = None) -> Model:
    """Σ w·model / Σ w; without weights everyone counts the same."""
    weights = weights or [1.0] * len(models)
    total = zeros(models[0])
    for model, weight in zip(models, weights, strict=True):
        total = plus(total, weight, model)
    return times(1.0 / sum(weights), total)


def size(layer: Layer) -> int:
    return sum(value.size for value in layer.values())


def squared_distance(layer: Layer, other: Layer) -> float:
    return sum(float(np.sum((layer[name] - other[name]) ** 2)) for name in layer)


def flat(model: Model) -> np.ndarray:
    """All parameters in order, as one vector: for comparing, never for computing."""
    return np.concatenate([value.ravel() for layer in model for value in layer.values()])
