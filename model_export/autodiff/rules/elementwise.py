"""Arithmetic on elements, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import FLOAT, Context
from model_export.autodiff.registry import Gradients, rule

Upstream = Sequence[str | None]


def _summed(context: Context, node: NodeProto, index: int, value: str) -> str:
    """Undo the broadcast of input `index`."""
    return context.sum_to(value, context.shape(node.output[0]), node.input[index])


@rule("Add", "Sum")
def add(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy = str(upstream[0])
    return [_summed(context, node, i, dy) if context.wants(node, i) else None for i in range(len(node.input))]


@rule("Sub")
def sub(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy = str(upstream[0])
    left = _summed(context, node, 0, dy) if context.wants(node, 0) else None
    right = context.op("Neg", _summed(context, node, 1, dy)) if context.wants(node, 1) else None
    return [left, right]


@rule("Mul")
def mul(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    a, b = node.input
    dy = str(upstream[0])
    left = _summed(context, node, 0, context.op("Mul", dy, b)) if context.wants(node, 0) else None
    right = _summed(context, node, 1, context.op("Mul", dy, a)) if context.wants(node, 1) else None
    return [left, right]


@rule("Div")
def div(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    b, y = node.input[1], node.output[0]
    scaled = context.op("Div", str(upstream[0]), b)
    left = _summed(context, node, 0, scaled) if context.wants(node, 0) else None
    right = None
    if context.wants(node, 1):
        right = context.op("Neg", _summed(context, node, 1, context.op("Mul", scaled, y)))
    return [left, right]


@rule("Mod")
def mod(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """a - trunc(a / b) * b, the truncated quotient being constant almost everywhere."""
    a, b = node.input
    dy = str(upstream[0])
    left = _summed(context, node, 0, dy) if context.wants(node, 0) else None
    right = None
    if context.wants(node, 1):
        quotient = context.op("Div", context.op("Sub", a, node.output[0]), b)
        right = context.op("Neg", _summed(context, node, 1, context.op("Mul", dy, context.op("Round", quotient))))
    return [left, right]


@rule("Floor", "Ceil", "Round", "Sign")
def flat(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Steps: no slope."""
    return [None]


@rule("Neg")
def neg(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Neg", str(upstream[0]))]


@rule("Pow")
def power(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    base, exponent = node.input
    y, dy = node.output[0], str(upstream[0])
    left = right = None
    known = context.static(exponent)
    if context.wants(node, 0):
        left = _summed(context, node, 0, context.op("Mul", dy, _power_slope(context, base, exponent, known)))
    if context.wants(node, 1):
        # x = 0 gives 0 for a positive exponent, where log(0) alone would give a NaN.
        positive = context.op("Greater", base, 0.0)
        log = context.op("Log", context.op("Where", positive, base, 1.0))
        right = _summed(context, node, 1, context.op("Mul", dy, context.op("Mul", y, log)))
    return [left, right]


def _power_slope(context: Context, base: str, exponent: str, known: np.ndarray | None) -> str:
    """d(x^p)/dx, without calling Pow for the everyday exponents."""
    if known is not None and known.size == 1:
        p = float(known.reshape(()))
        if p == 0.0:
            return context.op("Mul", base, 0.0)  # where 0 * x^-1 would be a NaN at x = 0
        if p == 2.0:
            return context.op("Mul", base, 2.0)
        if p == 3.0:
            return context.op("Mul", context.op("Mul", base, base), 3.0)
        return context.op("Mul", context.op("Pow", base, p - 1.0), p)
    real = context.op("Cast", exponent, to=FLOAT)
    return context.op("Mul", real, context.op("Pow", base, context.op("Sub", real, 1.0)))


@rule("Sqrt")
def sqrt(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Div", context.op("Mul", str(upstream[0]), 0.5), node.output[0])]


@rule("Reciprocal")
def reciprocal(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    y = node.output[0]
    return [context.op("Neg", context.op("Mul", str(upstream[0]), context.op("Mul", y, y)))]


@rule("Exp")
def exp(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Mul", str(upstream[0]), node.output[0])]


@rule("Log")
def log(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Div", str(upstream[0]), node.input[0])]


@rule("Abs")
def absolute(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Mul", str(upstream[0]), context.op("Sign", node.input[0]))]


@rule("Erf")
def erf(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    x = node.input[0]
    bell = context.op("Exp", context.op("Neg", context.op("Mul", x, x)))
    return [context.op("Mul", str(upstream[0]), context.op("Mul", bell, 2.0 / math.sqrt(math.pi)))]


@rule("Sin")
def sin(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Mul", str(upstream[0]), context.op("Cos", node.input[0]))]


@rule("Cos")
def cos(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [context.op("Neg", context.op("Mul", str(upstream[0]), context.op("Sin", node.input[0])))]


@rule("Where")
def where(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    condition, dy = node.input[0], str(upstream[0])
    left = right = None
    if context.wants(node, 1):
        left = _summed(context, node, 1, context.op("Where", condition, dy, 0.0))
    if context.wants(node, 2):
        right = _summed(context, node, 2, context.op("Where", condition, 0.0, dy))
    return [None, left, right]


@rule("Max", "Min")
def extremum(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The gradient goes to the chosen operand; equal operands share it, as in PyTorch."""
    y, dy = node.output[0], str(upstream[0])
    chosen = [context.op("Cast", context.op("Equal", name, y), to=FLOAT) for name in node.input]
    share = context.op("Div", dy, context.op("Sum", *chosen) if len(chosen) > 1 else chosen[0])
    return [
        _summed(context, node, i, context.op("Mul", share, mask)) if context.wants(node, i) else None
        for i, mask in enumerate(chosen)
    ]


@rule("Cast")
def cast(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Through a change of float type; casts to integers end the gradient (they are never active upstream)."""
    return [context.op("CastLike", str(upstream[0]), node.input[0])]


@rule("Identity")
def identity(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [upstream[0]]
