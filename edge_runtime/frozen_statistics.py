"""Statistics of batch norms in layers that a device does not train, measured while its data passes through them.

What is reported of a running statistic r is (1 − (1 − m)^k)·(s − r). There s is the mean, or the unbiased variance, of
what enters the batch norm, over all training samples of the device; m is the momentum of the batch norm, and k how
often training moves its statistics in a task. This is what a device that trains the layer reports, but for the noise of
batches: each step replaces the share m of the old value by that of a batch, and batches are drawn from the same
samples. So both kinds of devices report the same quantity, and their mean counts the data of each alike; s − r would
count a weak device 1 / (1 − 0.9^10) = 1.5 times as much as a strong one that takes ten steps.

Two things differ. Layers in front are normalised by running statistics here, by those of the batch in training. The
former is what the model does when it is used. And s belongs to the weights that the round begins with, what a device
that trains reports to weights on their way to the next version: where these move far in a round, s is old
(docs/results/reproduce.md, embracing-statistics).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.coverage import Coverage
from federation.exchange import measured_region
from federation.manifest import BatchNorm, Manifest
from federation.space import Vector

Doubles = NDArray[np.float64]


@dataclass
class _Sums:
    """Of one batch norm: sums over rows, of distances from the old mean, in double precision."""

    mean: Doubles  # the old one
    variance: Doubles
    rows: int
    distances: Doubles
    squares: Doubles


class FrozenStatistics:
    """Sums of everything that entered some batch norms. How samples are divided into batches makes no difference."""

    def __init__(self, manifest: Manifest, covered: Coverage) -> None:
        self.region = measured_region(manifest, covered)
        self.norms = {
            index: layer.measuring.norms
            for index, layer in enumerate(manifest.layers[: covered.boundary.layer])
            if layer.measuring
        }
        self._space = manifest.space
        self._sums: dict[BatchNorm, _Sums] = {}

    def begin(self, layer: int, read: Callable[[slice], Vector]) -> None:
        """Read the old statistics of a layer in the model's vector."""
        for norm in self.norms.get(layer, ()):
            mean, variance = (read(self._space.slice_of(name)).astype(np.float64) for name in _names(norm))
            self._sums[norm] = _Sums(mean, variance, 0, np.zeros_like(mean), np.zeros_like(mean))

    def add(self, norm: BatchNorm, means: NDArray[Any], variances: NDArray[Any]) -> None:
        """Add rows: of each, mean and biased variance of every channel."""
        sums = self._sums[norm]
        away = means - sums.mean
        sums.rows += len(means)
        sums.distances = _added(sums.distances, away)
        sums.squares = _added(sums.squares, variances + away * away)

    def update(self, moves: int) -> Vector:
        """Return what is reported, over the region; `moves` says how often training moves statistics in a task."""
        found: dict[str, Doubles] = {}
        for norm, sums in self._sums.items():
            share, values = 1.0 - (1.0 - norm.momentum) ** moves, sums.rows * norm.positions
            moved = sums.distances / sums.rows
            variance = np.maximum(sums.squares / sums.rows - moved * moved, 0.0) * (values / max(values - 1, 1))
            found |= zip(_names(norm), (share * moved, share * (variance - sums.variance)), strict=True)
        pieces = [found[piece.parameter.name] for layer in self.region.layers for piece in layer]
        return np.concatenate([np.zeros(0), *pieces]).astype(np.float32)


def _names(norm: BatchNorm) -> tuple[str, str]:
    return norm.mean, norm.variance


def _added(total: Doubles, rows: Doubles) -> Doubles:
    """Add row after row, so that the sum does not depend on how many come at once."""
    return np.asarray(np.add.accumulate(np.concatenate([total[None], rows]), axis=0)[-1])
