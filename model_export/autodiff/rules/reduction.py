"""Reductions over axes."""

from __future__ import annotations

from onnx import NodeProto

from model_export.autodiff.engine import FLOAT, Context
from model_export.autodiff.registry import Gradients, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.graph import attribute, optional_input


def _axes(context: Context, node: NodeProto) -> list[int]:
    """The reduced axes, non-negative; since opset 18 they are an input for all reductions."""
    rank = context.rank(node.input[0])
    given = context.static(optional_input(node, 1))
    if given is None or given.size == 0:
        return [] if attribute(node, "noop_with_empty_axes", 0) else list(range(rank))
    return sorted(int(axis) % rank for axis in given)


def _kept(context: Context, node: NodeProto, value: str, axes: list[int]) -> str:
    """`value` with the reduced axes back as dimensions of size one."""
    return value if attribute(node, "keepdims", 1) or not axes else context.op("Unsqueeze", value, axes)


def _spread(context: Context, node: NodeProto, value: str) -> str:
    return context.op("Expand", value, context.runtime_shape(node.input[0]))


@rule("ReduceSum")
def reduce_sum(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return [_spread(context, node, _kept(context, node, str(upstream[0]), _axes(context, node)))]


@rule("ReduceMean")
def reduce_mean(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    axes = _axes(context, node)
    small = context.op("Div", str(upstream[0]), context.count(node.input[0], axes))
    return [_spread(context, node, _kept(context, node, small, axes))]


@rule("ReduceMax", "ReduceMin")
def reduce_extremum(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Equal extrema share the gradient, as PyTorch's amax and amin do."""
    axes = _axes(context, node)
    if not axes:  # noop_with_empty_axes
        return [upstream[0]]
    chosen = context.op("Equal", node.input[0], _kept(context, node, node.output[0], axes))
    mask = context.op("Cast", chosen, to=FLOAT)
    dy = _kept(context, node, str(upstream[0]), axes)
    share = context.op("Div", dy, context.op("ReduceSum", mask, axes, keepdims=1))
    return [context.op("Mul", mask, share)]


@rule("ReduceSumSquare")
def reduce_sum_square(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy = _kept(context, node, str(upstream[0]), _axes(context, node))
    return [context.op("Mul", node.input[0], context.op("Mul", dy, 2.0))]


@rule("ReduceL2")
def reduce_l2(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """A norm of zero has slope zero, as in PyTorch."""
    axes, y = _axes(context, node), node.output[0]
    safe = context.op("Where", context.op("Greater", y, 0.0), y, 1.0)
    ratio = context.op("Div", str(upstream[0]), safe)
    return [context.op("Mul", node.input[0], _kept(context, node, ratio, axes))]


@rule("ReduceL1")
def reduce_l1(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    dy = _kept(context, node, str(upstream[0]), _axes(context, node))
    return [context.op("Mul", context.op("Sign", node.input[0]), dy)]


@rule("ReduceLogSumExp")
def reduce_log_sum_exp(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The softmax of the reduced axes."""
    axes = _axes(context, node)
    above = context.op("Sub", node.input[0], _kept(context, node, node.output[0], axes))
    return [context.op("Mul", context.op("Exp", above), _kept(context, node, str(upstream[0]), axes))]


@rule("ReduceProd")
def reduce_prod(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The product of the others, which a zero among them makes zero."""
    x, axes = node.input[0], _axes(context, node)
    if not axes:  # noop_with_empty_axes
        return [upstream[0]]
    is_zero = context.op("Cast", context.op("Equal", x, 0.0), to=FLOAT)
    safe = context.op("Add", x, is_zero)
    others = context.op("Div", context.op("ReduceProd", safe, axes, keepdims=1), safe)
    zeros = context.op("ReduceSum", is_zero, axes, keepdims=1)
    alone = context.op("Cast", context.op("Equal", zeros, is_zero), to=FLOAT)
    dy = _kept(context, node, str(upstream[0]), axes)
    return [context.op("Mul", context.op("Mul", others, alone), dy)]
