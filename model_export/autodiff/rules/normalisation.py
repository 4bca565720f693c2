"""Normalisation over the batch, a layer, or an instance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Blend, Context
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.graph import attribute

EPSILON = 1e-5


@lowering("BatchNormalization")
def batch_norm_forward(context: Context, node: NodeProto) -> None:
    """The new running variance is the unbiased one, as PyTorch has it; ONNX would blend in the biased one."""
    x, mean, variance = node.input[0], node.input[3], node.input[4]
    epsilon = float(attribute(node, "epsilon", EPSILON))
    _, batch_mean, batch_variance = training_statistics(context, x, node.input[1:], epsilon, node.output[0])
    count = context.count(x, [0, *range(2, context.rank(x))])
    unbias = unbiasing(context, count)
    blend_statistics(context, node, (mean, batch_mean), (variance, context.op("Mul", batch_variance, unbias)))
    context.saved[node.output[0]] = (batch_mean, batch_variance, count, epsilon)


def training_statistics(
    context: Context, x: str, parameters: Sequence[str], epsilon: float, result: str
) -> tuple[str, str, str]:
    """(`result`: x normalised, mean and biased variance of this batch) of an [N, C, ...] tensor.

    Momentum 0 makes the operator's "running" outputs the statistics of the batch alone.
    """
    scale, bias, mean, variance = parameters
    # onnxruntime writes the statistics over their inputs, which may be the caller's memory: give it copies that
    # nothing else reads, another use of the same layer included.
    earlier = {blend.name: blend.new for blend in context.blends}
    scratch = [context.op("Mul", earlier.get(name, name), 0.0) for name in (mean, variance)]
    outputs = context.ops(
        "BatchNormalization",
        [result, f"{result}.mean", f"{result}.variance"],
        x,
        scale,
        bias,
        *scratch,
        training_mode=1,
        momentum=0.0,
        epsilon=epsilon,
    )
    return outputs[0], outputs[1], outputs[2]


def unbiasing(context: Context, count: str | float) -> str:
    """n / (n - 1); a single value per channel has no variance, and must not make it NaN."""
    return context.op("Div", count, context.op("Max", context.op("Sub", count, 1.0), 1.0))


def blend_statistics(context: Context, node: NodeProto, *pairs: tuple[str, str]) -> None:
    """Note by how much running statistics move towards those of the batch; ONNX's momentum is the part that stays."""
    keep = float(attribute(node, "momentum", 0.9))
    context.blends += [Blend(name, new, keep) for name, new in pairs]


@rule("BatchNormalization")
def batch_norm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """dx = a * dy + b * (x - mean) + c with one a, b, c per channel."""
    x, scale = node.input[:2]
    dy = str(upstream[0])
    mean, variance, count, epsilon = context.saved[node.output[0]]
    rank = context.rank(x)
    axes = [0, *range(2, rank)]
    per_channel = np.array([-1, *[1] * (rank - 2)], np.int64)

    def spread(value: str) -> str:
        return context.op("Reshape", value, per_channel) if rank > 2 else value

    inverse = context.op("Reciprocal", context.op("Sqrt", context.op("Add", variance, epsilon)))
    centred = context.op("Sub", x, spread(mean))
    dbias = context.op("ReduceSum", dy, axes, keepdims=0)
    dot = context.op("ReduceSum", context.op("Mul", dy, centred), axes, keepdims=0)
    dscale = context.op("Mul", dot, inverse)
    dx = None
    if context.wants(node, 0):
        a = context.op("Mul", scale, inverse)
        b = context.op("Div", context.op("Mul", context.op("Mul", a, inverse), dscale), count)
        c = context.op("Div", context.op("Mul", a, dbias), count)
        moved = context.op("Add", context.op("Mul", centred, spread(b)), spread(c))
        dx = context.op("Sub", context.op("Mul", dy, spread(a)), moved)
    return [dx, dscale, dbias, None, None]


@lowering("LayerNormalization")
def layer_norm_forward(context: Context, node: NodeProto) -> None:
    """The operator's own optional outputs, mean and inverse deviation, are what the gradient needs."""
    extra = [f"{node.output[0]}.mean", f"{node.output[0]}.inverse"]
    context.ops(
        "LayerNormalization",
        [node.output[0], *extra],
        *node.input,
        axis=int(attribute(node, "axis", -1)),
        epsilon=float(attribute(node, "epsilon", EPSILON)),
    )
    context.saved[node.output[0]] = extra


@rule("LayerNormalization")
def layer_norm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    x, scale = node.input[:2]
    dy = str(upstream[0])
    mean, inverse = context.saved[node.output[0]]
    rank = context.rank(x)
    axes = list(range(int(attribute(node, "axis", -1)) % rank, rank))
    normal = context.op("Mul", context.op("Sub", x, mean), inverse)
    dscale = dbias = dx = None
    if context.wants(node, 1):
        dscale = context.sum_to(context.op("Mul", dy, normal), context.shape(x), scale)
    if context.wants(node, 2):
        dbias = context.sum_to(dy, context.shape(x), node.input[2])
    if context.wants(node, 0):
        dx = _through_normal(context, context.op("Mul", dy, scale), normal, inverse, axes)
    return [dx, dscale, dbias]


def _through_normal(context: Context, dnormal: str, normal: str, inverse: str, axes: list[int]) -> str:
    """Gradient of (x - mean(x)) * inverse with mean and inverse taken over `axes`."""
    level = context.op("ReduceMean", dnormal, axes, keepdims=1)
    slope = context.op("ReduceMean", context.op("Mul", dnormal, normal), axes, keepdims=1)
    rest = context.op("Sub", context.op("Sub", dnormal, level), context.op("Mul", normal, slope))
    return context.op("Mul", rest, inverse)


@rule("InstanceNormalization")
def instance_norm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The operator keeps no statistics; two reductions get them back."""
    x, scale = node.input[:2]
    dy = str(upstream[0])
    rank = context.rank(x)
    axes = list(range(2, rank))
    per_channel = np.array([-1, *[1] * (rank - 2)], np.int64)
    centred = context.op("Sub", x, context.op("ReduceMean", x, axes, keepdims=1))
    variance = context.op("ReduceMean", context.op("Mul", centred, centred), axes, keepdims=1)
    epsilon = float(attribute(node, "epsilon", EPSILON))
    inverse = context.op("Reciprocal", context.op("Sqrt", context.op("Add", variance, epsilon)))
    normal = context.op("Mul", centred, inverse)
    dscale = dbias = dx = None
    if context.wants(node, 1):
        dscale = context.op("ReduceSum", context.op("Mul", dy, normal), [0, *axes], keepdims=0)
    if context.wants(node, 2):
        dbias = context.op("ReduceSum", dy, [0, *axes], keepdims=0)
    if context.wants(node, 0):
        dnormal = context.op("Mul", dy, context.op("Reshape", scale, per_channel))
        known = context.static(scale)
        if known is not None and (known == 1).all():  # group norm as exporters write it
            dnormal = dy
        dx = _through_normal(context, dnormal, normal, inverse, axes)
    return [dx, dscale, dbias]
