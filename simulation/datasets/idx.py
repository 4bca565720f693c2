"""Read idx files, the format of MNIST and Fashion-MNIST: two zeros, type, number of axes, big-endian sizes, bytes.

Raw or compressed with gzip. A writer's number for each training digit of MNIST is taken from `writers_qmnist.npz`
(array `writer_train`), if it lies there.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np

from edge_runtime.data.archive import read_arrays
from edge_runtime.data.input_adapter import Array, shape_text
from federation.errors import DataError
from simulation.datasets.dataset import Dataset, Progress, as_labels, check_images

_BYTES = 8  # the code of unsigned bytes, the only type that these data sets use
_MOST_BYTES = 1 << 30  # a header could promise anything
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MARKERS = tuple(name + ending for name in _FILES[:1] for ending in (".gz", ""))
WRITERS = "writers_qmnist.npz"


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_idx_set(name: str, folder: Path, progress: Progress) -> Dataset:
    """Read four files: images and labels, for training and for testing."""
    arrays = []
    for number, file in enumerate(_FILES):
        progress(file, number, len(_FILES))
        arrays.append(read_idx(_find(folder, file), 3 if "images" in file else 1))
    x_train, y_train, x_test, y_test = arrays
    groups = None
    if name == "mnist" and (folder / WRITERS).is_file():
        (writers,) = read_arrays(folder / WRITERS, str(folder / WRITERS), ["writer_train"])
        groups = as_labels(writers, str(folder / WRITERS))
    x_train, x_test = (check_images(x, (28, 28), str(folder))[:, None] for x in (x_train, x_test))
    labels = (as_labels(y, str(folder)) for y in (y_train, y_test))
    return Dataset(name, x_train, next(labels), x_test, next(labels), 10, groups)


def _find(folder: Path, file: str) -> Path:
    for path in (folder / f"{file}.gz", folder / file):
        if path.is_file():
            return path
    raise DataError(f"{folder} has no {file}, raw or .gz")


def read_idx(path: Path, axes: int) -> Array:
    """Read one array of bytes with so many axes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read(file, path, axes)
    except (OSError, EOFError, zlib.error) as error:  # a damaged .gz shows as any of them
        raise DataError(f"cannot read {path}: {error}") from None


def _read(file: _Readable, path: Path, axes: int) -> Array:
    header = file.read(4 + 4 * axes)
    if len(header) < 4 + 4 * axes or header[:4] != bytes((0, 0, _BYTES, axes)):
        raise DataError(f"{path}: expected an idx file of bytes with {axes} axes, it begins with {header[:4].hex(' ')}")
    shape = struct.unpack(f">{axes}I", header[4:])
    size = math.prod(shape)
    if size > _MOST_BYTES:
        raise DataError(f"{path} says it has {size} bytes, expected at most {_MOST_BYTES}")
    body = file.read(size + 1)  # one more than promised: too long is as wrong as too short
    if len(body) != size:
        has = "more" if len(body) > size else len(body)
        raise DataError(f"{path} says it is {shape_text(shape)} bytes, but has {has}")
    return np.array(np.frombuffer(body, np.uint8).reshape(shape))  # a copy: PyTorch wants to be able to write
