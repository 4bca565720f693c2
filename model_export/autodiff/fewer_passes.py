"""Forward nodes rewritten before they are differentiated, so that large tensors are passed over less often.

scaled products    (a b) * s becomes (a * s) b or a (b * s): attention scales its queries instead of its scores
ExactGelu          x * (1 + erf(x / sqrt 2)) / 2 as one operator, which has a shorter gradient (rules/activation.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import NodeProto, helper

from model_export.graph import Shape, count_readers, producers

GELU = "ExactGelu"


def rewrite(
    nodes: Sequence[NodeProto],
    result: str,
    shapes: Mapping[str, Shape],
    constants: Mapping[str, np.ndarray],
    active: set[str],
) -> tuple[list[NodeProto], dict[str, Shape], set[str]]:
    """The same computation in nodes that are read only here: (nodes, shapes, active values)."""
    forward = _Forward(nodes, result, shapes, constants, active)
    for node in nodes:
        if node.op_type in ("Mul", "Div") and node.output[0] in active:
            forward.make_gelu(node)
            forward.scale_operand(node)
    return forward.nodes, forward.shapes, forward.active


class _Forward:
    def __init__(
        self,
        nodes: Sequence[NodeProto],
        result: str,
        shapes: Mapping[str, Shape],
        constants: Mapping[str, np.ndarray],
        active: set[str],
    ) -> None:
        self.nodes = list(nodes)
        self.shapes = dict(shapes)
        self.active = set(active)
        self._constants = constants
        self._makers = producers(nodes)
        self._uses = count_readers(nodes, result)

    def scale_operand(self, node: NodeProto) -> None:
        """Move a factor behind a product of matrices to the smaller operand, where that is smaller than the product."""
        factor = self._number(node)
        product = self._alone(node.input[0] if factor == node.input[1] else node.input[1], "MatMul")
        if factor is None or product is None or (node.op_type == "Div" and factor == node.input[0]):
            return
        least = min(product.input, key=lambda name: _weight(self.shapes[name]))
        if len(self.shapes[least]) < 3 or _weight(self.shapes[least]) >= _weight(self.shapes[node.output[0]]):
            return
        scaled = f"{node.output[0]}.scaled"
        inputs = [scaled if name == least else name for name in product.input]
        self.shapes[scaled] = self.shapes[least]
        if least in self.active:
            self.active.add(scaled)
        scaling = helper.make_node(node.op_type, [least, factor], [scaled], name=f"{node.name}_operand")
        self._replace(
            node, [product], [scaling, helper.make_node("MatMul", inputs, [node.output[0]], name=product.name)]
        )

    def make_gelu(self, node: NodeProto) -> None:
        """Recognise x * (1 + erf(x / sqrt 2)) * 0.5, whichever of the three is multiplied first."""
        found = self._factors(node)
        if found is None:
            return
        names, inner = found
        halves = [name for name in names if self._is(name, 0.5)]
        sums = [name for name in names if self._alone(name, "Add") is not None]
        if len(halves) != 1 or len(sums) != 1:
            return
        added = self._makers[sums[0]]
        erfs = [erf for erf in map(lambda name: self._alone(name, "Erf"), added.input) if erf is not None]
        x = next(name for name in names if name not in (halves[0], sums[0]))
        if len(erfs) != 1 or not any(self._is(name, 1.0) for name in added.input):
            return
        scaled = self._makers.get(erfs[0].input[0])
        if scaled is None or scaled.op_type not in ("Div", "Mul") or scaled.input[0] != x or not self._once(scaled):
            return
        if self._is(scaled.input[1], math.sqrt(2.0) if scaled.op_type == "Div" else math.sqrt(0.5)):
            gelu = helper.make_node(GELU, [x], [node.output[0]], name=node.name)
            self._replace(node, [scaled, erfs[0], added, *inner], [gelu])

    def _factors(self, node: NodeProto) -> tuple[list[str], list[NodeProto]] | None:
        """Of a product of three: (the factors, the node of the first product)."""
        if node.op_type != "Mul":
            return None
        for one, other in (node.input, reversed(node.input)):
            inner = self._alone(one, "Mul")
            if inner is not None:
                return [*inner.input, other], [inner]
        return None

    def _number(self, node: NodeProto) -> str | None:
        return next((n for n in node.input if n in self._constants and self._constants[n].size == 1), None)

    def _is(self, name: str, value: float) -> bool:
        known = self._constants.get(name)
        return known is not None and known.size == 1 and math.isclose(float(known.reshape(())), value, rel_tol=1e-6)

    def _alone(self, name: str, op_type: str) -> NodeProto | None:
        """The node of a type that makes a value with a single reader."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type == op_type and self._once(node) else None

    def _once(self, node: NodeProto) -> bool:
        return self._uses.get(node.output[0], 0) == 1

    def _replace(self, last: NodeProto, others: Sequence[NodeProto], new: Sequence[NodeProto]) -> None:
        place = self.nodes.index(last)
        gone = {id(node) for node in (last, *others)}
        self.nodes = [
            item
            for number, node in enumerate(self.nodes)
            for item in ([*new] if number == place else [] if id(node) in gone else [node])
        ]
        self._makers |= producers(new)


def _weight(shape: Shape) -> int:
    """The size for one sample."""
    return math.prod(dim or 1 for dim in shape)
