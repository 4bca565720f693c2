"""Several tensors as one row of numbers per sample.

What crosses a boundary is one tensor for a device: it stores, reads and shuffles rows. Where more than one crosses (a
skip connection, a mask, the states of a recurrence), the piece in front ends with nodes that write them side by side
into one row, and the piece behind begins with nodes that take the row apart. Numbers that a device may store as float16
come back exactly: an integer travels as three digits of eleven bits each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from model_export.graph import Emitter, Graph, Shape

DIGITS, BASE = 3, 2048
LARGEST = 2**31  # of an integer that crosses; three digits hold more
_EXACT = (np.float32, np.float16)


def can_travel(graph: Graph, name: str) -> bool:
    """Tell whether a device can store a value sample by sample: one dimension is the batch, none else follows it."""
    dtype = graph.dtypes[name]
    known = dtype.kind in "biu" or dtype in _EXACT
    return (
        known and graph.shapes[name].count(None) == 1 and 0 not in graph.shapes[name] and name not in graph.unstorable
    )


def is_plain(graph: Graph, names: Sequence[str]) -> bool:
    """Tell whether this is one tensor that needs no packing."""
    name = names[0]
    return len(names) == 1 and graph.dtypes[name] == np.float32 and graph.shapes[name][:1] == (None,)


def row_size(graph: Graph, names: Sequence[str]) -> int:
    """Count the numbers of a row that has these values."""
    return sum(_columns(graph.shapes[name], graph.dtypes[name]) for name in names)


def sample_shape(graph: Graph, name: str) -> tuple[int, ...]:
    """Return the shape of a value for one sample."""
    return tuple(dim for dim in graph.shapes[name] if dim is not None)


def make_row(graph: Graph, names: Sequence[str]) -> str:
    """Name the value that crosses: the only one, or a row of several, which the graph then knows."""
    if is_plain(graph, names):
        return names[0]
    row = f"row:{names[-1]}"
    graph.shapes[row] = (None, row_size(graph, names))
    graph.dtypes[row] = np.dtype(np.float32)
    return row


def pack_nodes(graph: Graph, names: Sequence[str], row: str) -> list[NodeProto]:
    """Write values side by side."""
    if row == names[0]:
        return []
    writer = _Writer(graph, f"pack:{row}")
    pieces = [_flatten(writer, name) for name in names]
    writer.op("Concat", *pieces, axis=1, shape=graph.shapes[row], result=row)
    return writer.nodes


def unpack_nodes(graph: Graph, row: str, names: Sequence[str]) -> list[NodeProto]:
    """Take a row apart; the values get their own names."""
    if row == names[0]:
        return []
    writer = _Writer(graph, f"unpack:{row}")
    start = 0
    for name in names:
        size = _columns(graph.shapes[name], graph.dtypes[name])
        piece = writer.op("Slice", row, [start], [start + size], [1], shape=(None, size))
        _restore(writer, piece, name)
        start += size
    return writer.nodes


def pack_arrays(values: Sequence[np.ndarray], axes: Sequence[int]) -> np.ndarray:
    """Do what `pack_nodes` does; `axes` says which dimension of each value is the batch."""
    rows = []
    for value, axis in zip(values, axes, strict=True):
        flat = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
        if value.dtype.kind in "iu":
            digits, rest = [], flat.astype(np.int64)
            for _ in range(DIGITS - 1):
                digits.append(rest % BASE)
                rest = rest // BASE
            flat = np.concatenate([*digits, rest], 1)
        rows.append(flat.astype(np.float32))
    return np.concatenate(rows, 1)


def split_row(row: np.ndarray, parts: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
    """Cut a row into the columns of its values, each given by type and shape of one sample; digits stay digits."""
    sizes = [_columns((None, *shape), np.dtype(dtype)) for dtype, shape in parts]
    return np.split(row, np.cumsum(sizes)[:-1], axis=1)


def _columns(shape: Shape, dtype: np.dtype[Any]) -> int:
    size = math.prod(dim for dim in shape if dim is not None)
    return size * (DIGITS if dtype.kind in "iu" else 1)


def _flatten(writer: _Writer, name: str) -> str:
    graph = writer.graph
    shape, dtype = graph.shapes[name], graph.dtypes[name]
    axis, size = shape.index(None), math.prod(sample_shape(graph, name))
    value = name
    if axis:
        order = [axis, *(i for i in range(len(shape)) if i != axis)]
        value = writer.op("Transpose", value, perm=order, shape=tuple(shape[i] for i in order), dtype=dtype)
    value = writer.op("Reshape", value, [-1, size], shape=(None, size), dtype=dtype)
    if dtype.kind in "iu":
        value = writer.op("Cast", value, to=TensorProto.INT64, shape=(None, size), dtype=np.int64)
        digits = []
        for _ in range(DIGITS - 1):
            digits.append(writer.op("Mod", value, BASE, shape=(None, size), dtype=np.int64))
            less = writer.op("Sub", value, digits[-1], shape=(None, size), dtype=np.int64)
            value = writer.op("Div", less, BASE, shape=(None, size), dtype=np.int64)
        size *= DIGITS
        value = writer.op("Concat", *digits, value, axis=1, shape=(None, size), dtype=np.int64)
    return value if dtype == np.float32 else writer.op("Cast", value, to=TensorProto.FLOAT, shape=(None, size))


def _restore(writer: _Writer, value: str, name: str) -> None:
    graph = writer.graph
    shape, dtype = graph.shapes[name], graph.dtypes[name]
    axis, own = shape.index(None), sample_shape(graph, name)
    if dtype.kind in "iu":
        size = math.prod(own)
        value = writer.op("Reshape", value, [-1, DIGITS, size], shape=(None, DIGITS, size))
        value = writer.op("Cast", value, to=TensorProto.INT64, shape=(None, DIGITS, size), dtype=np.int64)
        weights = np.array([[BASE**place] for place in range(DIGITS)], np.int64)
        value = writer.op("Mul", value, weights, shape=(None, DIGITS, size), dtype=np.int64)
        value = writer.op("ReduceSum", value, [1], keepdims=0, shape=(None, size), dtype=np.int64)
    if dtype != (np.int64 if dtype.kind in "iu" else np.float32):
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        value = writer.op("Cast", value, to=kind, shape=graph.shapes.get(value, ()), dtype=dtype)
    plain = (None, *own)
    value = writer.op("Reshape", value, [-1, *own], shape=plain, dtype=dtype, result=None if axis else name)
    if axis:
        back = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        writer.op("Transpose", value, perm=back, shape=shape, dtype=dtype, result=name)


class _Writer:
    """Writes nodes, and tells the graph about their constants, types and shapes."""

    def __init__(self, graph: Graph, prefix: str) -> None:
        self.graph = graph
        self._emitter = Emitter(f"{prefix}:")
        self._scope = prefix
        self.nodes = self._emitter.nodes

    def op(
        self, op_type: str, *inputs: Any, shape: Shape, dtype: Any = np.float32, result: str | None = None, **attrs: Any
    ) -> str:
        with self._emitter.scope(self._scope):
            (name,) = self._emitter.ops(op_type, 1 if result is None else [result], *inputs, **attrs)
        for constant, value in self._emitter.constants.items():
            self.graph.constants[constant] = value
            self.graph.shapes[constant], self.graph.dtypes[constant] = value.shape, value.dtype
        if result is None:
            self.graph.shapes[name], self.graph.dtypes[name] = shape, np.dtype(dtype)
        return name
