"""Read CIFAR-10: the *binary* version, or lossless WebP mosaics.

Binary: `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`; a record is one byte, the label, then 32×32 red,
green and blue bytes. Mosaics: `train_NN.webp` and `test_NN.webp`, each a grid of 32×32 tiles read row by row, and
`labels.npz` with `y_train` and `y_test`. The version "for Python" is pickled, which could run code: it is not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_runtime.data.archive import read_arrays
from edge_runtime.data.input_adapter import Array
from federation.errors import DataError
from simulation.datasets.dataset import Dataset, Progress, as_labels

_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE
_LABELS = "labels.npz"
_BATCHES = ("data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin")
_TEST = "test_batch.bin"
_PICKLED = "data_batch_1"
MARKERS = (_BATCHES[0], _LABELS, _PICKLED)


def read_cifar10(folder: Path, progress: Progress) -> Dataset:
    if (folder / _BATCHES[0]).is_file():
        return _read_binary(folder, progress)
    if (folder / _LABELS).is_file():
        return _read_mosaics(folder, progress)
    raise DataError(
        f"{folder} has the version of CIFAR-10 that is pickled, which is not read because it could run code; "
        "expected the binary version (data_batch_1.bin)"
    )


def _read_binary(folder: Path, progress: Progress) -> Dataset:
    parts = []
    for number, name in enumerate((*_BATCHES, _TEST)):
        progress(name, number, 6)
        parts.append(_read_batch(folder / name))
    records = np.concatenate(parts[:-1])
    return Dataset("cifar10", *_split(records), *_split(parts[-1]), 10)


def _read_batch(path: Path) -> Array:
    try:
        size = path.stat().st_size
        if size == 0 or size % _RECORD:
            raise DataError(f"{path} has {size} bytes, expected records of {_RECORD}")
        return np.fromfile(path, np.uint8).reshape(-1, _RECORD)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _split(records: Array) -> tuple[Array, Array]:
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE), records[:, 0].astype(np.int64)


def _read_mosaics(folder: Path, progress: Progress) -> Dataset:
    y_train, y_test = read_arrays(folder / _LABELS, str(folder / _LABELS), ["y_train", "y_test"])
    files = {part: sorted(folder.glob(f"{part}_*.webp")) for part in ("train", "test")}
    if not all(files.values()):
        raise DataError(f"{folder} has labels.npz but not all mosaics, expected train_00.webp, … and test_00.webp, …")
    tiles: dict[str, list[Array]] = {"train": [], "test": []}
    every = [(part, file) for part, some in files.items() for file in some]
    for number, (part, file) in enumerate(every):
        progress(file.name, number, len(every))
        tiles[part].append(_read_tiles(file))
    labels = [as_labels(y, str(folder / _LABELS)) for y in (y_train, y_test)]
    x_train, x_test = (np.concatenate(tiles[part]) for part in tiles)
    return Dataset("cifar10", x_train, labels[0], x_test, labels[1], 10)


def _read_tiles(file: Path) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file, formats=["WEBP"]) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise DataError(f"cannot read {file}: {str(error).splitlines()[0]}") from None
    rows, columns = (length // _SIDE for length in pixels.shape[:2])
    if pixels.shape != (rows * _SIDE, columns * _SIDE, 3):
        raise DataError(f"{file} is {pixels.shape[1]}×{pixels.shape[0]} pixels, expected a grid of 32×32 tiles")
    grid = pixels.reshape(rows, _SIDE, columns, _SIDE, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3)).reshape(-1, 3, _SIDE, _SIDE)
