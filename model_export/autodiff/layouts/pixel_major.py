"""Pixel-major operators, [pixels, N, channels]: lowerings and gradients. layout.py decides where they are used."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import FLOAT, Context
from model_export.autodiff.layouts.tiles import (
    Size,
    forward_plan,
    gradient_plan,
    pick,
    pixel_order,
    row_of_pixel,
    tap_pixels,
    tile_weight_gradient,
    tiled_product,
    transform_kernel,
    turned,
    weight_plan,
)
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.activation import STEEP
from model_export.autodiff.rules.elementwise import Upstream
from model_export.autodiff.rules.normalisation import EPSILON, blend_statistics, unbiasing
from model_export.graph import attribute, optional_input

LOWEST = float(np.finfo(np.float32).min)


def _size(node: NodeProto, name: str) -> Size:
    height, width = attribute(node, name)
    return int(height), int(width)


def _matrix(context: Context, value: str, columns: int) -> str:
    return context.op("Reshape", value, np.array([-1, columns], np.int64))


def _image(context: Context, value: str, pixels: int, channels: int) -> str:
    return context.op("Reshape", value, np.array([pixels, -1, channels], np.int64))


@lowering("PixelEnter")
def enter_forward(context: Context, node: NodeProto) -> None:
    context.ops("Identity", [node.output[0]], _to_pixels(context, node))
    if node.input[0] not in context.active:  # then it is the graph's own input, which is there anyway
        context.remakes[node.output[0]] = lambda: _to_pixels(context, node)


def _to_pixels(context: Context, node: NodeProto) -> str:
    """[N, C, height, width] -> [pixels, N, C]."""
    size = _size(node, "size")
    channels = int(context.shape(node.input[0])[1] or 0)
    flat = context.op("Reshape", node.input[0], np.array([-1, channels, size[0] * size[1]], np.int64))
    moved = context.op("Transpose", flat, perm=[2, 0, 1])
    return context.op("Gather", moved, pixel_order(size).astype(np.int64), axis=0)


@rule("PixelEnter")
def enter(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    size = _size(node, "size")
    return [_to_plain(context, str(upstream[0]), size, int(context.shape(node.input[0])[1] or 0), None)]


def _to_plain(context: Context, value: str, size: Size, channels: int, result: str | None) -> str:
    """[pixels, N, C] -> [N, C, height, width]."""
    rows = pick(context, value, row_of_pixel(size)[:-1], size[0] * size[1])
    moved = context.op("Transpose", rows, perm=[1, 2, 0])
    shape = np.array([-1, channels, *size], np.int64)
    return context.ops("Reshape", [result], moved, shape)[0] if result else context.op("Reshape", moved, shape)


@lowering("PixelLeave")
def leave_forward(context: Context, node: NodeProto) -> None:
    _to_plain(context, node.input[0], _size(node, "size"), int(attribute(node, "channels")), node.output[0])


@rule("PixelLeave")
def leave(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    size, channels = _size(node, "size"), int(attribute(node, "channels"))
    flat = context.op("Reshape", str(upstream[0]), np.array([-1, channels, size[0] * size[1]], np.int64))
    return [pick(context, context.op("Transpose", flat, perm=[2, 0, 1]), pixel_order(size), size[0] * size[1])]


def _weight_shape(context: Context, node: NodeProto) -> tuple[int, int, int]:
    """(features, channels, taps along one axis)"""
    features, channels, taps, _ = (int(n or 0) for n in context.shape(node.input[1]))
    return features, channels, taps


def _add_bias(context: Context, node: NodeProto, value: str) -> None:
    bias = optional_input(node, 2)
    if bias:
        context.ops("Add", [node.output[0]], value, _per_row(context, bias, value))
    else:
        context.ops("Identity", [node.output[0]], value)


def _per_row(context: Context, vector: str, like: str) -> str:
    """[C] -> [N, C]: adding that to rows is several times faster than broadcasting [C] itself."""
    return context.op("Expand", vector, context.op("Shape", like, start=1, end=3))


@lowering("PixelConv")
def conv_forward(context: Context, node: NodeProto) -> None:
    features, channels, taps = _weight_shape(context, node)
    size, out = _size(node, "size"), _size(node, "out")
    if taps == 1:
        taken = _taken(context, node)
        weight = context.op("Transpose", _matrix(context, node.input[1], channels), perm=[1, 0])
        product = context.op("MatMul", taken, weight)
    else:
        plan = forward_plan(size, out, taps, int(attribute(node, "strides")[0]), _pads(node))

        def write_kernel() -> str:
            return turned(context, transform_kernel(context, node.input[1], plan, features, channels), plan)

        product = tiled_product(context, node.input[0], write_kernel, plan, channels, features)
    _add_bias(context, node, product)


def _taken(context: Context, node: NodeProto) -> str:
    """The pixels that a 1x1 kernel meets."""
    size, out = _size(node, "size"), _size(node, "out")
    return pick(context, node.input[0], _strided_rows(size, out, int(attribute(node, "strides")[0])), size[0] * size[1])


def _pads(node: NodeProto) -> Size:
    pads = attribute(node, "pads")
    return int(pads[0]), int(pads[1])


def _strided_rows(size: Size, out: Size, stride: int) -> np.ndarray:
    """Rows of the source that a 1x1 kernel with a stride meets, in the target's order."""
    h, w = np.divmod(pixel_order(out), out[1])
    met: np.ndarray = row_of_pixel(size)[h * stride * size[1] + w * stride]
    return met


@rule("PixelConv")
def conv(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    features, channels, taps = _weight_shape(context, node)
    size, out, stride = _size(node, "size"), _size(node, "out"), int(attribute(node, "strides")[0])
    dy, weight = str(upstream[0]), node.input[1]
    scale = context.channel_scales.get(dy)
    dx = dw = None
    if context.wants(node, 1):
        if taps == 1:
            taken = _matrix(context, _taken(context, node), channels)
            dw = context.op("Gemm", _matrix(context, dy, features), taken, transA=1)
        else:
            plan = weight_plan(size, out, taps, stride, _pads(node))
            with context.emitter.inside("weight"):
                dw = tile_weight_gradient(context, node.input[0], dy, plan, features, channels)
        dw = _scaled(context, dw, scale, features, (channels, taps, taps))
    if context.wants(node, 0):
        weight = _scaled(context, weight, scale, features, (channels, taps, taps)) if scale else weight
        dx = _input_gradient(context, node, dy, weight, (features, channels, taps), stride)
    return [dx, dw, _bias_gradient(context, node, dy, scale)]


def _input_gradient(
    context: Context, node: NodeProto, dy: str, weight: str, sizes: tuple[int, int, int], stride: int
) -> str:
    features, channels, taps = sizes
    size, out = _size(node, "size"), _size(node, "out")
    if taps > 1:
        plan = gradient_plan(size, out, taps, stride, _pads(node))
        write_kernel = partial(transform_kernel, context, weight, plan, features, channels)
        with context.emitter.inside("input"):
            return tiled_product(context, dy, write_kernel, plan, features, channels)
    product = context.op("MatMul", dy, _matrix(context, weight, channels))
    met = _strided_rows(size, out, stride)
    source = np.full(size[0] * size[1], len(met), np.int64)
    source[met] = np.arange(len(met))
    return pick(context, product, source, len(met))


def _scaled(context: Context, value: str, scale: str | None, features: int, rest: tuple[int, ...]) -> str:
    """Multiply a weight or its gradient by one number per feature."""
    value = context.op("Reshape", value, np.array([features, *rest], np.int64))
    return context.op("Mul", value, context.op("Unsqueeze", scale, [1, 2, 3])) if scale else value


def _bias_gradient(context: Context, node: NodeProto, dy: str, scale: str | None) -> str | None:
    if not context.wants(node, 2):
        return None
    pixels = math.prod(attribute(node, "out"))
    total = channel_sums(context, dy, pixels, int(context.shape(node.input[1])[0] or 0))
    return context.op("Mul", total, scale) if scale else total


def channel_sums(context: Context, value: str, pixels: int, channels: int) -> str:
    """[pixels, N, C] -> [C]: a product with ones adds up the pixels at full speed, little is left to reduce."""
    ones = context.constant(np.ones((1, pixels), np.float32))
    rows = context.op("MatMul", ones, context.op("Reshape", value, np.array([pixels, -1], np.int64)))
    return context.op("ReduceSum", _matrix(context, rows, channels), [0], keepdims=0)


@lowering("PixelStem")
def stem_forward(context: Context, node: NodeProto) -> None:
    """im2col with the batch innermost: one Gather of rows of N numbers, one product."""
    features, channels, _ = _weight_shape(context, node)
    out = _size(node, "out")
    columns = _columns(context, node)
    area = math.prod(attribute(node, "kernel_shape"))
    weight = context.op("Transpose", _matrix(context, node.input[1], channels * area), perm=[1, 0])
    product = context.op("MatMul", context.op("Transpose", columns, perm=[1, 0]), weight)
    _add_bias(context, node, _image(context, product, out[0] * out[1], features))


def _columns(context: Context, node: NodeProto) -> str:
    """[N, C, height, width] -> [C * taps, pixels * N]: what each tap meets."""
    _, channels, _ = _weight_shape(context, node)
    size, out = _size(node, "size"), _size(node, "out")
    pixels = size[0] * size[1]
    flat = context.op("Reshape", node.input[0], np.array([-1, channels * pixels], np.int64))
    planes = context.op("Transpose", flat, perm=[1, 0])
    planes = context.op("Reshape", planes, np.array([channels, pixels, -1], np.int64))
    index = tap_pixels(node, size, out, pixel_order(out))
    if (index == pixels).any():
        planes = context.op("Pad", planes, np.array([0, 0, 0, 0, 1, 0], np.int64))
    taken = context.op("Gather", planes, index, axis=1)
    return context.op("Reshape", taken, np.array([channels * math.prod(attribute(node, "kernel_shape")), -1], np.int64))


@rule("PixelStem")
def stem(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    features, channels, *_ = _weight_shape(context, node)
    dy = str(upstream[0])
    scale = context.channel_scales.get(dy)
    dw = None
    if context.wants(node, 1):
        product = context.op("MatMul", _columns(context, node), _matrix(context, dy, features))
        turned_back = context.op("Transpose", product, perm=[1, 0])
        dw = _scaled(context, turned_back, scale, features, (channels, *attribute(node, "kernel_shape")))
    return [None, dw, _bias_gradient(context, node, dy, scale)]


@lowering("PixelBatchNorm")
def batch_norm_forward(context: Context, node: NodeProto) -> None:
    """Two passes for the statistics, as PyTorch's accuracy asks; the centred values are kept for the gradient."""
    x, scale, bias, mean, variance = node.input
    pixels, channels = int(context.shape(x)[0] or 0), int(context.shape(x)[2] or 0)
    count = context.op("Mul", _batch(context, x), float(pixels))
    batch_mean = context.op("Div", channel_sums(context, x, pixels, channels), count)
    centred = context.op("Sub", x, _per_row(context, batch_mean, x))
    squares = channel_sums(context, context.op("Mul", centred, centred), pixels, channels)
    batch_variance = context.op("Div", squares, count)
    epsilon = float(attribute(node, "epsilon", EPSILON))
    deviation = context.op("Sqrt", context.op("Add", batch_variance, epsilon))
    slope = context.op("Div", scale, deviation)
    scaled = context.op("Mul", centred, _per_row(context, slope, x))
    context.ops("Add", [node.output[0]], scaled, _per_row(context, bias, x))
    unbiased = context.op("Mul", batch_variance, unbiasing(context, count))
    blend_statistics(context, node, (mean, batch_mean), (variance, unbiased))
    context.saved[node.output[0]] = (centred, deviation, slope, count)


def _batch(context: Context, x: str) -> str:
    return context.op("Cast", context.op("Shape", x, start=1, end=2), to=FLOAT)


@rule("PixelBatchNorm")
def batch_norm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """dx = slope * (dy - mean(dy) - centred * mean(dy * centred) / deviation^2).

    With `fold` the convolution in front multiplies by the slope, in its small weights instead of this large tensor.
    """
    x, dy = node.input[0], str(upstream[0])
    centred, deviation, slope, count = context.saved[node.output[0]]
    pixels, channels = int(context.shape(x)[0] or 0), int(context.shape(x)[2] or 0)
    total = channel_sums(context, dy, pixels, channels)
    dot = channel_sums(context, context.op("Mul", dy, centred), pixels, channels)
    dscale = context.op("Div", dot, deviation)
    dx = None
    if context.wants(node, 0):
        tilt = context.op("Div", context.op("Div", dscale, deviation), count)
        level = context.op("Div", total, count)
        moved = context.op("Sub", dy, context.op("Mul", centred, _per_row(context, tilt, x)))
        dx = context.op("Sub", moved, _per_row(context, level, x))
        if attribute(node, "fold"):
            context.channel_scales[dx] = slope
        else:
            dx = context.op("Mul", dx, _per_row(context, slope, x))
    return [dx, dscale, total, None, None]


@lowering("PixelMean")
def mean_forward(context: Context, node: NodeProto) -> None:
    pixels, _, channels = context.shape(node.input[0])
    share = context.constant(np.full((1, int(pixels or 0)), 1.0 / int(pixels or 1), np.float32))
    rows = context.op("MatMul", share, context.op("Reshape", node.input[0], np.array([pixels, -1], np.int64)))
    trailing = [1] * (len(context.shape(node.output[0])) - 2)
    context.ops("Reshape", [node.output[0]], rows, np.array([-1, int(channels or 0), *trailing], np.int64))


@rule("PixelMean")
def mean(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    pixels, _, channels = context.shape(node.input[0])
    share = context.op("Mul", str(upstream[0]), 1.0 / int(pixels or 1))
    rows = context.op("Reshape", share, np.array([1, -1, int(channels or 0)], np.int64))
    return [context.op("Expand", rows, np.array([pixels, 1, 1], np.int64))]


@lowering("PixelMaxPool")
def max_pool_forward(context: Context, node: NodeProto) -> None:
    """The largest of the rows that the taps meet."""
    size, out = _size(node, "size"), _size(node, "out")
    pixels = size[0] * size[1]
    rows = row_of_pixel(size)[tap_pixels(node, size, out, pixel_order(out))].reshape(-1, out[0] * out[1])
    source = node.input[0]
    if (rows == pixels).any():
        source = context.op("Pad", source, np.array([0, 0, 0, 1, 0, 0], np.int64), LOWEST)
    planes = [context.op("Gather", source, row, axis=0) for row in rows]
    context.ops("Max", [node.output[0]], *planes)
    context.saved[node.output[0]] = planes


@rule("PixelMaxPool")
def max_pool(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The first maximum takes what no earlier one took; each pixel then collects from the windows it lies in."""
    size, out = _size(node, "size"), _size(node, "out")
    y, rest = node.output[0], str(upstream[0])
    shares = []
    for plane in context.saved[y]:
        is_maximum = context.op("HardSigmoid", context.op("Sub", y, plane), alpha=-STEEP, beta=1.0)
        share = context.op("Mul", is_maximum, rest)
        shares.append(share)
        rest = context.op("Sub", rest, share)
    together = context.op("Concat", *shares, axis=0)
    count = len(shares) * out[0] * out[1]
    parts = [pick(context, together, rows, count) for rows in _windows_of_rows(node, size, out, count)]
    return [parts[0] if len(parts) == 1 else context.op("Sum", *parts)]


def _windows_of_rows(node: NodeProto, size: Size, out: Size, count: int) -> np.ndarray:
    """[most windows a pixel lies in, pixels]: places in the list of (tap, output pixel); `count` means none."""
    met = row_of_pixel(size)[tap_pixels(node, size, out, pixel_order(out))]
    found: list[list[int]] = [[] for _ in range(size[0] * size[1])]
    for place, row in enumerate(met.tolist()):
        if row < len(found):
            found[row].append(place)
    depth = max(map(len, found))
    return np.transpose(np.array([[*places, *[count] * (depth - len(places))] for places in found], np.int64))
