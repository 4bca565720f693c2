"""Activation functions."""

from __future__ import annotations

import math

from onnx import NodeProto

from model_export.autodiff.engine import FLOAT, Context
from model_export.autodiff.fewer_passes import GELU
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.graph import attribute, optional_input

# Turns HardSigmoid into a step, the fastest comparison of floats that onnxruntime has. A power of two, so that scaling
# by it is exact.
STEEP = 2.0**100


@rule("Relu")
def relu(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The mask 0 / 1 comes from a very steep HardSigmoid: ten times faster in onnxruntime than comparing."""
    mask = context.op("HardSigmoid", node.output[0], alpha=STEEP, beta=0.0)
    return [context.op("Mul", str(upstream[0]), mask)]


@rule("LeakyRelu")
def leaky_relu(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy = str(upstream[0])
    small = context.op("Mul", dy, float(attribute(node, "alpha", 0.01)))
    return [context.op("Where", context.op("Greater", node.input[0], 0.0), dy, small)]


@rule("PRelu")
def prelu(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    x, slope = node.input
    dy = str(upstream[0])
    positive = context.op("Greater", x, 0.0)
    dx = context.op("Where", positive, dy, context.op("Mul", dy, slope)) if context.wants(node, 0) else None
    dslope = None
    if context.wants(node, 1):
        negative_part = context.op("Where", positive, 0.0, context.op("Mul", dy, x))
        dslope = context.sum_to(negative_part, context.shape(x), slope)
    return [dx, dslope]


@rule("Elu")
def elu(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy, y = str(upstream[0]), node.output[0]
    slope = context.op("Add", y, float(attribute(node, "alpha", 1.0)))  # alpha * exp(x) = y + alpha below zero
    return [context.op("Where", context.op("Greater", node.input[0], 0.0), dy, context.op("Mul", dy, slope))]


@rule("Sigmoid")
def sigmoid(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    y = node.output[0]
    return [context.op("Mul", context.op("Mul", str(upstream[0]), y), context.op("Sub", 1.0, y))]


@rule("Tanh")
def tanh(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    y = node.output[0]
    return [context.op("Mul", str(upstream[0]), context.op("Sub", 1.0, context.op("Mul", y, y)))]


@rule("Softplus")
def softplus(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Mul", str(upstream[0]), context.op("Sigmoid", node.input[0]))]


@rule("HardSigmoid")
def hard_sigmoid(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """alpha where the line is strictly between 0 and 1."""
    y = node.output[0]
    inside = context.op("And", context.op("Greater", y, 0.0), context.op("Less", y, 1.0))
    return [context.op("Where", inside, context.op("Mul", str(upstream[0]), float(attribute(node, "alpha", 0.2))), 0.0)]


@rule("Clip")
def clip(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """1 between the bounds. Constant bounds make very steep ramps, as in `relu`: two, or one above zero (ReLU6)."""
    x = node.input[0]
    bounds = [context.static(optional_input(node, index)) for index in (1, 2)]
    if all(bound is not None and abs(float(bound)) < 1e6 for bound in bounds):
        low, high = (float(bound) for bound in bounds if bound is not None)
        y = node.output[0]  # tells as much as x, which nothing else may need
        if low == 0.0:
            # ThresholdedRelu turns the upper bound into zero, like the lower one: a Neg instead of a Mul of two masks.
            negative = context.op("ThresholdedRelu", context.op("Neg", y), alpha=-high)
            mask = context.op("HardSigmoid", negative, alpha=-STEEP, beta=0.0)
            return [context.op("Mul", str(upstream[0]), mask)]
        above = context.op("HardSigmoid", y, alpha=STEEP, beta=-low * STEEP)
        below = context.op("HardSigmoid", y, alpha=-STEEP, beta=high * STEEP)
        return [context.op("Mul", str(upstream[0]), context.op("Mul", above, below))]
    inside = None
    for index, compare in ((1, "GreaterOrEqual"), (2, "LessOrEqual")):
        bound = optional_input(node, index)
        if bound:
            part = context.op(compare, x, bound)
            inside = context.op("And", inside, part) if inside else part
    if inside is None:
        return [upstream[0]]
    return [context.op("Where", inside, str(upstream[0]), 0.0)]


@lowering(GELU)
def gelu_forward(context: Context, node: NodeProto) -> None:
    """x times the normal distribution below x; HardSigmoid adds and multiplies in one pass, and never clips here."""
    x = node.input[0]
    below = context.op("HardSigmoid", context.op("Erf", context.op("Mul", x, math.sqrt(0.5))), alpha=0.5, beta=0.5)
    context.saved[node.output[0]] = below
    context.ops("Mul", [node.output[0]], x, below)


@rule(GELU)
def gelu(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The normal distribution below x, plus x times its density."""
    x = node.input[0]
    density = context.op("Exp", context.op("Mul", x, context.op("Mul", x, -0.5)))
    moved = context.op("Mul", context.op("Mul", x, 1.0 / math.sqrt(2.0 * math.pi)), density)
    return [context.op("Mul", str(upstream[0]), context.op("Add", context.saved[node.output[0]], moved))]


@rule("Softmax")
def softmax(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Where the probabilities only weigh rows, the sum over them is that over the weighed rows, which are shorter."""
    y = node.output[0]
    known = context.weighed.get(str(upstream[0]))
    if known is not None and int(attribute(node, "axis", -1)) % context.rank(y) == context.rank(y) - 1:
        rows, gradient = known
        total = context.op("ReduceSum", context.op("Mul", gradient, rows), [-1], keepdims=1)
        return [context.op("Mul", y, context.op("Sub", str(upstream[0]), total))]
    weighted = context.op("Mul", str(upstream[0]), y)
    total = context.op("ReduceSum", weighted, [int(attribute(node, "axis", -1))], keepdims=1)
    return [context.op("Sub", weighted, context.op("Mul", y, total))]


@rule("LogSoftmax")
def log_softmax(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy = str(upstream[0])
    total = context.op("ReduceSum", dy, [int(attribute(node, "axis", -1))], keepdims=1)
    return [context.op("Sub", dy, context.op("Mul", context.op("Exp", node.output[0]), total))]


@rule("HardSwish")
def hard_swish(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """x * clip(x / 6 + 1 / 2, 0, 1): 0 below -3, 1 above 3, x / 3 + 1 / 2 between."""
    x = node.input[0]
    line = context.op("Add", context.op("Mul", x, 1.0 / 3.0), 0.5)
    above = context.op("Cast", context.op("Greater", x, 3.0), to=FLOAT)
    inside = context.op("LessOrEqual", context.op("Abs", x), 3.0)
    return [context.op("Mul", str(upstream[0]), context.op("Where", inside, line, above))]
