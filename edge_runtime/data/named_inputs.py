"""Samples of a model with several inputs or labels: an array for each, read where it lies, packed batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array, InputFit, Rows, check_finite, check_range, fit_rows, shape_text
from federation.errors import DataError
from federation.inputs import NamedInput, columns, pack, row_dtype, row_size
from federation.manifest import Manifest
from federation.preprocessing import PLAIN, Preprocessing

Inputs = Rows | Mapping[str, Rows]  # of a model with one input, of one with several


class PackedRows:
    """Rows that are put together of several arrays when they are asked for."""

    def __init__(self, inputs: Sequence[NamedInput], arrays: Mapping[str, Rows], fits: Mapping[str, InputFit]) -> None:
        self._inputs = inputs
        self.arrays = arrays
        self._fits = fits
        self.shape = (arrays[inputs[0].name].shape[0], row_size(inputs))
        self.dtype: np.dtype[Any] = np.dtype(row_dtype(inputs))

    def __getitem__(self, indices: Any, /) -> Array:
        return pack(
            self._inputs, {name: fit.convert(_some(self.arrays[name], indices)) for name, fit in self._fits.items()}
        )


def _some(rows: Rows, indices: Any) -> Array:
    return np.asarray(rows[indices])


def pack_inputs(name: str, given: Inputs, manifest: Manifest) -> Rows:
    """Make rows of what a model with several inputs takes: arrays by name, or one array of whole rows; check them."""
    assert manifest.inputs is not None
    return pack_named(name, given, manifest.inputs, manifest)


def pack_named(
    name: str,
    given: Inputs,
    inputs: Sequence[NamedInput],
    manifest: Manifest,
    what: str = "inputs",
    own: Preprocessing = PLAIN,
) -> PackedRows:
    """Make rows of arrays by name, or of one array of whole rows; `what` they are stands in messages."""
    arrays = given if isinstance(given, Mapping) else _apart(name, given, inputs, manifest)
    wanted = [item.name for item in inputs]
    if missing := [item for item in wanted if item not in arrays]:
        raise DataError(
            f"{name} has no {', '.join(missing)}; the model {manifest.name!r} takes the {what} {', '.join(wanted)}"
        )
    counts = {item: arrays[item].shape[0] if arrays[item].shape else 0 for item in wanted}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{count} of {item}" for item, count in counts.items())
        raise DataError(f"{name}: expected as many samples of every {what[:-1]}, got {shown}")
    fits = {item.name: _fit(f"{name}: {item.name}", arrays[item.name], item, what, own) for item in inputs}
    return PackedRows(inputs, arrays, fits)


def _fit(name: str, rows: Rows, item: NamedInput, what: str, own: Preprocessing) -> InputFit:
    takes, number = "the model takes", "label" if what == "labels" else "token id"
    fit = fit_rows(name, rows, item, takes, own)
    if item.dtype == "float32":
        check_finite(name, rows, fit)
    else:
        check_range(name, rows, item.limits, "the value" if item.vocabulary is None else number, takes)
    return fit


def _apart(name: str, rows: Rows, inputs: Sequence[NamedInput], manifest: Manifest) -> dict[str, Rows]:
    """Take whole rows apart: a table, or a file of samples as the model takes them."""
    if rows.shape[1:] != (row_size(inputs),):
        expected = " and ".join(f"{item.name} ({item.size})" for item in inputs)
        raise DataError(
            f"{name} has samples of {shape_text(rows.shape[1:])}, the model {manifest.name!r} takes {expected}: "
            f"expected arrays of these names, or {row_size(inputs)} numbers a sample"
        )
    whole: NDArray[Any] = np.asarray(rows)
    if whole.dtype.kind == "f" and any(item.dtype != "float32" for item in inputs):
        return {item.name: _column(name, whole[:, columns(inputs)[item.name]], item) for item in inputs}
    return {item.name: whole[:, where] for item, where in zip(inputs, columns(inputs).values())}


def _column(name: str, values: Array, item: NamedInput) -> Rows:
    if item.dtype == "float32":
        return values
    numbers = np.rint(values)
    if not np.array_equal(numbers, values):
        raise DataError(f"{name}: {item.name}: expected whole numbers")
    return numbers.astype(np.int64)
