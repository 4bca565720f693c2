"""The weights file of a bundle: safetensors whose data section IS the flat vector of the ParameterSpace.

The safetensors library sorts tensors by name; here the order is the space's, so that a layer is one range of bytes
that can be served, mapped or replaced without touching the rest. Any safetensors reader can open the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from federation.errors import BundleError
from federation.space import ParameterSpace, Vector

ALIGNMENT = 64


def header(space: ParameterSpace) -> bytes:
    """Everything in front of the data: eight bytes of length, then JSON padded with blanks."""
    entries = {}
    for parameter in space:
        where = space.slice_of(parameter.name)
        offsets = [4 * where.start, 4 * where.stop]
        entries[parameter.name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def places(space: ParameterSpace) -> dict[str, tuple[int, int]]:
    """(offset, length) in bytes of every parameter in the file."""
    start = len(header(space))
    found = {}
    for parameter in space:
        where = space.slice_of(parameter.name)
        found[parameter.name] = (start + 4 * where.start, 4 * parameter.size)
    return found


def write_weights(path: Path, space: ParameterSpace, vector: Vector) -> None:
    """Write the file and make sure it is on disk."""
    if vector.shape != (space.size,) or vector.dtype != np.float32:
        raise BundleError(f"expected {space.size} float32 weights, got {vector.dtype} {vector.shape}")
    with path.open("wb") as file:
        file.write(header(space))
        file.write(np.ascontiguousarray(vector, "<f4").data)
        file.flush()
        os.fsync(file.fileno())


def map_weights(path: Path, space: ParameterSpace) -> Vector:
    """The flat vector, mapped read-only: nothing is read before it is used."""
    expected = header(space)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            found = file.read(len(expected))
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None
    if found != expected or size != len(expected) + 4 * space.size:
        raise BundleError(f"{path} does not hold the weights that the manifest describes")
    if space.size == 0:
        return np.zeros(0, np.float32)
    return np.memmap(path, np.dtype("<f4"), "r", offset=len(expected), shape=(space.size,))
