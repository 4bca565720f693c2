"""Load data sets by name; say where each is looked for below `--data-dir`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from federation.errors import DataError, InputError
from simulation.datasets import cifar, femnist, idx, imdb
from simulation.datasets.dataset import Dataset, Progress, silent
from simulation.datasets.digits import read_digits


@dataclass(frozen=True)
class DatasetSource:
    """One data set: what it is, in which folders it may lie, and by which file one knows it."""

    name: str
    summary: str
    samples: str  # of the original, for training and for testing
    expected: str  # the files, in words
    folders: tuple[str, ...]  # below the data folder, the first that is there; without any: the data folder itself
    markers: tuple[str, ...]  # any of them must be there
    read: Callable[[Path, Progress], Dataset]

    def find(self, data_dir: Path) -> Path | None:
        """Find its folder: one of the usual names below `data_dir`, or `data_dir` itself."""
        for folder in (*(data_dir / name for name in self.folders), data_dir):
            if any((folder / marker).exists() for marker in self.markers) and not self._is_of_another(folder):
                return folder
        return None

    def _is_of_another(self, folder: Path) -> bool:
        """Tell MNIST and Fashion-MNIST apart: they have the same files, and only the folder's name differs."""
        name = folder.resolve().name
        return any(name == other.name and other is not self for other in DATASETS.values())


def _read_bundled(folder: Path, progress: Progress) -> Dataset:
    return read_digits()


_SOURCES = (
    DatasetSource("digits", "8×8 digits, scikit-learn's; comes along", "1,437 + 360", "nothing", (), (), _read_bundled),
    DatasetSource(
        "mnist",
        "28×28 handwritten digits; groups: writers, if their numbers are there",
        "60,000 + 10,000",
        "train-images-idx3-ubyte and three more, raw or .gz (and writers_qmnist.npz)",
        ("mnist", "MNIST/raw", "MNIST"),
        idx.MARKERS,
        partial(idx.read_idx_set, "mnist"),
    ),
    DatasetSource(
        "fashion_mnist",
        "28×28 pictures of clothes",
        "60,000 + 10,000",
        "train-images-idx3-ubyte and three more, raw or .gz",
        ("fashion_mnist", "FashionMNIST/raw", "fashion-mnist", "FashionMNIST"),
        idx.MARKERS,
        partial(idx.read_idx_set, "fashion_mnist"),
    ),
    DatasetSource(
        "cifar10",
        "32×32 colour photographs of ten kinds",
        "50,000 + 10,000",
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin, or labels.npz with train_NN.webp and test_NN.webp",
        ("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
        cifar.MARKERS,
        cifar.read_cifar10,
    ),
    DatasetSource(
        "femnist",
        "28×28 handwritten digits and letters; groups: writers",
        "as LEAF sampled it",
        "LEAF's folders train and test of .json files, or femnist_leaf.npz",
        ("femnist", "femnist/data"),
        femnist.MARKERS,
        femnist.read_femnist,
    ),
    DatasetSource(
        "imdb",
        "film reviews of 256 words, positive or negative; groups: films",
        "25,000 + 25,000",
        "aclImdb's folders train and test, or imdb_10k_256.npz",
        ("imdb", "aclImdb", "imdb/aclImdb"),
        imdb.MARKERS,
        imdb.read_imdb,
    ),
)
DATASETS: Mapping[str, DatasetSource] = MappingProxyType({source.name: source for source in _SOURCES})


def find_source(name: str) -> DatasetSource:
    source = DATASETS.get(name)
    if source is None:
        close = difflib.get_close_matches(name, DATASETS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"no data set named {name!r}, expected one of {', '.join(DATASETS)}{hint}")
    return source


def load_dataset(name: str, data_dir: Path | str | None = None, progress: Progress = silent) -> Dataset:
    """Read a data set into memory. `data_dir` has one folder per data set, or is the data set's own folder."""
    source = find_source(name)
    if not source.markers:
        return source.read(Path(), progress)
    if data_dir is None:
        raise DataError(f"{name} needs a data folder (--data-dir) with {source.expected}")
    place = Path(data_dir)
    if not place.is_dir():
        raise DataError(f"no such folder: {place}; expected {name} in it: {source.expected}")
    folder = source.find(place)
    if folder is None:
        raise DataError(f"{name} is neither in {place} nor in {place / name}: expected {source.expected}")
    return source.read(folder, progress)
