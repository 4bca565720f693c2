"""Several values in one tensor: what crosses a boundary is one row of float32 per sample, whatever it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from model_export.graph import Emitter, Shape

# By name: float32 values whose batch comes first; their other sizes are known.
Values = Mapping[str, Shape]


def packed_size(values: Values) -> int:
    """Count the numbers of one sample."""
    return sum(_sizes(values))


def pack(emitter: Emitter, values: Values) -> str:
    """Write nodes that lay values side by side."""
    rows = [emitter.op("Reshape", name, [-1, size]) for name, size in zip(values, _sizes(values), strict=True)]
    return emitter.op("Concat", *rows, axis=1)


def unpack(emitter: Emitter, packed: str, values: Values) -> None:
    """Write nodes that give the values their own names and shapes again."""
    rows = emitter.ops("Split", len(values), packed, _sizes(values), axis=1)
    for row, (name, shape) in zip(rows, values.items(), strict=True):
        emitter.ops("Reshape", [name], row, np.array([-1, *shape[1:]], np.int64))


def _sizes(values: Values) -> list[int]:
    return [math.prod(dim or 0 for dim in shape[1:]) for shape in values.values()]
