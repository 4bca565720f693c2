"""Write the parts of an ONNX file as protobuf messages (onnx.proto3): a device has no package for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IR_VERSION, GRAPH, OPSETS = 1, 7, 8  # fields of a model
NODE, NAME, TENSOR, INPUT, OUTPUT = 1, 2, 5, 11, 12  # ... of a graph
DTYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6}  # of TensorProto.DataType


def field(number: int, value: bytes) -> bytes:
    """Write a field of bytes: its number, how many there are, and they."""
    return begin_field(number, len(value)) + value


def begin_field(number: int, size: int) -> bytes:
    """Write what stands in front of a field's bytes. No field that is written has a number above 15."""
    return bytes([number << 3 | 2]) + _varint(size)


def model(versions: Sequence[bytes], graph: Sequence[bytes]) -> list[bytes]:
    """Write a model in pieces, to be written one after the other: together they may be large."""
    return [*versions, begin_field(GRAPH, sum(map(len, graph))), *graph]


def node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[bytes] = (), domain: str = ""
) -> bytes:
    """Write a node of a graph; `attributes` as they are written elsewhere."""
    made = b"".join(field(1, name.encode()) for name in inputs) + b"".join(field(2, name.encode()) for name in outputs)
    made += field(4, operator.encode()) + b"".join(field(5, attribute) for attribute in attributes)
    return field(NODE, made + (field(7, domain.encode()) if domain else b""))


def tensor(name: str, value: NDArray[Any]) -> list[bytes]:
    """Write an initialiser in two pieces, of which the second has its values."""
    values = np.asarray(value, value.dtype.newbyteorder("<")).tobytes()
    made = b"".join(_number(1, size) for size in value.shape) + _number(2, DTYPES[value.dtype.name])
    made += field(8, name.encode()) + begin_field(9, len(values))
    return [begin_field(TENSOR, len(made) + len(values)) + made, values]


def output(name: str) -> bytes:
    """Write an output of a graph, whose type follows from its node."""
    return field(OUTPUT, field(1, name.encode()))


def integer(name: str, value: int) -> bytes:
    """Write an attribute that is a number."""
    return field(1, name.encode()) + _number(3, value) + b"\xa0\x01\x02"  # field 20, its type: 2


def opset(domain: str, version: int) -> bytes:
    """Write which version of a domain's operators a model has."""
    return field(OPSETS, field(1, domain.encode()) + _number(2, version))


def _number(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
