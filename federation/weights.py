"""The weights file of a bundle: safetensors whose data section IS the flat vector of the ParameterSpace.

The safetensors library sorts tensors by name; here the order is the space's, so that a layer is one range of bytes
that can be served, mapped or replaced without touching the rest. Any safetensors reader can open the file.
"""

from __future__ import annotations

import json

from federation.space import ParameterSpace

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
