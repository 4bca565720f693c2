"""Measure how far local models are apart after every step of a round: (1/m)·Σ ‖u − x_i‖², u being their mean.

The whole model counts, whatever of it is synchronised in the round: figure 2 of partial model averaging. The distance
is taken after the step and before anything is averaged. Sums are exact (federation/accumulate.py), so that devices may
be divided among processes in any way.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.accumulate import Accumulator
from federation.job import Plan
from federation.layout import MODEL, Layout
from federation.region import whole
from federation.server_step import spread
from federation.space import ParameterSpace, Vector
from federation.wire import Limits, check_data, read_blocks

Seen = Callable[[int, Vector], None]  # a device's place among those that are trained, and its model after a step


class StepSums:
    """Sums over devices of the local models after each step, as differences from the server's model."""

    def __init__(self, plan: Plan, space: ParameterSpace, devices: int) -> None:
        most = plan.bounds.max_value
        self._space = space
        self._limits = Limits(max_value=most)
        self._layout = Layout({MODEL: whole(space)})
        self._totals = [Accumulator(space, max_value=most, max_weight=devices) for _ in range(plan.local.steps)]

    def add(self, path: Sequence[Vector], origin: Vector) -> None:
        """Add the models of one device, one for each step."""
        for total, model in zip(self._totals, path, strict=True):
            data = np.asarray(model - origin, "<f4").tobytes()
            track = check_data(self._layout, self._limits, data).tracks[MODEL]
            total.fold(track.region, read_blocks(io.BytesIO(data), track), 1.0, track.squares, largest=track.largest)

    def dump(self, sums: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Write the sums of every step into an array, and return the rest of them."""
        headers = []
        for row, total in zip(sums, self._totals, strict=True):
            header, row[:] = total.dump()
            headers.append(header)
        return headers

    def merge(self, headers: Sequence[dict[str, Any]], sums: NDArray[np.int64]) -> None:
        """Add what another process has dumped."""
        for total, header, row in zip(self._totals, headers, sums, strict=True):
            total.merge(Accumulator.load(self._space, header, row))

    def distances(self) -> list[float]:
        """Return the squared distance after each step; statistics of batch norm do not count."""
        everything = whole(self._space)
        return [spread(total, everything) or 0.0 for total in self._totals]
