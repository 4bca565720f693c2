"""Ordered dropout: every step trains the first channels of each layer, of a width that is drawn for this step.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris and Lane, FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout, NeurIPS 2021. One width alone is HeteroFL. What a step leaves out has a
gradient of zero there, and its statistics stay; so momentum and weight decay still move it, as they do in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.prng import below, sample_bits
from edge_runtime.engine.engine import Engine, GradientStep
from federation.axes.local import runs
from federation.coverage import Coverage
from federation.manifest import Boundary, Manifest
from federation.narrow import corners
from federation.space import ParameterSpace, Vector

_WIDTH = 1 << 33  # a draw of its own: neither dropout's nor one of the augmentation's


def open_coverage(engine: Engine, manifest: Manifest, covered: Coverage) -> GradientStep:
    """Open the step of whatever a device trains."""
    if len(covered.ordered) < 2:
        return engine.open_step(covered.boundary)
    return OrderedDropoutStep(manifest, covered.ordered, [engine.open_step(b) for b in covered.ordered])


def draw_width(seed: int, count: int) -> int:
    """Draw which of `count` widths a step trains: all are equally likely, and the same seed gives the same."""
    return int(below(sample_bits(seed, 0, np.zeros(1, np.int64), _WIDTH), count)[0])


class OrderedDropoutStep:
    """Steps of several widths as one over the widest: the others read its parameters and write to its gradients."""

    def __init__(self, manifest: Manifest, boundaries: Sequence[Boundary], steps: Sequence[GradientStep]) -> None:
        """Take the steps, widest first; the first two vectors are the widest step's own."""
        widest = boundaries[0].space(manifest)
        self._steps = tuple(steps)
        self.parameters: Vector = steps[0].parameters
        self.gradients: Vector = steps[0].gradients
        _, self._statistics = runs(widest, 0)
        self._narrow = [_Corners(widest, self, b.space(manifest), s) for b, s in zip(boundaries[1:], steps[1:])]

    def run(self, batch: NDArray[Any], labels: NDArray[Any], seed: int = 0) -> float:
        """Compute the loss of the drawn width; where it does not reach, `gradients` has zeros and old statistics."""
        drawn = draw_width(seed, len(self._steps))
        if drawn == 0:
            return self._steps[0].run(batch, labels, seed)
        narrow = self._narrow[drawn - 1]
        narrow.take()
        loss = self._steps[drawn].run(batch, labels, seed)
        self.gradients[:] = 0
        for where in self._statistics:
            self.gradients[where] = self.parameters[where]
        narrow.put()
        return loss


class _Corners:
    """Where the vectors of a narrow step lie in those of a wide one, as pairs of views."""

    def __init__(self, wide: ParameterSpace, outer: GradientStep, narrow: ParameterSpace, inner: GradientStep) -> None:
        own = narrow.views(inner.parameters)
        self._parameters = [(own[name], view) for name, view in corners(wide, outer.parameters, narrow)]
        results = narrow.views(inner.gradients)
        self._gradients = [(results[name], view) for name, view in corners(wide, outer.gradients, narrow)]

    def take(self) -> None:
        """Copy the wide step's parameters into the narrow one."""
        for mine, theirs in self._parameters:
            mine[...] = theirs

    def put(self) -> None:
        """Copy the narrow step's gradients into the wide one."""
        for mine, theirs in self._gradients:
            theirs[...] = mine
