"""Combining updates so that a few bad ones do no harm: coordinate-wise median and trimmed mean.

Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018. Both need all updates
of a round at once: their bodies stay where they are, and a block of each is read at a time. Weights play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError
from federation.server_step import Move
from federation.space import Vector
from federation.wire import CheckedTrack

Combining = Literal["mean", "median", "trimmed_mean"]
MOST_ELEMENTS = 1 << 21  # of all updates together: 16 MB


class StoredBody(Protocol):
    """The body of an update, wherever it is stored."""

    def values(self, offset: int, count: int) -> Vector:
        """Read so many values that begin at a byte of the body."""


def robust_moves(updates: Sequence[tuple[CheckedTrack, StoredBody]], combine: Combining, trim: float) -> Iterator[Move]:
    """Combine updates block by block, parameter by parameter, over the updates that have the parameter."""
    bodies = [(body, {run.start: offset for offset, run in track.places}) for track, body in updates]
    pieces = {p.run.start: p for track, _ in updates for layer in track.region.layers for p in layer}
    step = max(1, MOST_ELEMENTS // max(1, len(bodies)))
    for begin, piece in sorted(pieces.items()):
        holders = [(body, places[begin]) for body, places in bodies if begin in places]
        for first in range(begin, begin + piece.size, step):
            at = slice(first, min(first + step, begin + piece.size))
            rows = np.empty((len(holders), at.stop - at.start))
            for row, (body, offset) in zip(rows, holders):
                row[:] = body.values(offset + 4 * (at.start - begin), row.size)
            yield Move(at, piece.parameter.kind, _combined(rows, combine, trim))


def _combined(rows: NDArray[np.float64], combine: Combining, trim: float) -> NDArray[np.float64]:
    """In a fixed order of values, so that the order of updates makes no difference."""
    if combine == "median":
        return np.asarray(np.median(rows, axis=0))
    if combine == "trimmed_mean":
        cut = int(trim * len(rows) + 1e-9)  # 0.29 · 100 is 28.999999999999996, and means 29
        rows.sort(axis=0)
        return np.asarray(rows[cut : len(rows) - cut].mean(axis=0))
    raise InputError(f"no robust rule is called {combine!r}")
