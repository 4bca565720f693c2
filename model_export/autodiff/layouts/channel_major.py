"""Channel-major operators, [channels, pixels, N]: lowerings and gradients. layout.py decides where they are used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.layouts.planes import (
    apply_matrices,
    channel_parts,
    forward_plan,
    gather_taps,
    gradient_plan,
    join_channels,
    plane_order,
    take_channels,
    take_tiles,
    tile_products,
    write_matrices,
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


def _bias_gradient(context: Context, node: NodeProto, dy: str, scale: str | None) -> str | None:
    if not context.wants(node, 2):
        return None
    total = channel_sums(context, dy)
    return context.op("Mul", total, scale) if scale else total


# When batch norm goes through the product in front of it: so many results for each row of the input, and so many pixels
# that what it saves on them, even in small batches, is more than the products of weights take.
EXPANSION, ROWS_SQUARED = 3, 128


@dataclass(frozen=True)
class _Product:
    """A convolution as a product, and what batch norm behind it may do without its large result."""

    columns: str  # [rows, pixels * N]
    weight: str
    rows: int
    features: int
    pixels: int
    has_bias: bool

    @property
    def expands(self) -> bool:
        wide = self.features >= EXPANSION * self.rows and self.rows**2 <= ROWS_SQUARED * self.pixels
        return wide and not self.has_bias


@dataclass(frozen=True)
class _NormedProduct:
    """What batch norm leaves to the product in front of it: dy passes on as it is, with a linear map in its place.

    Of the product's true upstream gradient, slope * dy - tilt * centred product - level, nothing is ever written down.
    """

    centred: str  # the columns, less their mean
    met: str  # [features, rows]: dy times the centred columns
    slope: str  # [features, 1]
    tilt: str
    level: str


@lowering("ChannelConv")
def conv_forward(context: Context, node: NodeProto) -> None:
    """1x1 kernels, and the first convolution of a network: gather what the taps meet, then one product."""
    features = _channels(context, node.input[1])
    size, out = _size(node), _size(node, "out")
    met = places_in(plane_order(size))[tap_pixels(node, size, out, plane_order(out))]
    taken = pick(context, node.input[0], met, size[0] * size[1], axis=1)
    rows = _channels(context, node.input[0]) * math.prod(attribute(node, "kernel_shape"))
    columns = _matrix(context, taken, rows)
    has_bias = optional_input(node, 2) is not None
    context.saved[node.output[0]] = _Product(columns, node.input[1], rows, features, math.prod(out), has_bias)
    product = context.op("MatMul", _matrix(context, node.input[1], features), columns)
    image = context.op("Reshape", product, np.array([features, out[0] * out[1], -1], np.int64))
    _write_with_bias(context, node, image)


@rule("ChannelConv")
def conv(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The gradient of the input is asked for with 1x1 kernels only; layout.py sees to that."""
    weight, dy, saved = node.input[1], str(upstream[0]), context.saved[node.output[0]]
    features = _channels(context, weight)
    flat, matrix = _matrix(context, dy, features), _matrix(context, weight, features)
    if isinstance(saved, _NormedProduct):
        return _normed_gradients(context, node, flat, matrix, saved)
    scale = context.channel_scales.get(dy)
    dx = dw = None
    if context.wants(node, 1):
        product = context.op("Gemm", flat, saved.columns, transB=1)
        dw = context.reshape_like(_scaled(context, product, scale), weight)
    if context.wants(node, 0):
        turned = context.op("Transpose", _scaled(context, matrix, scale), perm=[1, 0])
        dx = _spread_back(context, node, context.op("MatMul", turned, flat))
    return [dx, dw, _bias_gradient(context, node, dy, scale)]


def _normed_gradients(context: Context, node: NodeProto, dy: str, matrix: str, normed: _NormedProduct) -> Gradients:
    """Gradients of a product and the batch norm behind it: the norm's part is a product of the narrow side alone."""
    tilted = context.op("Mul", matrix, normed.tilt)
    dx = dw = None
    if context.wants(node, 1):
        gram = context.op("Gemm", normed.centred, normed.centred, transB=1)
        own = context.op("Mul", normed.met, normed.slope)
        dw = context.reshape_like(context.op("Sub", own, context.op("MatMul", tilted, gram)), node.input[1])
    if context.wants(node, 0):
        inner = context.op("Gemm", matrix, tilted, transA=1, alpha=-1.0)
        level = context.op("Gemm", matrix, normed.level, transA=1, alpha=-1.0)
        rest = context.op("Gemm", inner, normed.centred, level)
        dx = _spread_back(
            context, node, context.op("Gemm", context.op("Mul", matrix, normed.slope), dy, rest, transA=1)
        )
    return [dx, dw, None]


def _spread_back(context: Context, node: NodeProto, columns: str) -> str:
    """[C, met pixels * N] -> [C, pixels, N]: what a 1x1 kernel did not meet has no gradient."""
    size, out = _size(node), _size(node, "out")
    image = context.op("Reshape", columns, np.array([_channels(context, node.input[0]), out[0] * out[1], -1], np.int64))
    met = places_in(plane_order(size))[tap_pixels(node, size, out, plane_order(out))]
    source = np.full(size[0] * size[1], len(met), np.int64)
    source[met] = np.arange(len(met))
    return pick(context, image, source, len(met), axis=1)


def _scaled(context: Context, matrix: str, scale: str | None) -> str:
    """Multiply the rows of a small matrix by a factor that batch norm left out of a large gradient."""
    return context.op("Mul", matrix, context.op("Unsqueeze", scale, [1])) if scale else matrix


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
    x, channels, plan = node.input[0], _channels(context, node.input[0]), forward_plan(_window(node))
    matrices = write_matrices(context, node.input[1], plan, channels)
    images = []
    for part in channel_parts(plan, channels):
        held = part[1] - part[0]
        tiles = take_tiles(context, take_channels(context, x, channels, part), plan, held)
        own = take_channels(context, matrices, channels, part)
        images.append(apply_matrices(context, tiles, own, plan, held))
    _write_with_bias(context, node, join_channels(context, images))


@rule("ChannelDepthwise")
def depthwise(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Both gradients meet the same tiles of dy: those of x are neither kept nor collected again."""
    x, weight, dy = node.input[0], node.input[1], str(upstream[0])
    channels, plan = _channels(context, x), gradient_plan(_window(node))
    scale = context.channel_scales.get(dy)
    images, products = [], []
    if context.wants(node, 0):
        kernel = _scaled(context, _matrix(context, weight, channels), scale)
        matrices = write_matrices(context, kernel, plan, channels)
    for part in channel_parts(plan, channels):
        held = part[1] - part[0]
        tiles = take_tiles(context, take_channels(context, dy, channels, part), plan, held)
        if context.wants(node, 1):
            own = take_channels(context, x, channels, part)
            products.append(tile_products(context, tiles, own, plan, held))
        if context.wants(node, 0):
            own = take_channels(context, matrices, channels, part)
            images.append(apply_matrices(context, tiles, own, plan, held))
    dx = join_channels(context, images) if images else None
    dw = None
    if products:
        taps = gather_taps(context, join_channels(context, products), plan)
        dw = context.reshape_like(_scaled(context, taps, scale), weight)
    return [dx, dw, _bias_gradient(context, node, dy, scale)]


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
    context.saved[node.output[0]] = _Normed(batch_mean, batch_variance, inverse, count, epsilon)


@dataclass(frozen=True)
class _Normed:
    """Statistics of a batch, by channel."""

    mean: str
    variance: str
    inverse: str  # of the deviation
    count: str | float  # of numbers in a channel
    epsilon: float


@rule("ChannelBatchNorm")
def batch_norm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """dx = slope * (dy - (normal * mean(dy * normal) + mean(dy))), the bracket in one pass of the inference operator.

    With `fold` the convolution in front multiplies by the slope, in its small weights instead of this large tensor.
    """
    x, scale, dy = node.input[0], node.input[1], str(upstream[0])
    normed, product = context.saved[node.output[0]], context.saved.get(x)
    total = channel_sums(context, dy)
    if context.wants(node, 0) and attribute(node, "fold") and isinstance(product, _Product) and product.expands:
        return [dy, _through_product(context, node, dy, total, product), total, None, None]
    across = channel_sums(context, context.op("Mul", dy, x))
    dot = context.op("Sub", across, context.op("Mul", normed.mean, total))
    dscale = context.op("Mul", dot, normed.inverse)
    dx = None
    if context.wants(node, 0):
        tilt, level = (context.op("Div", value, normed.count) for value in (dscale, total))
        channels = _channels(context, x)
        run = context.op("Reshape", x, np.array([1, channels, -1], np.int64))
        bracket = context.op(
            "BatchNormalization", run, tilt, level, normed.mean, normed.variance, epsilon=normed.epsilon
        )
        bracket = context.op("Reshape", bracket, np.array([channels, int(context.shape(x)[1] or 0), -1], np.int64))
        dx = context.op("Sub", dy, bracket)
        slope = context.op("Mul", scale, normed.inverse)
        if attribute(node, "fold"):
            context.channel_scales[dx] = slope
        else:
            dx = context.op("Mul", dx, context.op("Unsqueeze", slope, [1, 2]))
    return [dx, dscale, total, None, None]


def _through_product(context: Context, node: NodeProto, dy: str, total: str, product: _Product) -> str:
    """Hand the gradient of batch norm on to the product in front of it; return the gradient of the scale.

    The product's result u = W a is wide and a narrow: sums of dy * u over pixels are those of W with dy * a, which the
    gradient of W needs anyway, so that no pass over u is left.
    """
    normed = context.saved[node.output[0]]
    matrix = _matrix(context, product.weight, product.features)
    mean = context.op("ReduceMean", product.columns, [1], keepdims=1)
    centred = context.op("Sub", product.columns, mean)
    met = context.op("Gemm", _matrix(context, dy, product.features), centred, transB=1)
    dot = context.op("ReduceSum", context.op("Mul", matrix, met), [1], keepdims=0)
    dscale = context.op("Mul", dot, normed.inverse)
    slope = context.op("Mul", node.input[1], normed.inverse)
    share = context.op("Div", slope, normed.count)
    tilt = context.op("Mul", context.op("Mul", share, normed.inverse), dscale)
    level = context.op("Mul", share, total)
    context.saved[node.input[0]] = _NormedProduct(
        centred, met, *(context.op("Unsqueeze", value, [1]) for value in (slope, tilt, level))
    )
    return dscale


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
