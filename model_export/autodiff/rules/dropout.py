"""Dropout masks from a seed the device supplies.

ONNX fixes the seed of its random operators when the graph is written. A device must be able to repeat or change it,
so the mask is computed: element (row, column) of dropout number k is a hash of (seed, k, row, column). Standard integer
operators that wrap around give the same mask on every runtime; `reference_mask` is the same function in numpy.

    mix(h)     = h * A; h ^= h >> 15; h * B; h ^= h >> 13; h * A        (32 bits)
    start      = mix(seed + k * C), other = mix(~start)          (so that seeds in a row have unrelated masks)
    row_r      = mix(start + r), column_c = mix(other + c)
    keep       = (row_r ^ column_c) * A, xor-shifted once, times B, as a signed number >= threshold
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.graph import optional_input

SEED_INPUT = "seed"
_A, _B, _C = 0x2C1B3C6D, 0x297A2D39, 0x1B873593
_INT32, _UINT32 = TensorProto.INT32, TensorProto.UINT32


def dropout_rate(context: Context, node: NodeProto) -> float:
    ratio = context.static(optional_input(node, 1))
    return 0.5 if ratio is None else float(ratio)


@lowering("Dropout")
def dropout_forward(context: Context, node: NodeProto) -> None:
    """Keep what the mask of this seed keeps, scaled so that the mean stays."""
    x, y = node.input[0], node.output[0]
    rate = dropout_rate(context, node)
    mask = context.saved[y] = write_mask(context, x, rate, context.dropout_numbers[y]) if rate else None
    if mask:
        context.ops("Mul", [y], x, mask)
    else:
        context.ops("Identity", [y], x)


@rule("Dropout")
def dropout(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    mask = context.saved[node.output[0]]
    return [context.op("Mul", str(upstream[0]), mask) if mask else upstream[0]]


def threshold(rate: float) -> int:
    """Signed 32-bit numbers from here on keep an element."""
    return round(rate * 2**32) - 2**31


def _shift_xor(context: Context, value: str, bits: int) -> str:
    unsigned = context.op("Cast", value, to=_UINT32)
    shifted = context.op("BitShift", unsigned, context.constant(bits, np.uint32), direction="RIGHT")
    return context.op("BitwiseXor", value, context.op("Cast", shifted, to=_INT32))


def _int32(context: Context, number: int) -> str:
    return context.constant(np.array(number & 0xFFFFFFFF, np.uint32).view(np.int32))


def _mix(context: Context, value: str) -> str:
    value = _shift_xor(context, context.op("Mul", value, _int32(context, _A)), 15)
    value = _shift_xor(context, context.op("Mul", value, _int32(context, _B)), 13)
    return context.op("Mul", value, _int32(context, _A))


def _columns(context: Context, name: str) -> str:
    """The size of the last axis."""
    shape = context.shape(name)
    last = shape[-1] if shape else 1
    if last is None:
        return context.op("Squeeze", context.op("Shape", name, start=-1), [0])
    return context.constant(last)


def _count(context: Context, number: str) -> str:
    """0, 1, 2, ... below a number."""
    return context.op("Cast", context.op("Range", context.constant(0), number, context.constant(1)), to=_INT32)


def write_mask(context: Context, name: str, rate: float, number: int) -> str:
    """0 or 1 / (1 - rate) for each element of value `name`."""
    seed = context.op("Cast", SEED_INPUT, to=_INT32)
    start = _mix(context, context.op("Add", seed, _int32(context, number * _C)))
    other = _mix(context, context.op("BitwiseNot", start))
    columns = _columns(context, name)
    size = context.op("Size", name)
    row = _mix(context, context.op("Add", _count(context, context.op("Div", size, columns)), start))
    column = _mix(context, context.op("Add", _count(context, columns), other))
    both = context.op("BitwiseXor", context.op("Unsqueeze", row, [1]), column)
    both = _shift_xor(context, context.op("Mul", both, _int32(context, _A)), 15)
    both = context.op("Mul", both, _int32(context, _B))
    drop = context.op("Less", both, context.constant(threshold(rate), np.int32))
    mask = context.op("Where", drop, 0.0, 1.0 / (1.0 - rate))
    return context.reshape_like(mask, name)


def reference_mask(seed: int, number: int, shape: tuple[int, ...], rate: float) -> np.ndarray:
    """The mask of dropout `number` in numpy: what a training graph with this seed multiplies by."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // columns

    def mix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
        h = h * np.uint32(_A)
        h ^= h >> np.uint32(15)
        h = h * np.uint32(_B)
        h ^= h >> np.uint32(13)
        h = h * np.uint32(_A)
        return h

    start = mix(np.array([(seed + number * _C) & 0xFFFFFFFF], np.uint32))
    other = mix(~start)
    row = mix(np.arange(rows, dtype=np.uint32) + start)
    column = mix(np.arange(columns, dtype=np.uint32) + other)
    both = (row[:, None] ^ column[None, :]) * np.uint32(_A)
    both ^= both >> np.uint32(15)
    both = (both * np.uint32(_B)).view(np.int32)
    mask = np.where(both < threshold(rate), np.float32(0.0), np.float32(1.0 / (1.0 - rate)))
    return np.asarray(mask, np.float32).reshape(shape)
