"""Hold what every reader gives: training and test samples of one data set, in memory, as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array
from federation.errors import DataError, EmptyData

# Called with what happens now, and how many of how many steps are done.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Dataset:
    """Images are N×C×H×W, bytes if they are stored so; texts are N×words, token numbers. Labels count from 0.

    Nothing is scaled here: `from_arrays(x_train[indices], y_train[indices], manifest)` makes a device's samples, and
    divides bytes by 255 batch by batch, as it does on a device.
    """

    name: str
    x_train: Array
    y_train: NDArray[np.int64]
    x_test: Array
    y_test: NDArray[np.int64]
    num_classes: int
    groups: NDArray[np.int64] | None = None  # the writer of each training sample, or the film it is about

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) == 0:
                raise EmptyData(f"{self.name} has no {part} samples")
            if y.shape != (len(x),):
                raise DataError(f"{self.name}: {len(x)} {part} inputs but labels of shape {y.shape}")
            if y.min() < 0 or y.max() >= self.num_classes:
                raise DataError(
                    f"{self.name}: expected labels from 0 to {self.num_classes - 1}, the {part} part has "
                    f"{y.min()} to {y.max()}"
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: training samples are {self.x_train.shape[1:]}, test samples {self.x_test.shape[1:]}"
            )
        if self.groups is not None and self.groups.shape != self.y_train.shape:
            raise DataError(f"{self.name}: {len(self.y_train)} training samples but {len(self.groups)} groups")

    def describe(self) -> dict[str, Any]:
        """Describe the data set for reports."""
        return {
            "name": self.name,
            "train": len(self.y_train),
            "test": len(self.y_test),
            "classes": self.num_classes,
            "shape": list(self.x_train.shape[1:]),
            "dtype": str(self.x_train.dtype),
            "groups": None if self.groups is None else len(np.unique(self.groups)),
        }


def as_labels(values: Array, where: str) -> NDArray[np.int64]:
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(f"{where}: expected one integer per sample, got {values.dtype} {values.shape}")
    return values.astype(np.int64)


def check_images(values: Array, shape: tuple[int, ...], where: str) -> Array:
    if values.dtype != np.uint8 or values.shape[1:] != shape:
        raise DataError(f"{where}: expected uint8 images of {shape}, got {values.dtype} {values.shape[1:]}")
    return values
