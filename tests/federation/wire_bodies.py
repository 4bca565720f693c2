"""Small models, and bodies of updates of them, right and wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from federation.layout import layers_layout
from federation.space import Parameter, ParameterSpace, Vector
from federation.wire import CheckedUpdate, Limits, UpdateDecoder, encode_layers, read_blocks

SPACE = ParameterSpace(
    [
        [Parameter("z", "weight", (5,))],
        [Parameter("b", "weight", (2, 2)), Parameter("b.mean", "statistic", (2,)), Parameter("none", "weight", (0, 3))],
        [Parameter("a", "weight", (3,)), Parameter("s", "weight", ())],
    ]
)
VALUES = np.array([1, -2, 3, 0.5, 0, -0.25, 4, 1, 2, -8], np.float32)
TINY = ParameterSpace([[Parameter("w", "weight", (2,))], [Parameter("v", "weight", (1,))]])

GOLDEN = (
    b"\x78\x00\x00\x00\x00\x00\x00\x00"
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"v":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}            '
    b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x00\x00\x00\x3f"
)


def body(space: ParameterSpace, first_layer: int, vector: Vector, end: int | None = None) -> bytes:
    return b"".join(encode_layers(space, first_layer, vector, end=end))


def decode(
    data: bytes, space: ParameterSpace = SPACE, first_layer: int = 1, limits: Limits | None = None, chunk: int = 1 << 16
) -> CheckedUpdate:
    decoder = UpdateDecoder(layers_layout(space, first_layer), limits or Limits())
    for start in range(0, len(data), chunk):
        decoder.feed(memoryview(data)[start : start + chunk])
    return decoder.finish()


def collected(data: bytes, checked: CheckedUpdate, size: int, block: int = 1 << 16) -> Vector:
    """The flat vector of the model, nan where nothing came; blocks have to ascend."""
    vector, last = np.full(size, np.nan, np.float32), 0
    for run, values in read_blocks(io.BytesIO(data), checked.model, block):
        assert run.start >= last and run.rows == 1 and 0 < values.size == run.size <= block
        vector[run.start : run.stop] = values
        last = run.stop
    return vector


def framed(header: bytes | dict[str, Any], data: bytes = VALUES.tobytes()) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entries() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(layers_layout(SPACE, 1).header[8:])
    return found


def big_space(order: Sequence[int]) -> ParameterSpace:
    """Three layers whose parameters do not end where blocks do; names sort as `order` says."""
    sizes = [(3, 40_000), (160_000, 1), (7, 240_011)]
    names = iter(order)
    return ParameterSpace([[Parameter(f"p{next(names)}", "weight", (size,)) for size in layer] for layer in sizes])


BIG = big_space([4, 0, 5, 1, 3, 2])


BIG_VALUES = np.random.default_rng(1).standard_normal(BIG.size).astype(np.float32)


BIG_BODY = body(BIG, 0, BIG_VALUES)


BIG_SORTED = save(dict(BIG.views(BIG_VALUES)))
