"""Static width reduction: a device holds the first channels of every layer.

Diao, Ding, Tarokh: HeteroFL, ICLR 2021: every element of the global model becomes the mean over the devices whose
narrow model has it; an element that no participant has keeps its value. The narrow model is the leading box of every
parameter. (HeteroFL's scaler and masked loss are properties of the model, not of the aggregation.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracles.model import Gradient, Layer, Model, copy, plus

Shapes = list[dict[str, tuple[int, ...]]]  # of every parameter of every layer of a narrow model


@dataclass(frozen=True)
class Round:
    narrow: dict[int, Model]  # the devices' models after their steps, in their own shapes
    count: Model  # how much weight each element's mean has
    model: Model


def box(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, length) for length in shape)


def cut(model: Model, shapes: Shapes) -> Model:
    """The leading box of every parameter, as a model of its own."""
    return [_cut_layer(layer, of_layer) for layer, of_layer in zip(model, shapes, strict=True)]


def _cut_layer(layer: Layer, shapes: dict[str, tuple[int, ...]]) -> Layer:
    return {name: np.array(value[box(shapes[name])]) for name, value in layer.items()}


def merge(
    x: Model, narrow: dict[int, Model], selected: list[int], weights: dict[int, float] | None
) -> tuple[Model, Model]:
    """The mean of every element over the devices that have it, and the weight behind it."""
    following = copy(x)
    count = copy(x)
    for layer in range(len(x)):
        for name, value in x[layer].items():
            for element in np.ndindex(value.shape):
                total = 0.0
                weight = 0.0
                for i in selected:
                    held = narrow[i][layer][name]
                    if all(index < length for index, length in zip(element, held.shape)):
                        mine = weights[i] if weights else 1.0
                        total += mine * held[element]
                        weight += mine
                count[layer][name][element] = weight
                if weight > 0:
                    following[layer][name][element] = total / weight
    return following, count


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    shapes: dict[int, Shapes],
    steps: int,
    rate: float,
    weights: dict[int, float] | None = None,
) -> list[Round]:
    """`gradient` is called with the narrow model."""
    rounds: list[Round] = []
    x = copy(start)
    for t, selected in enumerate(participants):
        narrow: dict[int, Model] = {}
        for i in selected:
            y = cut(x, shapes[i])
            for k in range(steps):
                y = plus(y, -rate, gradient(i, y, t * steps + k))
            narrow[i] = y
        x, count = merge(x, narrow, selected, weights)
        rounds.append(Round(narrow, count, x))
    return rounds
