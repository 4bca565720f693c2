"""Random numbers of a model, drawn from the device's seed.

Noise stays `RandomNormalLike` or `RandomUniformLike`: training graphs write a hash of the seed (rules/dropout.py).
Where a model compares uniform numbers with a constant, as stochastic depth does, the result is a dropout of ones: in
frozen layers and in the finished model it is then its mean, and a layer that is left out at times has its true scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from model_export.errors import ExportError
from model_export.graph import attributes, module_of, producers

FIXED = {"RandomNormal": "RandomNormalLike", "RandomUniform": "RandomUniformLike"}
CASTS = ("Cast", "CastLike")


def seed_random(model: onnx.ModelProto) -> None:
    """Rewrite what draws numbers so that a seed reaches it; refuse what remains."""
    known = constants_of(model)
    maker = producers(model.graph.node)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type in FIXED:
            nodes += _as_like(node)
        elif node.op_type in ("Bernoulli", "Multinomial"):
            raise ExportError(
                f"node {node.name!r} (module {module_of(node)!r}) draws random numbers by {node.op_type}, which no "
                "seed of a device reaches; draw with torch.rand or torch.randn"
            )
        else:
            nodes += _comparison(node, maker, known) or [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def constants_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The values of initialisers and of Constant nodes."""
    known = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            known[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return known


def _as_like(node: NodeProto) -> list[NodeProto]:
    """A fixed shape as a tensor of that shape."""
    options = attributes(node)
    like = f"{node.output[0]}.like"
    zeros = numpy_helper.from_array(np.zeros(options.pop("shape"), np.float32))
    options.pop("seed", None)
    return [
        helper.make_node("Constant", [], [like], value=zeros),
        helper.make_node(FIXED[node.op_type], [like], list(node.output), node.name, **options),
    ]


def _comparison(
    node: NodeProto, maker: Mapping[str, NodeProto], known: Mapping[str, np.ndarray]
) -> list[NodeProto] | None:
    """Nodes for a number that is 1 where a uniform one is above a constant, else 0; None if this is something else."""
    inner = maker.get(node.input[0]) if node.input else None
    if inner is None or len(inner.input) != 2:
        return None
    found = _uniform_and_constant(inner, maker, known)
    if found is None:
        return None
    like, constant, first = found
    if node.op_type == "Floor" and inner.op_type == "Add":
        bound, below = 1.0 - constant, False
    elif node.op_type in CASTS and inner.op_type in COMPARISONS:
        bound, below = constant, COMPARISONS[inner.op_type] == first
    else:
        return None
    return _above(node, like, bound, below) if 0.0 <= bound < 1.0 else None


COMPARISONS = {"Less": True, "LessOrEqual": True, "Greater": False, "GreaterOrEqual": False}


def _uniform_and_constant(
    node: NodeProto, maker: Mapping[str, NodeProto], known: Mapping[str, np.ndarray]
) -> tuple[str, float, bool] | None:
    """(what the uniform numbers are like, the constant, whether the numbers come first)."""
    for index in (0, 1):
        drawn, other = maker.get(node.input[index]), known.get(node.input[1 - index])
        if drawn is None or drawn.op_type not in ("RandomUniformLike", "RandomUniform") or other is None:
            continue
        options = attributes(drawn)
        if other.size == 1 and options.get("low", 0.0) == 0.0 and options.get("high", 1.0) == 1.0:
            like = drawn.input[0] if drawn.input else f"{drawn.output[0]}.like"
            return like, float(other.reshape(-1)[0]), index == 0
    return None


def _above(node: NodeProto, like: str, bound: float, below: bool) -> list[NodeProto]:
    """Dropout of ones drops what is below the bound, and scales the rest by 1 / (1 - bound)."""
    y = node.output[0]

    def constant(name: str, value: float) -> NodeProto:
        return helper.make_node(
            "Constant", [], [f"{y}.{name}"], value=numpy_helper.from_array(np.array(value, np.float32))
        )

    one = numpy_helper.from_array(np.ones(1, np.float32))
    above = f"{y}.above" if below else y
    nodes = [
        constant("bound", bound),
        constant("rest", 1.0 - bound),
        helper.make_node("Shape", [like], [f"{y}.shape"]),
        helper.make_node("ConstantOfShape", [f"{y}.shape"], [f"{y}.ones"], value=one),
        helper.make_node("Dropout", [f"{y}.ones", f"{y}.bound"], [f"{y}.kept"], f"{node.name}.kept"),
        helper.make_node("Mul", [f"{y}.kept", f"{y}.rest"], [above], f"{node.name}.above"),
    ]
    if below:
        nodes += [constant("one", 1.0), helper.make_node("Sub", [f"{y}.one", above], [y], f"{node.name}.below")]
    return nodes
