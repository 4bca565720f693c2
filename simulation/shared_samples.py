"""Convert a data set once; the devices' shares of it are numbers of samples.

What a device holds is read where it lies and converted batch by batch (edge_runtime/data). In a simulation many devices
share one data set, which is converted once; a batch is then one gathering of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data import TrainingSamples

Numbers = NDArray[np.int64]
_CHUNK = 1024


@dataclass(frozen=True, eq=False)
class SharedSamples:
    """One device's share; has what training asks of local data."""

    inputs: NDArray[Any]  # of all devices, in the model's type and shape
    all_labels: NDArray[Any]
    numbers: Numbers = field(repr=False)  # of this device's samples
    name: str = "the data"

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def labels(self) -> NDArray[Any]:
        return self.all_labels[self.numbers]

    def batch(self, indices: Numbers) -> tuple[NDArray[Any], NDArray[Any]]:
        rows = self.numbers[indices]
        return self.inputs[rows], self.all_labels[rows]


def convert(samples: TrainingSamples, chosen: Numbers | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Convert inputs and labels of some samples, or of all, to what the model takes."""
    numbers = np.arange(len(samples)) if chosen is None else chosen
    first, labels = samples.batch(numbers[:1])
    inputs = np.empty((len(numbers), *first.shape[1:]), first.dtype)
    for start in range(0, len(numbers), _CHUNK):
        inputs[start : start + _CHUNK] = samples.batch(numbers[start : start + _CHUNK])[0]
    return inputs, np.ascontiguousarray(samples.labels[numbers], labels.dtype)
