"""Dropout masks and other random numbers from a seed the device supplies.

ONNX fixes the seed of its random operators when the graph is written. A device must be able to repeat or change it,
so the mask is computed: element (row, column) of dropout number k is a hash of (seed, k, row, column). Standard integer
operators that wrap around give the same mask on every runtime; `reference_mask` is the same function in numpy.

    mix(h)     = h * A; h ^= h >> 15; h * B; h ^= h >> 13; h * A        (32 bits)
    start      = mix(seed + k * C), other = mix(~start)          (so that seeds in a row have unrelated masks)
    row_r      = mix(start + r), column_c = mix(other + c)
    keep       = (row_r ^ column_c) * A, xor-shifted once, times B, as a signed number >= threshold

A number that is uniform in [0, 1) is the same hash as an unsigned number over 2^32, its upper 24 bits; a normal one
comes of two of them (Box and Muller). Each operator that draws has a number k, dropout or not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.graph import attributes, optional_input

SEED_INPUT = "seed"
SEEDED = ("Dropout", "RandomNormalLike", "RandomUniformLike")  # operators that draw from the device's seed
SECOND = 1 << 20  # added to a number: the second hash that a normal number takes
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


@lowering("RandomNormalLike", "RandomUniformLike")
def random_forward(context: Context, node: NodeProto) -> None:
    """Draw numbers of the shape of the input."""
    like, y = node.input[0], node.output[0]
    number, options = context.dropout_numbers[y], attributes(node)
    uniform = write_uniform(context, like, number)
    if node.op_type == "RandomUniformLike":
        low, high = float(options.get("low", 0.0)), float(options.get("high", 1.0))
        context.ops("Add", [y], context.op("Mul", uniform, high - low), low)
        return
    logarithm = context.op("Log", context.op("Sub", 1.0, uniform))
    radius = context.op("Sqrt", context.op("Mul", logarithm, -2.0))
    angle = context.op("Mul", write_uniform(context, like, number + SECOND), 2.0 * math.pi)
    normal = context.op("Mul", radius, context.op("Cos", angle))
    scaled = context.op("Mul", normal, float(options.get("scale", 1.0)))
    context.ops("Add", [y], scaled, float(options.get("mean", 0.0)))


@rule("RandomNormalLike", "RandomUniformLike")
def random(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """What is drawn depends on the shape of the input, not on its values."""
    return [None]


def mean_of_random(node: NodeProto) -> float:
    """What an operator that draws gives where nothing is drawn: in frozen layers and in the finished model."""
    options = attributes(node)
    if node.op_type == "RandomNormalLike":
        return float(options.get("mean", 0.0))
    return (float(options.get("low", 0.0)) + float(options.get("high", 1.0))) / 2


def write_uniform(context: Context, name: str, number: int) -> str:
    """A number in [0, 1) for each element of value `name`."""
    signed = context.op("BitwiseXor", _write_hash(context, name, number), _int32(context, 1 << 31))
    unsigned = context.op("Cast", signed, to=_UINT32)
    upper = context.op("BitShift", unsigned, context.constant(8, np.uint32), direction="RIGHT")
    uniform = context.op("Mul", context.op("Cast", upper, to=TensorProto.FLOAT), 2.0**-24)
    return context.reshape_like(uniform, name)


def write_mask(context: Context, name: str, rate: float, number: int) -> str:
    """0 or 1 / (1 - rate) for each element of value `name`."""
    both = _write_hash(context, name, number)
    drop = context.op("Less", both, context.constant(threshold(rate), np.int32))
    mask = context.op("Where", drop, 0.0, 1.0 / (1.0 - rate))
    return context.reshape_like(mask, name)


def _write_hash(context: Context, name: str, number: int) -> str:
    """32 random bits for each element of value `name`, in rows of its last axis."""
    seed = context.op("Cast", SEED_INPUT, to=_INT32)
    start = _mix(context, context.op("Add", seed, _int32(context, number * _C)))
    other = _mix(context, context.op("BitwiseNot", start))
    columns = _columns(context, name)
    size = context.op("Size", name)
    row = _mix(context, context.op("Add", _count(context, context.op("Div", size, columns)), start))
    column = _mix(context, context.op("Add", _count(context, columns), other))
    both = context.op("BitwiseXor", context.op("Unsqueeze", row, [1]), column)
    both = _shift_xor(context, context.op("Mul", both, _int32(context, _A)), 15)
    return context.op("Mul", both, _int32(context, _B))


def reference_mask(seed: int, number: int, shape: tuple[int, ...], rate: float) -> np.ndarray:
    """The mask of dropout `number` in numpy: what a training graph with this seed multiplies by."""
    drop = _reference_hash(seed, number, shape).view(np.int32) < threshold(rate)
    return np.asarray(np.where(drop, np.float32(0.0), np.float32(1.0 / (1.0 - rate))), np.float32)


def reference_uniform(seed: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform numbers of operator `number` in numpy."""
    upper = (_reference_hash(seed, number, shape) ^ np.uint32(1 << 31)) >> np.uint32(8)
    return np.asarray(upper.astype(np.float32) * np.float32(2.0**-24))


def reference_normal(seed: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers of operator `number` in numpy."""
    first, second = (reference_uniform(seed, n, shape).astype(np.float64) for n in (number, number + SECOND))
    return np.asarray(np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * np.pi * second), np.float32)


def _reference_hash(seed: int, number: int, shape: tuple[int, ...]) -> NDArray[np.uint32]:
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
    both *= np.uint32(_B)
    return np.asarray(both.reshape(shape), np.uint32)
