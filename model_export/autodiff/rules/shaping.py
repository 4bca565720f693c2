"""Operators that move or select elements without changing them."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.errors import ExportError
from model_export.graph import Operand, attribute, module_of, optional_input

# Exporters write "to the end" of a slice as the largest number of 32 or of 64 bits, or as a billion.
END = 10**9


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.reshape_like(str(upstream[0]), node.input[0])]


@rule("Transpose")
def transpose(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    rank = context.rank(node.input[0])
    perm = list(attribute(node, "perm", range(rank)[::-1]))
    return [context.op("Transpose", str(upstream[0]), perm=[perm.index(i) for i in range(rank)])]


@rule("Concat")
def concat(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    axis = int(attribute(node, "axis")) % context.rank(node.output[0])
    sizes = [context.shape(name)[axis] for name in node.input]
    counts: Operand = np.array([size or 0 for size in sizes], np.int64)
    if None in sizes:  # along the batch, as losses do that compare samples
        lengths = [context.op("Gather", context.op("Shape", name), [axis], axis=0) for name in node.input]
        counts = context.op("Concat", *lengths, axis=0)
    return list(context.ops("Split", len(sizes), str(upstream[0]), counts, axis=axis))


@rule("Split")
def split(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Outputs without a reader count as zero."""
    axis = int(attribute(node, "axis", 0))
    parts = [
        value if value is not None else context.op("Mul", name, 0.0)
        for name, value in zip(node.output, upstream, strict=True)
    ]
    return [context.op("Concat", *parts, axis=axis)]


def _slice_bounds(context: Context, node: NodeProto) -> list[tuple[int, int, int, int, int]]:
    """(axis, start, number taken, step, size) of each sliced axis."""
    starts, ends, axes, steps = (context.static(optional_input(node, i)) for i in (1, 2, 3, 4))
    if starts is None:
        raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) slices at a place known only at run time")
    shape, taken = context.shape(node.input[0]), context.shape(node.output[0])
    bounds = []
    for index, start in enumerate(starts.tolist()):
        axis = int(axes[index]) % len(shape) if axes is not None else index
        step = int(steps[index]) if steps is not None else 1
        size, count = shape[axis], taken[axis]
        if size is None or count is None:
            to_the_end = count is None and (ends is None or ends[index] >= END)
            if start == 0 and step == 1 and to_the_end:
                continue  # the whole batch
            raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) slices along the batch")
        if step > 0:
            first = min(max(start + size if start < 0 else start, 0), size)
        else:
            first = min(max(start + size if start < 0 else start, -1), size - 1)
        bounds.append((axis, first, count, step, size))
    return bounds


@rule("Slice")
def slice_(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Put the gradient back to where it was taken from, zeros elsewhere."""
    value, rank = str(upstream[0]), context.rank(node.input[0])
    before, after = [0] * rank, [0] * rank
    for axis, first, count, step, size in _slice_bounds(context, node):
        if step == 1:
            before[axis], after[axis] = first, size - first - count
            continue
        # With a stride: pick from (gradient, zero) by a constant index.
        index = np.full(size, count, np.int64)
        index[[first + step * k for k in range(count)]] = np.arange(count)
        pads = [0] * (2 * rank)
        pads[rank + axis] = 1
        value = context.op("Gather", context.op("Pad", value, np.array(pads, np.int64)), index, axis=axis)
    if any(before) or any(after):
        value = context.op("Pad", value, np.array([*before, *after], np.int64))
    return [value]


@rule("Pad")
def pad(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Constant padding: cut it off. Reflected and repeated borders flow back through a scatter."""
    amounts, given_axes = context.static(node.input[1]), context.static(optional_input(node, 3))
    shape = context.shape(node.input[0])
    rank = len(shape)
    if amounts is None:
        raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) pads by an amount known only at run time")
    axes = [int(a) % rank for a in given_axes] if given_axes is not None else list(range(rank))
    mode = attribute(node, "mode", "constant")
    value = str(upstream[0])
    for i, axis in enumerate(axes):
        low, high, size = int(amounts[i]), int(amounts[len(axes) + i]), shape[axis]
        if not low and not high:
            continue
        if size is None:
            raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) pads along the batch")
        if mode == "constant":
            value = _cut(context, value, axis, low, high, size)
        else:
            origin = np.pad(np.arange(size), (low, high), mode=mode)
            matrix = (origin[:, None] == np.arange(size)[None, :]).astype(np.float32)
            value = fold_axis(context, value, rank, axis, matrix)
    return [value]


def _cut(context: Context, value: str, axis: int, low: int, high: int, size: int) -> str:
    """Undo padding; a negative amount had cut something off, which gets zeros."""
    start, end = max(low, 0), max(low, 0) + size + min(low, 0) + min(high, 0)
    value = context.op("Slice", value, [start], [end], [axis])
    if low < 0 or high < 0:
        rank_pads = np.array([max(-low, 0), max(-high, 0)], np.int64)
        value = context.op("Pad", value, rank_pads, "", [axis])
    return value


def fold_axis(context: Context, value: str, rank: int, axis: int, matrix: np.ndarray) -> str:
    """Multiply along one axis by a constant matrix [old size, new size]."""
    perm = [*(i for i in range(rank) if i != axis), axis]
    back = [perm.index(i) for i in range(rank)]
    folded = context.op("MatMul", context.op("Transpose", value, perm=perm), matrix)
    return context.op("Transpose", folded, perm=back)


@rule("Expand")
def expand(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.sum_to(str(upstream[0]), context.shape(node.output[0]), node.input[0])]


@rule("Tile")
def tile(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    repeats = context.static(node.input[1])
    shape = context.shape(node.input[0])
    if repeats is None:
        raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) repeats by a number known only at run time")
    split_shape = [
        d for n, size in zip(repeats.tolist(), shape, strict=True) for d in (n, -1 if size is None else size)
    ]
    if split_shape.count(-1) > 1:
        raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) repeats a value of two unknown dimensions")
    apart = context.op("Reshape", str(upstream[0]), np.array(split_shape, np.int64))
    summed = context.op("ReduceSum", apart, list(range(0, 2 * len(shape), 2)), keepdims=0)
    return [summed]


@rule("Gather")
def gather(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Rows that were taken several times (an embedding) add up: a scatter into zeros."""
    data, indices = node.input
    rank = context.rank(data)
    axis = int(attribute(node, "axis", 0)) % rank
    value, known = str(upstream[0]), context.static(indices)
    size = context.shape(data)[axis]
    if known is not None and known.ndim == 0 and size is not None:
        first = int(known) % size
        value = context.op("Unsqueeze", value, [axis])
        pads = [0] * (2 * rank)
        pads[axis], pads[rank + axis] = first, size - first - 1
        value = value if size == 1 else context.op("Pad", value, np.array(pads, np.int64))
        return [_without_padding(context, value, data)]
    if axis:
        count = context.rank(indices)
        rows = [*range(axis, axis + count), *range(axis), *range(axis + count, rank + count - 1)]
        value = context.op("Transpose", value, perm=rows)
    moved = [axis, *(i for i in range(rank) if i != axis)]
    zeros = context.op("ConstantOfShape", _moved_shape(context, data, moved))
    places = context.op("Unsqueeze", indices, [-1])
    summed = context.op("ScatterND", zeros, places, value, reduction="add")
    if axis:
        summed = context.op("Transpose", summed, perm=[moved.index(i) for i in range(rank)])
    return [_without_padding(context, summed, data), None]


def _without_padding(context: Context, gradient: str, data: str) -> str:
    """What looking up rows gives to the row of padding is zero; other uses of the same weight do train it."""
    if data not in context.fixed_rows:
        return gradient
    shape = context.shape(data)
    zeros = np.zeros((1, *(int(dim or 0) for dim in shape[1:])), np.float32)
    return context.op("ScatterND", gradient, np.array([[context.fixed_rows[data]]], np.int64), zeros)


def _moved_shape(context: Context, name: str, order: list[int]) -> str | np.ndarray:
    shape = [context.shape(name)[i] for i in order]
    if None not in shape:
        return np.array(shape, np.int64)
    return context.op("Gather", context.op("Shape", name), order, axis=0)


@rule("DepthToSpace")
def depth_to_space(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Only the DCR order has an inverse operator; the other is a transposition of it."""
    block = int(attribute(node, "blocksize"))
    if attribute(node, "mode", "DCR") == "DCR":
        return [context.op("SpaceToDepth", str(upstream[0]), blocksize=block)]
    _, channels, height, width = context.shape(node.input[0])
    if channels is None or height is None or width is None:
        raise ExportError(f"node {node.name!r} (module {module_of(node)!r}): image size is known only at run time")
    parts = np.array([-1, channels // block**2, height, block, width, block], np.int64)
    apart = context.op("Reshape", str(upstream[0]), parts)
    return [context.reshape_like(context.op("Transpose", apart, perm=[0, 1, 3, 5, 2, 4]), node.input[0])]


@rule("SpaceToDepth")
def space_to_depth(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("DepthToSpace", str(upstream[0]), blocksize=int(attribute(node, "blocksize")))]
