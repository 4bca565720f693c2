"""How stored inputs become what a model takes, and what cannot: shape, type, scale, values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from federation.errors import DataError, EmptyData
from federation.inputs import NamedInput
from federation.manifest import Manifest, TensorSpec
from federation.preprocessing import PLAIN, Preprocessing

Array = NDArray[Any]
_CHUNK_BYTES = 4 << 20


class Rows(Protocol):
    """Stored samples: an array, mapped or not, or something that makes the rows it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, indices: Any, /) -> Any: ...


@dataclass(frozen=True)
class InputFit:
    """From a stored sample to an input of the model."""

    stored: tuple[int, ...]
    stored_dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    channels_last: bool = False  # stored H×W×C, the model takes C×H×W
    preprocessing: Preprocessing = PLAIN  # the bundle's

    @property
    def scaled(self) -> bool:
        """Bytes are brightness from 0 to 255; a model of floats takes 0 to 1, unless its bundle says otherwise."""
        return self.stored_dtype == np.uint8 and self.dtype.kind == "f" and self.preprocessing.scale is None

    def convert(self, raw: Array) -> Array:
        """Make inputs of the model: contiguous, in memory of their own unless nothing had to change."""
        moved = np.moveaxis(raw, -1, 1) if self.channels_last else raw.reshape(len(raw), *self.shape)
        if self.scaled:  # the type is stated: numpy 1 would compute in float16
            bright = np.divide(moved, 255, out=np.empty(moved.shape, self.dtype), dtype=self.dtype, casting="unsafe")
            return self.preprocessing.normalise(bright)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found by looking at the result
            plain = np.ascontiguousarray(moved, self.dtype)
            scale = self.preprocessing.scale
            return self.preprocessing.normalise(plain if scale is None else plain * self.dtype.type(scale))

    def describe(self) -> str:
        """Describe it for a report: uint8 28×28 → float32 1×28×28, divided by 255."""
        stored = f"{self.stored_dtype} {shape_text(self.stored)}"
        taken = f"{self.dtype} {shape_text(self.shape)}"
        parts = [stored if stored == taken else f"{stored} → {taken}", "divided by 255" if self.scaled else ""]
        return ", ".join(part for part in (*parts, self.preprocessing.describe()) if part)


def shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "single numbers"


def same_but_for_ones(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return [n for n in left if n != 1] == [n for n in right if n != 1]


def fit_inputs(name: str, rows: Rows, manifest: Manifest) -> InputFit:
    """Find how these samples fit the model; a DataError shows what they are and what it takes."""
    takes = f"the model {manifest.name!r} takes"
    return fit_rows(name, rows, manifest.input, takes, manifest.preprocessing or PLAIN)


def fit_rows(name: str, rows: Rows, spec: TensorSpec | NamedInput, takes: str, own: Preprocessing) -> InputFit:
    """Find how samples fit one tensor."""
    wanted, dtype = spec.shape, np.dtype(spec.dtype)
    if not rows.shape:
        raise DataError(f"{name}: the inputs are a single number, expected an array whose first axis counts samples")
    if rows.shape[0] == 0:
        raise EmptyData(f"{name} has no samples")
    stored = rows.shape[1:]
    has = f"{name} has samples of {shape_text(stored)} ({rows.dtype})"
    takes = f"{takes} {shape_text(wanted)} ({dtype})"
    if rows.dtype.kind not in "biuf" or dtype.kind not in "biuf":
        raise DataError(f"{has}, {takes}: expected numbers")
    if dtype.kind in "iu" and rows.dtype.kind not in ("biu" if isinstance(spec, NamedInput) else "iu"):
        raise DataError(f"{has}, {takes}: expected integers")
    if stored == wanted or same_but_for_ones(stored, wanted) or stored == (math.prod(wanted),):
        return InputFit(stored, rows.dtype, wanted, dtype, preprocessing=own)
    if len(wanted) == 3 and stored == (*wanted[1:], wanted[0]):
        return InputFit(stored, rows.dtype, wanted, dtype, channels_last=True, preprocessing=own)
    raise DataError(f"{has}, {takes}")


def check_inputs(name: str, rows: Rows, fit: InputFit, manifest: Manifest) -> None:
    """Look at every stored value once, a few megabytes at a time."""
    if fit.dtype.kind == "f":
        check_finite(name, rows, fit)
        return
    limits = np.iinfo(fit.dtype)
    tokens = manifest.vocabulary
    bounds = (0, tokens - 1) if tokens is not None else (int(limits.min), int(limits.max))
    check_range(name, rows, bounds, "the value" if tokens is None else "token id", f"the model {manifest.name!r} takes")


def check_finite(name: str, rows: Rows, fit: InputFit) -> None:
    """Refuse values that are no finite numbers of the model's type."""
    if fit.stored_dtype.itemsize == 1 or (fit.stored_dtype.kind != "f" and fit.dtype.itemsize >= 4):
        return  # no byte is too large for any float, no integer for one of 32 bits
    for start, chunk in chunks(rows):
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(chunk.astype(fit.dtype))
        if bad.any():
            row, value = first_bad(chunk, bad)
            raise DataError(
                f"{name}: sample {start + row} has the value {value}, the inputs of a model must be finite "
                f"numbers of type {fit.dtype}"
            )


def check_range(name: str, rows: Rows, bounds: tuple[int, int], what: str, takes: str) -> None:
    """Refuse whole numbers outside of bounds, which are included."""
    lowest, highest = bounds
    for start, chunk in chunks(rows):
        bad = (chunk < lowest) | (chunk > highest)
        if bad.any():
            row, value = first_bad(chunk, bad)
            raise DataError(f"{name}: sample {start + row} has {what} {value}, {takes} {lowest} to {highest}")


def chunks(rows: Rows) -> Iterator[tuple[int, Array]]:
    """Yield (number of the first sample, some samples) until all were seen."""
    each = max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize)
    step = max(1, _CHUNK_BYTES // each)
    for start in range(0, rows.shape[0], step):
        yield start, np.asarray(rows[start : start + step])


def first_bad(chunk: Array, bad: NDArray[np.bool_]) -> tuple[int, Any]:
    """Find the first sample with a bad value, and that value."""
    flat = bad.reshape(len(bad), -1)
    row = int(flat.any(1).argmax())
    return row, chunk.reshape(flat.shape)[row, flat[row].argmax()].item()
