"""The weights file of a bundle: safetensors whose data section IS the flat vector of the ParameterSpace.

The safetensors library sorts tensors by name; here the order is the space's, so that a layer is one range of bytes
that can be served, mapped or replaced without touching the rest. Any safetensors reader can open the file.
"""

from __future__ import annotations

from federation.safetensors_codec import encode_header
from federation.space import ParameterSpace

ALIGNMENT = 64


def header(space: ParameterSpace) -> bytes:
    """Write everything in front of the data."""
    return encode_header(((parameter.name, parameter.shape) for parameter in space), ALIGNMENT)


def places(space: ParameterSpace) -> dict[str, tuple[int, int]]:
    """Find the (offset, length) in bytes of every parameter in the file."""
    start = len(header(space))
    found = {}
    for parameter in space:
        where = space.slice_of(parameter.name)
        found[parameter.name] = (start + 4 * where.start, 4 * parameter.size)
    return found
