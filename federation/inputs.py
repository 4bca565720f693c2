"""Models that take several inputs: each by name, and all of them as one row of numbers per sample.

A device stores, shuffles and sends rows through a model as it does with a single input; the first graph takes a row
apart. The row is int64 if every input is a whole number or a truth value, else float32, in which whole numbers up to
2^24 are exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import BundleError

DTYPES = ("float32", "int64", "bool")
EXACT = 1 << 24  # whole numbers up to this one have a float32 of their own
MOST_INPUTS = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


@dataclass(frozen=True)
class NamedInput:
    """One of a model's inputs: its name, and type and shape for one sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    vocabulary: int | None = None  # int64: ids are below this number

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BundleError(f"input {self.name[:100]!r}: expected a name of letters, digits and _ . -")
        if self.dtype not in DTYPES:
            raise BundleError(f"input {self.name!r}: expected the type {', '.join(DTYPES)}, got {self.dtype!r}")
        if min(self.shape, default=1) < 1:
            raise BundleError(f"input {self.name!r}: expected positive sizes, got {self.shape}")
        if self.vocabulary is not None and (self.dtype != "int64" or self.vocabulary < 1):
            raise BundleError(f"input {self.name!r}: expected int64 and a vocabulary of at least 1 for token ids")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest number of an input of whole numbers."""
        if self.dtype == "bool":
            return 0, 1
        return (-EXACT, EXACT) if self.vocabulary is None else (0, self.vocabulary - 1)


def check_inputs(inputs: Sequence[NamedInput]) -> None:
    """Refuse inputs that cannot be one row."""
    names = [item.name for item in inputs]
    if not 1 <= len(names) <= MOST_INPUTS or len(set(names)) != len(names):
        raise BundleError(
            f"inputs: expected 1 to {MOST_INPUTS} different names, got {', '.join(names)[:200] or 'none'}"
        )
    for item in inputs:
        if row_dtype(inputs) == "float32" and (item.vocabulary or 0) > EXACT:
            raise BundleError(f"input {item.name!r}: beside inputs of floats token ids must be at most {EXACT:,}")


def row_dtype(inputs: Sequence[NamedInput]) -> str:
    """The type of the numbers in a row."""
    return "float32" if any(item.dtype == "float32" for item in inputs) else "int64"


def row_size(inputs: Sequence[NamedInput]) -> int:
    """How many numbers a row has."""
    return sum(item.size for item in inputs)


def columns(inputs: Sequence[NamedInput]) -> dict[str, slice]:
    """Where in a row each input lies."""
    ends = list(accumulate(item.size for item in inputs))
    return {item.name: slice(end - item.size, end) for item, end in zip(inputs, ends)}


def pack(inputs: Sequence[NamedInput], arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Write arrays whose first axis counts samples side by side."""
    count = len(arrays[inputs[0].name])
    row = np.empty((count, row_size(inputs)), row_dtype(inputs))
    for name, where in columns(inputs).items():
        row[:, where] = np.asarray(arrays[name]).reshape(count, -1)
    return row


def unpack(inputs: Sequence[NamedInput], row: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Take rows apart: arrays by name, in their own types and shapes."""
    return {
        item.name: row[:, where].reshape(len(row), *item.shape).astype(item.dtype, copy=False)
        for item, where in zip(inputs, columns(inputs).values())
    }
