"""Read scikit-learn's 8×8 digits, which come along with this package: 1,437 for training and 360 for testing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_runtime.data.archive import read_archive
from edge_runtime.data.prng import shuffled
from simulation.datasets.dataset import Dataset, as_labels

DIGITS = Path(__file__).with_name("digits.npz")
_TEST = 360  # of 1,797, drawn once and for all


def read_digits() -> Dataset:
    path = DIGITS
    x, y, _ = read_archive(path, str(path))
    images = (np.asarray(x, np.float32) / 16)[:, None]  # brightness goes from 0 to 16
    labels = as_labels(np.asarray(y), str(path))
    order = shuffled(len(labels), seed=0, epoch=0)
    test, train = np.sort(order[:_TEST]), np.sort(order[_TEST:])
    return Dataset("digits", images[train], labels[train], images[test], labels[test], 10)
