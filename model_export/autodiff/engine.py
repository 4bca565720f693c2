"""Compile-time reverse-mode differentiation: a forward graph becomes a training graph of standard ONNX operators.

The forward nodes are copied (or written in a form that keeps what the gradient needs, see `lowering`), then walked
backwards; each operator's rule writes the nodes of its gradient. Only what leads from the loss to a trainable
parameter is written, so the backward part ends at the boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto

from model_export.autodiff.fewer_passes import GELU
from model_export.autodiff.registry import find_lowering, find_rule
from model_export.errors import MissingRule
from model_export.graph import Emitter, Graph, Operand, Shape, inputs_with_subgraphs, module_of, optional_input

# Copies of a tensor in another arrangement are made again for the backward pass: making them costs little, and keeping
# them costs memory. (ResNet20 at batch 32: 81 MB of values alive at once with them kept, 53 without.)
COPIES = ("Pad", "Gather", "Transpose")

# Of one direction of a recurrent node, the names of the outputs of its first steps (or nothing), and of the states.
Head = tuple[str, list[str]]

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


class Blend(NamedTuple):
    """How a batch moves a running statistic."""

    name: str
    new: str  # of this batch
    keep: float  # the part of the old value that stays


class Context:
    """What a rule sees: known shapes and constants, and the means to write nodes."""

    def __init__(
        self,
        emitter: Emitter,
        shapes: Mapping[str, Shape],
        constants: Mapping[str, np.ndarray],
        active: set[str],
        last_steps: int | None = None,
        dropout_numbers: Mapping[str, int] | None = None,
        fixed_rows: Mapping[str, int] | None = None,
        heads: Mapping[str, Sequence[Head]] | None = None,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        self.emitter = emitter
        self.op = emitter.op
        self.ops = emitter.ops
        self.constant = emitter.constant
        self.shapes = dict(shapes)
        self.constants = constants
        self.active = active
        self.last_steps = last_steps
        self.dropout_numbers = dropout_numbers or {}  # by output: which dropout of the whole model
        self.fixed_rows = fixed_rows or {}  # by weight: the row that looking up does not train (padding)
        self.heads = heads or {}  # by recurrent node: what its first steps gave, if that is known beforehand
        self.parts = parts or {}  # by scope: in how many parts the tiles of a convolution go through
        self.saved: dict[str, Any] = {}  # by first output: what a lowering keeps for its rule
        self.channel_scales: dict[
            str, str
        ] = {}  # gradients that still lack a factor per channel, which their reader knows
        self.weighed: dict[str, tuple[str, str]] = {}  # gradient of weights -> (rows that they weighed, their gradient)
        self.remakes: dict[str, Callable[[], str]] = {}  # copies of the graph's input: how to make another
        self.blends: list[Blend] = []  # of running statistics, in the order of the nodes
        self.new_statistics: dict[str, str] = {}  # statistic -> value that replaces it

    def shape(self, name: str) -> Shape:
        return self.shapes[name]

    def rank(self, name: str) -> int:
        return len(self.shapes[name])

    def static(self, name: str | None) -> np.ndarray | None:
        """The value of a constant, None if it is not one."""
        return self.constants.get(name) if name else None

    def wants(self, node: NodeProto, index: int) -> bool:
        """Whether the gradient of an input is needed."""
        name = optional_input(node, index)
        return name is not None and name in self.active

    def shape_operand(self, name: str) -> Operand:
        """The shape of a value as an operand: a constant with one -1 where possible, else computed at run time."""
        shape = self.shape(name)
        if shape.count(None) <= 1 and 0 not in shape:
            return np.array([-1 if dim is None else dim for dim in shape], np.int64)
        return self.op("Shape", name)

    def runtime_shape(self, name: str) -> Operand:
        """The shape of a value with true sizes, for operators that do not understand -1."""
        shape = self.shape(name)
        return self.op("Shape", name) if None in shape else np.array(shape, np.int64)

    def reshape_like(self, value: str, name: str) -> str:
        """`value` in the shape of `name`."""
        return self.op("Reshape", value, self.shape_operand(name))

    def sum_to(self, value: str, value_shape: Shape, name: str) -> str:
        """The gradient of broadcasting: sum `value` over every dimension that `name` did not have."""
        target = self.shape(name)
        extra = len(value_shape) - len(target)
        inner = [i + extra for i, dim in enumerate(target) if dim == 1 and value_shape[i + extra] != 1]
        if inner:
            value = self.op("ReduceSum", value, inner, keepdims=1)
        if extra:
            value = self.op("ReduceSum", value, list(range(extra)), keepdims=0)
        return value

    def count(self, name: str, axes: Iterable[int]) -> str | float:
        """How many elements some axes span: a number, or computed at run time if the batch is among them."""
        dims = [self.shape(name)[axis] for axis in axes]
        if None not in dims:
            return float(math.prod(d for d in dims if d is not None))
        parts = self.op("Gather", self.op("Shape", name), list(axes), axis=0)
        return self.op("Cast", self.op("ReduceProd", parts, keepdims=0), to=FLOAT)


def active_values(
    nodes: Sequence[NodeProto], trainable: Iterable[str], dtypes: Mapping[str, np.dtype[Any]] | None = None
) -> set[str]:
    """Values that depend on a trainable parameter; given types, only through real numbers."""
    active = set(trainable)
    for node in nodes:
        if any(name in active for name in inputs_with_subgraphs(node)):
            active.update(n for n in node.output if n and (dtypes is None or dtypes[n].kind == "f"))
    return active


def has_every_rule(graph: Graph) -> bool:
    """Whether all operators on the way of a gradient have one, also those that no boundary trains."""
    active = active_values(graph.nodes, graph.weights, graph.dtypes)
    reached = {graph.output}
    for node in reversed(graph.nodes):
        if any(name in reached and name in active for name in node.output):
            if find_rule(node.op_type) is None:
                return False
            reached.update(node.input)
    return True


def write_forward(context: Context, nodes: Sequence[NodeProto]) -> None:
    """The forward part: nodes as they are, or in the form their operator's lowering gives them."""
    for node in nodes:
        with context.emitter.scope(f"forward/{module_of(node)}"):
            lowering = find_lowering(node.op_type)
            if lowering and (_has_no_plain_form(node) or any(name in context.active for name in node.output)):
                lowering(context, node)
            else:
                with context.emitter.scope("forward"):
                    context.emitter.copy(node)
    with context.emitter.scope("forward/statistics"):
        _write_statistics(context)


def _write_statistics(context: Context) -> None:
    """Move the running statistics of all batch norms together: a few nodes instead of three for each vector."""
    waiting, context.blends = context.blends, []
    while waiting:
        now: dict[str, Blend] = {}
        later = []
        for blend in waiting:
            if blend.name in now:  # a layer that is used twice moves them twice
                later.append(blend)
            else:
                now[blend.name] = blend
        context.new_statistics |= _blended(context, list(now.values()))
        waiting = later


def _blended(context: Context, blends: Sequence[Blend]) -> dict[str, str]:
    """Blend vectors that lie one behind the other, and take the result apart."""
    sizes = [int(context.shape(blend.name)[0] or 0) for blend in blends]
    keep = np.repeat(np.array([blend.keep for blend in blends], np.float32), sizes)
    old = context.op("Concat", *(context.new_statistics.get(b.name, b.name) for b in blends), axis=0)
    new = context.op("Concat", *(blend.new for blend in blends), axis=0)
    blended = context.op("Add", context.op("Mul", old, keep), context.op("Mul", new, 1 - keep))
    return dict(zip((b.name for b in blends), context.ops("Split", len(blends), blended, sizes, axis=0), strict=True))


def _has_no_plain_form(node: NodeProto) -> bool:
    """Operators of layout.py are ours alone; batch norm and random numbers of ONNX are not what PyTorch computes."""
    own = ("Pixel", "Channel", "Random", GELU)
    return node.op_type in ("BatchNormalization", "Dropout") or node.op_type.startswith(own)


def write_backward(
    context: Context, nodes: Sequence[NodeProto], seeds: Mapping[str, str], trainable: Iterable[str]
) -> dict[str, str]:
    """The backward part: gradient of each trainable parameter, given gradients of the last values."""
    context.emitter.forget(*COPIES)
    collected: dict[str, list[str]] = {name: [value] for name, value in seeds.items()}

    def total(name: str) -> str | None:
        parts = collected.pop(name, [])
        if len(parts) < 2:
            return parts[0] if parts else None
        return context.op("Sum", *parts) if len(parts) > 2 else context.op("Add", *parts)

    for node in reversed(nodes):
        if not any(name in collected for name in node.output) or not any(n in context.active for n in node.output):
            continue
        with context.emitter.scope(f"backward/{module_of(node)}"):
            upstream = [total(name) for name in node.output]
            rule = find_rule(node.op_type)
            if rule is None:
                raise MissingRule(node.op_type, node.name, module_of(node))
            for index, gradient in enumerate(rule(context, _reading_again(context, node), upstream)):
                if gradient is not None and context.wants(node, index):
                    collected.setdefault(node.input[index], []).append(gradient)
    gradients = {}
    for name in trainable:
        with context.emitter.scope("backward"):
            value = total(name)
            gradients[name] = value if value is not None else _zeros_like(context, name)
    return gradients


def _reading_again(context: Context, node: NodeProto) -> NodeProto:
    """The node with each input that is only a copy of the graph's own input replaced by a second copy."""
    if not any(name in context.remakes for name in node.input):
        return node
    twin = NodeProto()
    twin.CopyFrom(node)
    for index, name in enumerate(node.input):
        if name in context.remakes:
            twin.input[index] = again = context.remakes[name]()
            context.shapes[again] = context.shapes[name]
    return twin


def _zeros_like(context: Context, name: str) -> str:
    """A parameter that the loss does not depend on."""
    return context.op("ConstantOfShape", context.runtime_shape(name))
