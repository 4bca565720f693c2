"""Operators written out as simpler ones, for which ONNX itself has no function body.

Each expansion writes a function; what follows from shapes alone (positions, tables of sines) is computed in it, and
becomes a constant when the graph is normalised. Gradients are then those of the simpler operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from model_export.graph import Emitter, attribute, optional_input

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Types = Mapping[str, onnx.TypeProto]
Expansion = Callable[[Emitter, NodeProto, Types], str | None]


def expansion(node: NodeProto, opset: int, types: Types) -> onnx.FunctionProto | None:
    """The function that replaces a node; None if there is none, or not for its attributes."""
    write = EXPANSIONS.get(node.op_type)
    if write is None or node.domain not in ("", "ai.onnx"):
        return None
    emitter = Emitter(f"{node.op_type}.")
    result = write(emitter, node, types)
    if result is None:
        return None
    held = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
        for name, value in emitter.constants.items()
    ]
    emitter.ops("Identity", [node.output[0]], result)
    given = list(dict.fromkeys(name for name in node.input if name))
    imports = [helper.make_opsetid("", opset)]
    return helper.make_function("", node.op_type, given, list(node.output[:1]), [*held, *emitter.nodes], imports)


def _shape(types: Types, name: str) -> list[int] | None:
    """The sizes that are known, 0 where one is not; None without a rank."""
    kind = types.get(name)
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    return [dim.dim_value for dim in kind.tensor_type.shape.dim]


def _size(e: Emitter, name: str, axis: int) -> str:
    """The size of one axis, as a scalar."""
    return e.op("Gather", e.op("Shape", name), e.constant(np.array(axis, np.int64)), axis=0)


def _real(e: Emitter, value: str) -> str:
    return e.op("Cast", value, to=FLOAT)


def _range(e: Emitter, count: str) -> str:
    zero, one = (e.constant(np.array(n, np.int64)) for n in (0, 1))
    return e.op("Range", zero, count, one)


# --- GridSample


def grid_sample(e: Emitter, node: NodeProto, types: Types) -> str | None:
    """Look up the corners around each place and weigh them."""
    x, grid = node.input
    mode = str(attribute(node, "mode", "linear")).removeprefix("bi")
    if mode not in ("linear", "nearest"):
        return None
    known = _shape(types, x) or _shape(types, grid) or [0] * 4
    count = len(known) - 2
    padding, aligned = attribute(node, "padding_mode", "zeros"), bool(attribute(node, "align_corners", 0))
    corners: list[list[tuple[str, str | None, str | None]]] = []  # by axis: (place, weight, is inside)
    sizes = [_size(e, x, 2 + axis) for axis in range(count)]
    for axis in range(count):
        component = e.constant(np.array(count - 1 - axis, np.int64))
        place = _grid_place(e, e.op("Gather", grid, component, axis=-1), _real(e, sizes[axis]), padding, aligned)
        corners.append(_corners(e, place, _real(e, sizes[axis]), mode, padding == "zeros"))
    flat = e.op("Reshape", x, np.array([0, 0, -1], np.int64))
    channels = e.op("Concat", [1], e.op("Unsqueeze", _size(e, x, 1), [0]), [1], axis=0)
    total = ""
    for chosen in itertools.product(*corners):
        index = ""
        for axis, (place, _, _) in enumerate(chosen):
            index = place if not axis else e.op("Add", e.op("Mul", index, sizes[axis]), place)
        factors = [f for _, weight, inside in chosen for f in (weight, inside) if f is not None]
        row = e.op("Expand", e.op("Reshape", index, np.array([0, 1, -1], np.int64)), channels)
        value = e.op("GatherElements", flat, row, axis=2)
        if factors:
            weight = factors[0]
            for factor in factors[1:]:
                weight = e.op("Mul", weight, factor)
            value = e.op("Mul", value, e.op("Reshape", weight, np.array([0, 1, -1], np.int64)))
        total = value if not total else e.op("Add", total, value)
    head = e.op("Slice", e.op("Shape", x), [0], [2])
    tail = e.op("Slice", e.op("Shape", grid), [1], [-1])
    return e.op("Reshape", total, e.op("Concat", head, tail, axis=0))


def _grid_place(e: Emitter, coordinate: str, size: str, padding: str, aligned: bool) -> str:
    """From -1 ... 1 to a place among `size` pixels."""
    moved, last = e.op("Add", coordinate, 1.0), e.op("Sub", size, 1.0)
    if aligned:
        place = e.op("Mul", moved, e.op("Div", last, 2.0))
    else:
        place = e.op("Div", e.op("Sub", e.op("Mul", moved, size), 1.0), 2.0)
    if padding == "reflection":
        low = 0.0 if aligned else -0.5
        span = last if aligned else size
        away = e.op("Abs", e.op("Sub", place, low))
        turns = e.op("Floor", e.op("Div", away, span))
        rest = e.op("Sub", away, e.op("Mul", turns, span))
        odd = e.op("Greater", e.op("Sub", turns, e.op("Mul", e.op("Floor", e.op("Div", turns, 2.0)), 2.0)), 0.5)
        place = e.op("Add", e.op("Where", odd, e.op("Sub", span, rest), rest), low)
    return place if padding == "zeros" else e.op("Min", e.op("Max", place, 0.0), last)


def _corners(e: Emitter, place: str, size: str, mode: str, zeros: bool) -> list[tuple[str, str | None, str | None]]:
    last = e.op("Sub", size, 1.0)
    starts: list[tuple[str, str | None]]
    if mode == "nearest":
        starts = [(e.op("Round", place), None)]
    else:
        floor = e.op("Floor", place)
        part = e.op("Sub", place, floor)
        starts = [(floor, e.op("Sub", 1.0, part)), (e.op("Add", floor, 1.0), part)]
    found: list[tuple[str, str | None, str | None]] = []
    for start, weight in starts:
        inside = None
        if zeros:
            both = e.op("And", e.op("GreaterOrEqual", start, 0.0), e.op("LessOrEqual", start, last))
            inside = _real(e, both)
        kept = e.op("Cast", e.op("Min", e.op("Max", start, 0.0), last), to=INT64)
        found.append((kept, weight, inside))
    return found


# --- Fourier transforms


def _waves(e: Emitter, rows: str, columns: str, length: str) -> tuple[str, str]:
    """(cosines, sines) of 2 pi j k / length; products are taken modulo the length first, so that angles stay small."""
    j, k = e.op("Unsqueeze", _range(e, rows), [1]), e.op("Unsqueeze", _range(e, columns), [0])
    turns = e.op("Mod", e.op("Mul", j, k), length)
    angle = e.op("Div", e.op("Mul", _real(e, turns), 2.0 * math.pi), _real(e, length))
    return e.op("Cos", angle), e.op("Sin", angle)


def _bins(e: Emitter, length: str, onesided: bool) -> str:
    two, one = (e.constant(np.array(n, np.int64)) for n in (2, 1))
    return e.op("Add", e.op("Div", length, two), one) if onesided else length


def dft(e: Emitter, node: NodeProto, types: Types) -> str | None:
    """A product with a matrix of sines and one of cosines."""
    x = node.input[0]
    shape = _shape(types, x)
    if not shape or shape[-1] not in (1, 2) or optional_input(node, 2):
        return None
    rank, inverse = len(shape) - 1, bool(attribute(node, "inverse", 0))
    axis = int(attribute(node, "axis", 1)) % len(shape)
    size = _size(e, x, axis)
    length = e.op("Reshape", optional_input(node, 1) or size, np.array([], np.int64))
    cosines, sines = _waves(
        e, e.op("Min", size, length), _bins(e, length, bool(attribute(node, "onesided", 0))), length
    )
    perm = [*(i for i in range(rank) if i != axis), axis]
    parts = []
    for number in range(shape[-1]):
        part = e.op("Gather", x, e.constant(np.array(number, np.int64)), axis=-1)
        if optional_input(node, 1):  # what is longer than the transform does not count
            part = e.op("Slice", part, [0], e.op("Unsqueeze", length, [0]), [axis])
        parts.append(e.op("Transpose", part, perm=perm))
    scale = e.op("Div", 1.0, _real(e, length)) if inverse else None
    back = [*(perm.index(i) for i in range(rank)), rank]
    return e.op("Transpose", _turned(e, parts, cosines, sines, 1.0 if inverse else -1.0, scale), perm=back)


def _turned(e: Emitter, parts: Sequence[str], cosines: str, sines: str, sign: float, scale: str | None) -> str:
    """(real, imaginary) parts times cos + i sign sin, side by side in a last axis."""
    sines = e.op("Mul", sines, sign)
    real, imaginary = e.op("MatMul", parts[0], cosines), e.op("MatMul", parts[0], sines)
    if len(parts) > 1:
        real = e.op("Sub", real, e.op("MatMul", parts[1], sines))
        imaginary = e.op("Add", imaginary, e.op("MatMul", parts[1], cosines))
    both = e.op("Concat", e.op("Unsqueeze", real, [-1]), e.op("Unsqueeze", imaginary, [-1]), axis=-1)
    return both if scale is None else e.op("Mul", both, scale)


def stft(e: Emitter, node: NodeProto, types: Types) -> str | None:
    """Frames that are gathered, weighed by the window, and transformed by a product."""
    signal, step = node.input[:2]
    window, given = optional_input(node, 2), optional_input(node, 3)
    shape = _shape(types, signal)
    if not shape or (len(shape) == 3 and shape[2] != 1):
        return None
    scalar = np.array([], np.int64)
    length = e.op("Reshape", given, scalar) if given else _size(e, str(window), 0)
    step = e.op("Reshape", step, scalar)
    flat = e.op("Squeeze", signal, [2]) if len(shape) == 3 else signal
    room = e.op("Sub", _size(e, signal, 1), length)
    count = e.op("Add", e.op("Div", room, step), e.constant(np.array(1, np.int64)))
    starts = e.op("Unsqueeze", e.op("Mul", _range(e, count), step), [1])
    frames = e.op("Gather", flat, e.op("Add", starts, e.op("Unsqueeze", _range(e, length), [0])), axis=1)
    if window:
        frames = e.op("Mul", frames, window)
    cosines, sines = _waves(e, length, _bins(e, length, bool(attribute(node, "onesided", 1))), length)
    return _turned(e, [frames], cosines, sines, -1.0, None)


# --- Normalisation


def local_response(e: Emitter, node: NodeProto, types: Types) -> str | None:
    """Divide by a power of the squares of neighbouring channels."""
    x, size = node.input[0], int(attribute(node, "size"))
    alpha, beta, bias = (float(attribute(node, n, d)) for n, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before = (size - 1) // 2
    padded = e.op("Pad", e.op("Mul", x, x), [before, size - 1 - before], "", [1])
    width = e.op("Unsqueeze", _size(e, x, 1), [0])
    total = ""
    for offset in range(size):
        part = e.op("Slice", padded, [offset], e.op("Add", width, [offset]), [1])
        total = part if not total else e.op("Add", total, part)
    power = e.op("Pow", e.op("Add", e.op("Mul", total, alpha / size), bias), beta)
    return e.op("Div", x, power)


EXPANSIONS: dict[str, Expansion] = {"DFT": dft, "GridSample": grid_sample, "LRN": local_response, "STFT": stft}
