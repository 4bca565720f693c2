"""Pooling and resizing of images (and of signals and volumes: any number of spatial dimensions)."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, helper

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, rule
from model_export.autodiff.rules.convolution import Window, taps, window_of
from model_export.autodiff.rules.elementwise import Upstream
from model_export.autodiff.rules.shaping import fold_axis
from model_export.errors import ExportError
from model_export.graph import Shape, attribute, attributes, make_model, module_of, serialise, tensor_info

LOWEST = float(np.finfo(np.float32).min)


def _given_window(context: Context, node: NodeProto) -> Window:
    return window_of(context, node, node.input[0], node.output[0], tuple(attribute(node, "kernel_shape")))


def _pool_window(context: Context, node: NodeProto) -> Window:
    """The window of a pooling node; one that overhangs the end (ceil_mode) counts as more padding there."""
    window = _given_window(context, node)
    over = [max(-n, 0) for n in window.leftover()]
    return dataclasses.replace(window, end=tuple(e + n for e, n in zip(window.end, over, strict=True)))


@rule("MaxPool")
def max_pool(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The first maximum of each window gets the gradient, as in PyTorch."""
    x, y, dy = node.input[0], node.output[0], str(upstream[0])
    window = _pool_window(context, node)
    if any(window.pads):
        pads = np.array([0, 0, *window.begin, 0, 0, *window.end], np.int64)
        x = context.op("Pad", x, pads, LOWEST)
        size = tuple(b + n + e for b, n, e in zip(window.begin, window.size, window.end, strict=True))
        rank = len(size)
        inner = dataclasses.replace(window, size=size, begin=(0,) * rank, end=(0,) * rank)
    else:
        inner = window
    taken, parts = None, []
    for tap in taps(context, x, inner):
        is_maximum = context.op("Equal", tap, y)
        first = context.op("And", is_maximum, context.op("Not", taken)) if taken else is_maximum
        taken = context.op("Or", taken, is_maximum) if taken else is_maximum
        parts.append(context.op("Where", first, dy, 0.0))
    return [spread_taps(context, parts, int(context.shape(y)[1] or 0), window)]


def spread_taps(context: Context, parts: list[str], channels: int, window: Window) -> str:
    """The opposite of `taps`: add each part back to the input elements its kernel element met."""
    if window.strides == window.kernel and not any(window.pads) and set(window.dilations) == {1}:
        return _interleave(context, parts, channels, window)
    rank = len(window.size)
    image = _columns_to_image(context, parts, window) if rank <= 2 else _place_by_kernel(context, parts, window)
    return context.op("Reshape", image, np.array([-1, channels, *window.size], np.int64))


def _columns_to_image(context: Context, parts: list[str], window: Window) -> str:
    """Col2Im; onnxruntime (1.19 to 1.31) has it right in two dimensions only, so a signal is an image of one row."""
    flat = [context.op("Reshape", part, np.array([-1, 1, math.prod(window.out)], np.int64)) for part in parts]
    lift = [1] * (2 - len(window.size))
    flush = [0] * len(lift)
    return context.op(
        "Col2Im",
        context.op("Concat", *flat, axis=1),
        [*lift, *window.size],
        [*lift, *window.kernel],
        dilations=[*lift, *window.dilations],
        strides=[*lift, *window.strides],
        pads=[*flush, *window.begin, *flush, *window.end],
    )


def _place_by_kernel(context: Context, parts: list[str], window: Window) -> str:
    """A transposed convolution whose kernel for part i is one at place i and zero elsewhere."""
    planes = [context.op("Reshape", part, np.array([-1, 1, *window.out], np.int64)) for part in parts]
    kernel = np.eye(len(parts), dtype=np.float32).reshape(len(parts), 1, *window.kernel)
    rest = window.leftover()
    return context.op(
        "ConvTranspose",
        context.op("Concat", *planes, axis=1),
        kernel,
        **window.attributes(),
        output_padding=rest if any(rest) else None,
    )


def _interleave(context: Context, parts: list[str], channels: int, window: Window) -> str:
    """Windows that tile the image: stack the parts and transpose them into place."""
    rank = len(window.size)
    stacked = context.op("Concat", *(context.op("Unsqueeze", part, [2]) for part in parts), axis=2)
    apart = context.op("Reshape", stacked, np.array([-1, channels, *window.kernel, *window.out], np.int64))
    order = [0, 1, *itertools.chain.from_iterable((2 + rank + i, 2 + i) for i in range(rank))]
    covered = [o * k for o, k in zip(window.out, window.kernel, strict=True)]
    whole = context.op(
        "Reshape", context.op("Transpose", apart, perm=order), np.array([-1, channels, *covered], np.int64)
    )
    rest = window.leftover()
    return context.op("Pad", whole, np.array([0] * (2 + rank) + [0, 0, *rest], np.int64)) if any(rest) else whole


@rule("AveragePool")
def average_pool(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Each window's gradient, divided by the elements it counted, spread over its kernel."""
    window = _pool_window(context, node)
    counts = _counts(node, window, _given_window(context, node))
    share = context.op("Div", str(upstream[0]), counts if counts.size > 1 else float(counts.reshape(())))
    channels = int(context.shape(node.input[0])[1] or 0)
    planes = context.op("Reshape", share, np.array([-1, 1, *window.out], np.int64))
    ones = np.ones((1, 1, *window.kernel), np.float32)
    rest = window.leftover()
    spread = context.op(
        "ConvTranspose",
        planes,
        ones,
        **dataclasses.replace(window, group=1).attributes(),
        output_padding=rest if any(rest) else None,
    )
    return [context.op("Reshape", spread, np.array([-1, channels, *window.size], np.int64))]


def _counts(node: NodeProto, window: Window, given: Window) -> np.ndarray:
    """How many elements each window averages over: one number, or an array over the output positions."""
    include = int(attribute(node, "count_include_pad", 0))
    per_axis = []
    for i in range(len(window.size)):
        padded_end = window.size[i] + given.end[i] if include else window.size[i]
        low = -given.begin[i] if include else 0
        counted = [
            sum(low <= start + k * window.dilations[i] < padded_end for k in range(window.kernel[i]))
            for start in (o * window.strides[i] - window.begin[i] for o in range(window.out[i]))
        ]
        per_axis.append(np.array(counted, np.float32))
    counts = per_axis[0]
    for axis in per_axis[1:]:
        counts = counts[..., None] * axis
    return counts[:1].reshape(-1)[:1] if (counts == counts.flat[0]).all() else counts


@rule("GlobalAveragePool")
def global_average_pool(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    x = node.input[0]
    share = context.op("Div", str(upstream[0]), context.count(x, range(2, context.rank(x))))
    return [context.op("Expand", share, context.runtime_shape(x))]


@rule("GlobalMaxPool")
def global_max_pool(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The first maximum of each image gets the gradient, as in PyTorch's adaptive pooling."""
    x = node.input[0]
    rows = np.array([-1, int(context.shape(x)[1] or 0), math.prod(int(n or 0) for n in context.shape(x)[2:])], np.int64)
    flat = context.op("Reshape", x, rows)
    place = context.op("ArgMax", flat, axis=2, keepdims=1)
    zeros = context.op("ConstantOfShape", context.op("Shape", flat))
    share = context.op("Reshape", str(upstream[0]), np.array([-1, rows[1], 1], np.int64))
    return [context.reshape_like(context.op("ScatterElements", zeros, place, share, axis=2), x)]


@rule("Resize")
def resize(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Resizing is linear along each axis; its gradient is the transposed matrix."""
    shape, target = context.shape(node.input[0]), context.shape(node.output[0])
    value = str(upstream[0])
    for axis, (small, large) in enumerate(zip(shape, target, strict=True)):
        if small == large:
            continue
        if small is None or large is None:
            raise ExportError(f"node {node.name!r} (module {module_of(node)!r}) resizes along the batch")
        matrix = _resize_matrix(context, node, axis, small, large)
        blocks = large // small
        if large == blocks * small and np.array_equal(matrix, np.repeat(np.eye(small), blocks, axis=1)):
            value = _sum_blocks(context, value, shape, target, axis, blocks)
        else:
            value = fold_axis(context, value, len(shape), axis, np.ascontiguousarray(matrix.T, np.float32))
    return [value, *[None] * (len(node.input) - 1)]


def _sum_blocks(context: Context, value: str, small: Shape, large: Shape, axis: int, blocks: int) -> str:
    """Repeated elements add up. Axes before `axis` have their small size already."""
    done = [*small[: axis + 1], blocks, *large[axis + 1 :]]
    apart = context.op("Reshape", value, np.array([-1 if n is None else n for n in done], np.int64))
    return context.op("ReduceSum", apart, [axis + 1], keepdims=0)


def _resize_matrix(context: Context, node: NodeProto, axis: int, small: int, large: int) -> np.ndarray:
    """[small, large]: what the operator itself makes of unit vectors, so that every mode and rounding is right."""
    attrs = {key: value for key, value in attributes(node).items() if key not in ("axes", "keep_aspect_ratio_policy")}
    scales = context.static(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if scales is not None and scales.size:
        given = list(attribute(node, "axes", range(context.rank(node.input[0]))))
        extra = {"scales": np.array([1.0, scales[given.index(axis)]], np.float32)}
        names = ["unit", "", "scales"]
    else:
        extra = {"sizes": np.array([small, large], np.int64)}
        names = ["unit", "", "", "sizes"]
    attrs["coordinate_transformation_mode"] = attrs.get("coordinate_transformation_mode", "half_pixel")
    inner = helper.make_node("Resize", names, ["wide"], **attrs)
    model = make_model(
        "resize",
        [inner],
        [tensor_info("unit", np.float32, (small, small))],
        [tensor_info("wide", np.float32, (small, large))],
        extra,
        18,
    )
    session = ort.InferenceSession(serialise(model), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"unit": np.eye(small, dtype=np.float32)})[0])
