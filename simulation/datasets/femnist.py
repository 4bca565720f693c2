"""Read FEMNIST: handwritten digits and letters (Caldas et al., "LEAF", 2018). The groups are the writers.

LEAF writes folders `train` and `test` of .json files with `users` and `user_data`, whose pixels are brightness from 0
to 1 in steps of 1/255: they become bytes again, exactly. Or one archive `femnist_leaf.npz` of such bytes, with the
writer's number of each sample (`w_train`). Paper is white in both, 255; a sample has ink instead, as MNIST does: 255 is
ink, 0 is paper. Networks that begin near zero do not learn from inputs that are nearly all 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.data.archive import read_arrays
from edge_runtime.data.input_adapter import Array
from federation.errors import DataError
from simulation.datasets.dataset import Dataset, Progress, as_labels, check_images

_ARCHIVE = "femnist_leaf.npz"
_CLASSES = 62  # 0-9, A-Z, a-z
_PIXELS = 28 * 28
_ROUNDING = 1e-3  # decimal fractions of 1/255 come back only nearly
MARKERS = (_ARCHIVE, "train")


def read_femnist(folder: Path, progress: Progress) -> Dataset:
    if (folder / _ARCHIVE).is_file():
        return _read_archive(folder / _ARCHIVE)
    train = _files(folder / "train")
    test = _files(folder / "test")
    writers: dict[str, int] = {}
    read: list[tuple[list[Array], list[Array], list[Array]]] = [([], [], []), ([], [], [])]
    for number, path in enumerate([*train, *test]):
        progress(path.name, number, len(train) + len(test))
        _read_json(path, writers, read[number >= len(train)])
    (x, y, w), (x_test, y_test, _) = ([np.concatenate(arrays) for arrays in part] for part in read)
    return Dataset("femnist", x, y, x_test, y_test, _CLASSES, w)


def _read_archive(path: Path) -> Dataset:
    where = str(path)
    x, y, w, x_test, y_test = read_arrays(path, where, ["x_train", "y_train", "w_train", "x_test", "y_test"])
    x, x_test = (_ink(check_images(images, (28, 28), where)[:, None]) for images in (x, x_test))
    y, w, y_test = (as_labels(labels, where) for labels in (y, w, y_test))
    return Dataset("femnist", x, y, x_test, y_test, _CLASSES, w)


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.json"))
    if not found:
        raise DataError(f"{folder} has no .json files, expected those that LEAF writes for FEMNIST")
    return found


def _read_json(path: Path, writers: dict[str, int], part: tuple[list[Array], list[Array], list[Array]]) -> None:
    try:
        users = json.loads(path.read_bytes())["user_data"]
        samples = {str(user): (data["x"], data["y"]) for user, data in users.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: expected LEAF's json, users with x and y below user_data: {_say(error)}") from None
    for user, (pixels, labels) in samples.items():
        if not labels:
            continue  # a writer whose few samples all fell into the other part
        images = _as_images(pixels, f"{path}: {user}")
        numbers = _as_numbers(labels, f"{path}: {user}")
        if len(images) != len(numbers):
            raise DataError(f"{path}: {user} has {len(images)} images but {len(numbers)} labels")
        writer = writers.setdefault(user, len(writers))
        for list_, array in zip(part, (images, numbers, np.full(len(numbers), writer, np.int64))):
            list_.append(array)


def _as_images(pixels: Any, where: str) -> Array:
    try:
        brightness = 255 * np.asarray(pixels, np.float64)
    except (ValueError, TypeError):
        raise DataError(f"{where}: expected lists of {_PIXELS} numbers") from None
    if brightness.ndim != 2 or brightness.shape[1] != _PIXELS:
        raise DataError(f"{where}: expected images of {_PIXELS} pixels, got an array of {brightness.shape}")
    whole = np.rint(brightness)
    # Written so that nan is refused as well.
    if not (np.abs(brightness - whole) <= _ROUNDING).all() or whole.min() < 0 or whole.max() > 255:
        raise DataError(f"{where}: expected brightness from 0 to 1 in steps of 1/255, as LEAF writes it")
    return _ink(whole.astype(np.uint8).reshape(-1, 1, 28, 28))


def _ink(brightness: Array) -> Array:
    return 255 - brightness


def _as_numbers(labels: Any, where: str) -> Array:
    try:
        return as_labels(np.asarray(labels), f"{where}: labels")
    except ValueError:  # lists of different lengths
        raise DataError(f"{where}: labels: expected one integer per sample") from None


def _say(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:200]
