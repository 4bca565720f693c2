"""Channel-major operators, [channels, pixels, N]: lowerings and gradients. layout.py decides where they are used."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.layouts.planes import (
    apply_plan,
    forward_plan,
    gradient_plan,
    plane_order,
    plane_weight_gradient,
    take_tiles,
)
from model_export.autodiff.layouts.tiles import Size, pick, places_in, tap_pixels
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.convolution import Window
from model_export.autodiff.rules.elementwise import Upstream
from model_export.autodiff.rules.normalisation import EPSILON, blend_statistics, training_statistics, unbiasing
from model_export.graph import attribute, optional_input


def _size(node: NodeProto, name: str = "size") -> Size:
    height, width = attribute(node, name)
    return int(height), int(width)


def _channels(context: Context, name: str) -> int:
    """The leading dimension: channels of a tensor of this layout, features of a weight."""
    return int(context.shape(name)[0] or 0)


@lowering("ChannelEnter")
def enter_forward(context: Context, node: NodeProto) -> None:
    context.ops(
        "Identity", [node.output[0]], _from_plain(context, node.input[0], _size(node), _plain_channels(context, node))
    )


def _plain_channels(context: Context, node: NodeProto) -> int:
    return int(context.shape(node.input[0])[1] or 0)


def _from_plain(context: Context, value: str, size: Size, channels: int) -> str:
    """[N, C, height, width] -> [C, pixels, N]: a transposed matrix, then pixels in order."""
    pixels = size[0] * size[1]
    flat = context.op("Reshape", value, np.array([-1, channels * pixels], np.int64))
    turned = context.op("Transpose", flat, perm=[1, 0])
    apart = context.op("Reshape", turned, np.array([channels, pixels, -1], np.int64))
    return pick(context, apart, plane_order(size), pixels, axis=1)


def _to_plain(context: Context, value: str, size: Size, channels: int) -> str:
    pixels = size[0] * size[1]
    ordered = pick(context, value, places_in(plane_order(size))[:-1], pixels, axis=1)
    flat = context.op("Reshape", ordered, np.array([channels * pixels, -1], np.int64))
    turned = context.op("Transpose", flat, perm=[1, 0])
    return context.op("Reshape", turned, np.array([-1, channels, *size], np.int64))


@rule("ChannelEnter")
def enter(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [_to_plain(context, str(upstream[0]), _size(node), _plain_channels(context, node))]


@lowering("ChannelLeave")
def leave_forward(context: Context, node: NodeProto) -> None:
    plain = _to_plain(context, node.input[0], _size(node), int(attribute(node, "channels")))
    context.ops("Identity", [node.output[0]], plain)


@rule("ChannelLeave")
def leave(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [_from_plain(context, str(upstream[0]), _size(node), int(attribute(node, "channels")))]


def _matrix(context: Context, value: str, rows: int) -> str:
    return context.op("Reshape", value, np.array([rows, -1], np.int64))


def _write_with_bias(context: Context, node: NodeProto, value: str) -> None:
    bias = optional_input(node, 2)
    if bias:
        context.ops("Add", [node.output[0]], value, context.op("Unsqueeze", bias, [1, 2]))
    else:
        context.ops("Identity", [node.output[0]], value)


def channel_sums(context: Context, value: str) -> str:
    return context.op("ReduceSum", value, [1, 2], keepdims=0)


def _bias_gradient(context: Context, node: NodeProto, dy: str) -> str | None:
    return channel_sums(context, dy) if context.wants(node, 2) else None


@lowering("ChannelConv")
def conv_forward(context: Context, node: NodeProto) -> None:
    """1x1 kernels, and the first convolution of a network: gather what the taps meet, then one product."""
    features = _channels(context, node.input[1])
    size, out = _size(node), _size(node, "out")
    met = places_in(plane_order(size))[tap_pixels(node, size, out, plane_order(out))]
    taken = pick(context, node.input[0], met, size[0] * size[1], axis=1)
    rows = _channels(context, node.input[0]) * math.prod(attribute(node, "kernel_shape"))
    columns = context.saved[node.output[0]] = _matrix(context, taken, rows)
    product = context.op("MatMul", _matrix(context, node.input[1], features), columns)
    image = context.op("Reshape", product, np.array([features, out[0] * out[1], -1], np.int64))
    _write_with_bias(context, node, image)


@rule("ChannelConv")
def conv(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The gradient of the input is asked for with 1x1 kernels only; layout.py sees to that."""
    x, weight, dy = node.input[0], node.input[1], str(upstream[0])
    features = _channels(context, weight)
    flat = _matrix(context, dy, features)
    dx = dw = None
    if context.wants(node, 1):
        dw = context.reshape_like(context.op("Gemm", flat, context.saved[node.output[0]], transB=1), weight)
    if context.wants(node, 0):
        size, out = _size(node), _size(node, "out")
        turned = context.op("Transpose", _matrix(context, weight, features), perm=[1, 0])
        product = context.op("MatMul", turned, flat)
        image = context.op("Reshape", product, np.array([_channels(context, x), out[0] * out[1], -1], np.int64))
        met = places_in(plane_order(size))[tap_pixels(node, size, out, plane_order(out))]
        source = np.full(size[0] * size[1], len(met), np.int64)
        source[met] = np.arange(len(met))
        dx = pick(context, image, source, len(met), axis=1)
    return [dx, dw, _bias_gradient(context, node, dy)]


def _window(node: NodeProto) -> Window:
    pads = tuple(attribute(node, "pads"))
    return Window(
        size=tuple(attribute(node, "size")),
        out=tuple(attribute(node, "out")),
        kernel=tuple(attribute(node, "kernel_shape")),
        strides=tuple(attribute(node, "strides")),
        dilations=tuple(attribute(node, "dilations")),
        begin=pads[:2],
        end=pads[2:],
        group=attribute(node, "group"),
    )


@lowering("ChannelDepthwise")
def depthwise_forward(context: Context, node: NodeProto) -> None:
    channels, plan = _channels(context, node.input[0]), forward_plan(_window(node))
    tiles = context.saved[node.output[0]] = take_tiles(context, node.input[0], plan, channels)
    _write_with_bias(context, node, apply_plan(context, tiles, node.input[1], plan, channels))


@rule("ChannelDepthwise")
def depthwise(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    x, weight, dy = node.input[0], node.input[1], str(upstream[0])
    channels, window = _channels(context, x), _window(node)
    dx = dw = None
    if context.wants(node, 1):
        tiles = context.saved[node.output[0]]
        dw = plane_weight_gradient(context, tiles, dy, forward_plan(window), channels)
        dw = context.reshape_like(dw, weight)
    if context.wants(node, 0):
        plan = gradient_plan(window)
        dx = apply_plan(context, take_tiles(context, dy, plan, channels), weight, plan, channels)
    return [dx, dw, _bias_gradient(context, node, dy)]


@lowering("ChannelBatchNorm")
def batch_norm_forward(context: Context, node: NodeProto) -> None:
    """A channel is one contiguous run of numbers here, which makes onnxruntime's own operator fast."""
    x, _, _, mean, variance = node.input
    channels = _channels(context, x)
    epsilon = float(attribute(node, "epsilon", EPSILON))
    run = context.op("Reshape", x, np.array([1, channels, -1], np.int64))
    y, batch_mean, batch_variance = training_statistics(context, run, node.input[1:], epsilon, f"{node.output[0]}.run")
    context.ops("Reshape", [node.output[0]], y, np.array([channels, int(context.shape(x)[1] or 0), -1], np.int64))
    count = context.count(x, (1, 2))
    unbiased = context.op("Mul", batch_variance, unbiasing(context, count))
    blend_statistics(context, node, (mean, batch_mean), (variance, unbiased))
    inverse = context.op("Reciprocal", context.op("Sqrt", context.op("Add", batch_variance, epsilon)))
    context.saved[node.output[0]] = (batch_mean, inverse, count)


@rule("ChannelBatchNorm")
def batch_norm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """dx = slope * dy - (tilt * (x - mean) + level), the bracket in one pass of the inference operator."""
    x, scale, dy = node.input[0], node.input[1], str(upstream[0])
    mean, inverse, count = context.saved[node.output[0]]
    centred = context.op("Sub", x, context.op("Unsqueeze", mean, [1, 2]))
    total = channel_sums(context, dy)
    dscale = context.op("Mul", channel_sums(context, context.op("Mul", dy, centred)), inverse)
    dx = None
    if context.wants(node, 0):
        slope = context.op("Mul", scale, inverse)
        share = context.op("Div", slope, count)
        tilt = context.op("Mul", context.op("Mul", share, inverse), dscale)
        level = context.op("Mul", share, total)
        channels = _channels(context, x)
        zeros, ones = np.zeros(channels, np.float32), np.ones(channels, np.float32)
        run = context.op("Reshape", centred, np.array([1, channels, -1], np.int64))
        bracket = context.op("BatchNormalization", run, tilt, level, zeros, ones, epsilon=0.0)
        bracket = context.op("Reshape", bracket, np.array([channels, int(context.shape(x)[1] or 0), -1], np.int64))
        dx = context.op("Sub", context.op("Mul", dy, context.op("Unsqueeze", slope, [1, 2])), bracket)
    return [dx, dscale, total, None, None]


@lowering("ChannelMean")
def mean_forward(context: Context, node: NodeProto) -> None:
    averages = context.op("ReduceMean", node.input[0], [1], keepdims=0)
    turned = context.op("Transpose", averages, perm=[1, 0])
    trailing = [1] * (len(context.shape(node.output[0])) - 2)
    shape = np.array([-1, _channels(context, node.input[0]), *trailing], np.int64)
    context.ops("Reshape", [node.output[0]], turned, shape)


@rule("ChannelMean")
def mean(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    channels, pixels, _ = context.shape(node.input[0])
    share = context.op("Mul", str(upstream[0]), 1.0 / int(pixels or 1))
    flat = context.op("Reshape", share, np.array([-1, int(channels or 0)], np.int64))
    rows = context.op("Unsqueeze", context.op("Transpose", flat, perm=[1, 0]), [1])
    return [context.op("Expand", rows, np.array([1, pixels, 1], np.int64))]
