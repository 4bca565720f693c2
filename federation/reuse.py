"""Stored activations that are used again: for how many rounds, by how much the layers in front of them have changed.

The server measures it, because a device that uses its activations again does not fetch those layers. The change of a
layer in a round is ‖after − before‖ / ‖before‖, over what the round moved of it; weights and statistics are measured
apart, and the larger number counts. Over several rounds the changes add up, which is never less than the change from
the first to the last. A task then says for how many rounds activations are good, and device and simulation follow it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from federation.layout import MODEL
from federation.server_step import Change, StoredVector
from federation.space import ParameterSpace

MOST_CHANGE = 1e6  # what was zero has changed without bound


@dataclass(frozen=True)
class LayerChanges:
    """How the layers of a model have changed until now; the default is a job of which it was not measured."""

    last: tuple[int, ...] = ()  # by layer: the round that changed it last; -1: none
    recent: tuple[tuple[float, ...], ...] = ()  # newest round first: the change of every layer

    def after(self, number: int, changes: tuple[float, ...], rounds: int) -> LayerChanges:
        """Add a round; so many are remembered."""
        before = self.last or (number,) * len(changes)
        last = tuple(number if change else known for change, known in zip(changes, before, strict=True))
        return LayerChanges(last, (changes, *self.recent)[:rounds])

    def unchanged_for(self, number: int, layers: int) -> int:
        """Count the rounds until `number`, this one included, that began with the same first layers."""
        return number - max(self.last[:layers], default=number - 1)

    def within(self, bound: float, layers: int) -> int:
        """Count the rounds until now, the one that comes included, since which no layer has changed by more."""
        total = np.zeros(layers)
        for age, changes in enumerate(self.recent, 1):
            total += changes[:layers]
            if total.max(initial=0.0) > bound:
                return age
        return len(self.recent) + 1


class ChangeMeter:
    """Measures how far a server's step moves each layer."""

    def __init__(self, space: ParameterSpace) -> None:
        self._starts = [space.layer(layer).start for layer in range(len(space.layers))]
        self._borders = [
            start + sum(parameter.size for parameter in layer if parameter.kind == "weight")
            for start, layer in zip(self._starts, space.layers)
        ]
        self._squares: dict[tuple[int, bool], tuple[float, float]] = {}  # layer, statistics? -> of moves, of the old

    def watch(self, changes: Iterable[Change], before: StoredVector) -> Iterator[Change]:
        """Pass changes on."""
        for name, at, values in changes:
            if name == MODEL:
                old = before[at].astype(np.float64)
                move = values - old
                layer = bisect_right(self._starts, at.start) - 1
                key = layer, at.start >= self._borders[layer]
                moved, length = self._squares.get(key, (0.0, 0.0))
                self._squares[key] = moved + float(np.dot(move, move)), length + float(np.dot(old, old))
            yield name, at, values

    def changes(self) -> tuple[float, ...]:
        """Return the change of every layer."""
        found = [0.0] * len(self._starts)
        for (layer, _), (moved, length) in self._squares.items():
            change = min(MOST_CHANGE, math.sqrt(moved / length) if length else MOST_CHANGE) if moved else 0.0
            found[layer] = max(found[layer], change)
        return tuple(found)
