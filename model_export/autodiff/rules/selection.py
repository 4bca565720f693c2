"""Operators that take elements from places or put them there; their gradients do the opposite."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.errors import ExportError
from model_export.graph import attribute, module_of


def _zeros(context: Context, name: str) -> str:
    return context.op("ConstantOfShape", context.runtime_shape(name))


def _refuse(node: NodeProto, what: str) -> ExportError:
    return ExportError(f"node {node.name!r} (module {module_of(node)!r}): {node.op_type} {what} has no gradient here")


@rule("GatherElements")
def gather_elements(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Elements that were taken several times add up."""
    data, indices = node.input
    axis = int(attribute(node, "axis", 0))
    zeros = _zeros(context, data)
    return [context.op("ScatterElements", zeros, indices, str(upstream[0]), axis=axis, reduction="add"), None]


@rule("GatherND")
def gather_nd(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    data, indices = node.input
    batch = int(attribute(node, "batch_dims", 0))
    places = _with_batch(context, indices, batch) if batch else indices
    return [context.op("ScatterND", _zeros(context, data), places, str(upstream[0]), reduction="add"), None]


def _with_batch(context: Context, indices: str, batch: int) -> str:
    """Places within each sample as places in the whole tensor: the sample's own number comes first."""
    sizes = context.op("Shape", indices)
    rank = context.rank(indices)
    one = context.op("Concat", context.op("Slice", sizes, [0], [rank - 1]), [1], axis=0)
    numbers = []
    for axis in range(batch):
        size = context.op("Gather", sizes, context.constant(axis), axis=0)
        count = context.op("Range", context.constant(0), size, context.constant(1))
        column = np.array([-1 if i == axis else 1 for i in range(rank)], np.int64)
        numbers.append(context.op("Expand", context.op("Reshape", count, column), one))
    return context.op("Concat", *numbers, indices, axis=-1)


@rule("ScatterElements")
def scatter_elements(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    axis = int(attribute(node, "axis", 0))
    return _scattered(context, node, str(upstream[0]), "GatherElements", axis=axis)


@rule("ScatterND")
def scatter_nd(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    return _scattered(context, node, str(upstream[0]), "GatherND")


def _scattered(context: Context, node: NodeProto, dy: str, take: str, **attrs: int) -> Gradients:
    """What was put into a tensor gets the gradient of its places; what was there before gets none there."""
    _, indices, updates = node.input
    reduction = attribute(node, "reduction", "none")
    if reduction not in ("none", "add"):
        raise _refuse(node, f"with reduction={reduction}")
    left = right = None
    if context.wants(node, 0):
        left = dy
        if reduction == "none":
            left = context.op(node.op_type, dy, indices, _zeros(context, updates), **attrs)
    if context.wants(node, 2):
        right = context.op(take, dy, indices, **attrs)
    return [left, None, right]


@rule("TopK")
def top_k(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The chosen elements get the gradients of their values."""
    axis, zeros = int(attribute(node, "axis", -1)), _zeros(context, node.input[0])
    return [context.op("ScatterElements", zeros, node.output[1], str(upstream[0]), axis=axis), None]


@rule("Trilu")
def trilu(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The same triangle of the gradient."""
    upper = int(attribute(node, "upper", 1))
    return [context.op("Trilu", str(upstream[0]), *node.input[1:], upper=upper)]


@rule("CumSum")
def cumulative_sum(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """An element is in every sum from its own on: sum from the other end."""
    flags = {"exclusive": int(attribute(node, "exclusive", 0)), "reverse": 1 - int(attribute(node, "reverse", 0))}
    return [context.op("CumSum", str(upstream[0]), node.input[1], **flags), None]
