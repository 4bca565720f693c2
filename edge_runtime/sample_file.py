"""Samples as one file that travels: what a coordinator scores versions on, converted as the model takes it.

A safetensors file with two tensors, x and y, whose first axis counts samples. It holds numbers and no code, it is read
in place, and its header is bounded and says exactly how long the file is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import chunks, first_bad
from edge_runtime.data.samples import Samples, TrainingSamples, from_arrays
from federation.errors import DataError
from federation.manifest import Manifest
from federation.safetensors_codec import PREFIX, SafetensorsError, decode_header, encode_header, header_length

INPUTS, LABELS = "x", "y"
MOST_HEADER = 4096  # bytes
_AT_ONCE = 256  # samples that are converted together
_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "U8": "|u1", "I8": "|i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
Array = NDArray[Any]


def write_samples(samples: TrainingSamples, path: Path) -> None:
    """Write inputs and labels as the model takes them; memory does not grow with their number."""
    labels = samples.labels
    first = samples.batch(np.arange(min(1, len(samples))))[0]
    shapes = {INPUTS: (len(samples), *first.shape[1:]), LABELS: labels.shape}
    dtypes = {INPUTS: _NAMES[first.dtype], LABELS: _NAMES[labels.dtype]}
    with path.open("wb") as file:
        file.write(encode_header(shapes.items(), 8, dtypes=dtypes))
        for start in range(0, len(samples), _AT_ONCE):
            inputs = samples.batch(np.arange(start, min(start + _AT_ONCE, len(samples))))[0]
            file.write(np.ascontiguousarray(inputs, _DTYPES[dtypes[INPUTS]]).data)
        for _, some in chunks(labels):
            file.write(np.ascontiguousarray(some, _DTYPES[dtypes[LABELS]]).data)


def map_samples(path: Path) -> tuple[Array, Array]:
    """Map inputs and labels where they lie, after a check of the header; a DataError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            length = header_length(file.read(PREFIX), MOST_HEADER)
            header = decode_header(file.read(length), max_tensors=2, max_name_length=1, any_dtype=True)
    except SafetensorsError as error:
        raise DataError(f"this is no file of samples: {error}") from None
    if set(header.shapes) != {INPUTS, LABELS}:
        raise DataError(f"expected the tensors {INPUTS} and {LABELS}, found {', '.join(header.shapes) or 'none'}")
    start, size = PREFIX + length, path.stat().st_size
    if size != start + header.size:
        raise DataError(f"the header describes {start + header.size} bytes, the file has {size}")
    counts = {shape[0] if shape else 0 for shape in header.shapes.values()}
    if len(counts) != 1 or not min(counts):
        raise DataError(f"expected as many inputs as labels and at least one, got shapes {dict(header.shapes)}")

    def mapped(name: str) -> Array:
        dtype, shape = np.dtype(_DTYPES[header.dtypes[name]]), tuple(header.shapes[name])
        if 0 in shape:
            raise DataError(f"{name} has the shape {shape}; expected numbers for every sample")
        return np.memmap(path, dtype, "r", start + header.offsets[name], shape)

    return mapped(INPUTS), mapped(LABELS)


def check_samples(path: Path) -> int:
    """Check everything that does not depend on a model; return how many samples there are."""
    arrays = map_samples(path)
    for name, array in zip((INPUTS, LABELS), arrays):
        for start, chunk in chunks(array) if array.dtype.kind == "f" else ():
            bad = ~np.isfinite(chunk)
            if bad.any():
                row, value = first_bad(chunk.reshape(len(chunk), -1), bad.reshape(len(chunk), -1))
                raise DataError(f"sample {start + row} has {value} in {name}; expected finite numbers")
    return len(arrays[0])


def open_samples(path: Path, manifest: Manifest, name: str) -> Samples:
    """Open a file of samples that a model takes; `name` stands in messages. They are as it takes them already."""
    try:
        inputs, labels = map_samples(path)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from None
    if inputs.dtype != np.dtype(manifest.input.dtype):
        raise DataError(f"{name} has inputs of type {inputs.dtype}, the model takes {manifest.input.dtype}")
    taken = replace(manifest, preprocessing=None)
    return from_arrays(inputs, labels, taken, name=name, about={"stored": "safetensors, mapped"})
