"""Ordered dropout: in every step a device draws how wide a model it trains.

Horváth et al.: FjORD, NeurIPS 2021, Algorithm 1 (without self-distillation): device i holds the model of its largest
width; each step draws a width among the allowed ones and changes only that leading box; every element becomes the mean
over the devices that hold it.
"""

from __future__ import annotations

from tests.oracles.heterofl import Round, Shapes, box, cut, merge
from tests.oracles.model import Gradient, Model, copy


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    widths: dict[float, Shapes],
    largest: dict[int, float],
    draws: dict[tuple[int, int], float],
    steps: int,
    rate: float,
    weights: dict[int, float] | None = None,
) -> list[Round]:
    """`draws[device, step]` is the width of that step, `step` as `gradient` gets it."""
    rounds: list[Round] = []
    x = copy(start)
    for t, selected in enumerate(participants):
        held: dict[int, Model] = {}
        for i in selected:
            y = cut(x, widths[largest[i]])
            for k in range(steps):
                drawn = widths[draws[i, t * steps + k]]
                g = gradient(i, cut(y, drawn), t * steps + k)
                for layer in range(len(y)):
                    for name in y[layer]:
                        y[layer][name][box(drawn[layer][name])] -= rate * g[layer][name]
            held[i] = y
        x, count = merge(x, held, selected, weights)
        rounds.append(Round(held, count, x))
    return rounds
