"""Forward graphs in the form in which onnxruntime-training 1.19.2 can differentiate them.

Each repair computes the same function with operators, attributes or outputs that its gradient builder copes with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
from onnx import NodeProto, helper

from model_export.graph import Emitter, attribute, attributes, needed_nodes, optional_input
from model_export.normalise import inline_functions, value_types

# Operators without a gradient there, that ONNX itself defines by others. Their definitions of Elu, Selu and Softplus
# overflow for large inputs, so those are written out here; Gelu has a gradient, but a wrong one with tanh.
_INLINED = """
    CastLike Celu Gelu GroupNormalization HardSigmoid HardSwish MeanVarianceNormalization Mish PRelu ReduceL1
    ReduceLogSum ReduceSumSquare Shrink Softsign ThresholdedRelu
"""
INLINED = frozenset(_INLINED.split())
Types = dict[str, onnx.TypeProto]


def repair(forward: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which everything that can be written differently is."""
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    model = inline_functions(model, lambda op_type: op_type not in INLINED)
    types = value_types(model)
    emitter = Emitter("repair")
    for node in list(model.graph.node):
        with emitter.scope(node.name or node.output[0]):
            if not (node.op_type in REPAIRS and REPAIRS[node.op_type](node, emitter, types)):
                emitter.nodes.append(node)
    outputs = [value.name for value in model.graph.output]
    del model.graph.node[:]
    model.graph.node.extend(needed_nodes(emitter.nodes, outputs))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in emitter.constants.items())
    return model


def _dims(types: Types, name: str) -> list[int]:
    """Known dimensions; 0 where one is open."""
    return [dim.dim_value for dim in types[name].tensor_type.shape.dim] if name in types else []


# Each repair mends one node, or writes others in its place and says so by returning True.


def _average_pool(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """Its gradient divides by a dimension that is open. A depthwise convolution with equal weights averages, too."""
    dims = _dims(types, node.input[0])
    pads_count = attribute(node, "count_include_pad", 0) or not any(attribute(node, "pads", []))
    plain = attribute(node, "auto_pad", "NOTSET") == "NOTSET" and not attribute(node, "ceil_mode", 0)
    if len(dims) < 3 or not dims[1] or not pads_count or not plain:
        return False
    kernel = attribute(node, "kernel_shape")
    weight = np.full((dims[1], 1, *kernel), 1 / math.prod(kernel), np.float32)
    geometry = {name: attribute(node, name) for name in ("strides", "pads", "dilations")}
    emitter.ops("Conv", node.output, node.input[0], weight, group=dims[1], kernel_shape=kernel, **geometry)
    return True


def _batch_norm(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """It must arrive in inference form, else the evaluation model does not load; the package makes it train."""
    del node.output[1:]
    _drop_attributes(node, "training_mode")
    return False


def _conv(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """The gradient ignores auto_pad. With stride 1 the padding does not depend on the size of the image."""
    mode = attribute(node, "auto_pad", "NOTSET")
    kernel = attribute(node, "kernel_shape") or _dims(types, node.input[1])[2:]
    if mode == "NOTSET" or not kernel or any(stride != 1 for stride in attribute(node, "strides", [])):
        return False
    dilations = attribute(node, "dilations") or [1] * len(kernel)
    total = [0 if mode == "VALID" else d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    small, large = [n // 2 for n in total], [n - n // 2 for n in total]
    _drop_attributes(node, "auto_pad", "pads")
    pads = large + small if mode == "SAME_LOWER" else small + large
    node.attribute.append(helper.make_attribute("pads", pads))
    return False


def _dropout(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """The gradient reads the mask."""
    _name_outputs(node, "mask")
    return False


def _layer_norm(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """The gradient reads mean and deviation, and wants a bias."""
    dims = _dims(types, node.input[1])
    if not optional_input(node, 2) and dims and all(dims):
        node.input[2:] = [emitter.constant(np.zeros(dims, np.float32))]
    _name_outputs(node, "mean", "deviation")
    return False


def _drop_attributes(node: NodeProto, *names: str) -> None:
    kept = [item for item in node.attribute if item.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def _name_outputs(node: NodeProto, *suffixes: str) -> None:
    """Ask for the optional outputs as well."""
    given = dict(enumerate(node.output))
    node.output[1:] = [given.get(i) or f"{node.output[0]}.{suffix}" for i, suffix in enumerate(suffixes, 1)]


def _instance_norm(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """No gradient: write it out (this is also what PyTorch exports group norm to)."""
    x, scale, bias = node.input
    flat = emitter.op("Reshape", x, [0, 0, -1])
    centred = emitter.op("Sub", flat, emitter.op("ReduceMean", flat, [2], keepdims=1))
    variance = emitter.op("ReduceMean", emitter.op("Mul", centred, centred), [2], keepdims=1)
    deviation = emitter.op("Sqrt", emitter.op("Add", variance, attribute(node, "epsilon", 1e-5)))
    scaled = emitter.op("Mul", emitter.op("Div", centred, deviation), emitter.op("Reshape", scale, [-1, 1]))
    result = emitter.op("Add", scaled, emitter.op("Reshape", bias, [-1, 1]))
    emitter.ops("Reshape", node.output, result, emitter.op("Shape", x))
    return True


def _exponential_unit(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """Elu and Selu without exp of a positive number."""
    selu = node.op_type == "Selu"
    alpha = attribute(node, "alpha", 1.6732632423543772 if selu else 1.0)
    gamma = attribute(node, "gamma", 1.0507009873554805) if selu else 1.0
    positive = emitter.op("Relu", node.input[0])
    negative = emitter.op("Sub", node.input[0], positive)
    bent = emitter.op("Mul", emitter.op("Sub", emitter.op("Exp", negative), 1.0), alpha)
    emitter.ops("Mul", node.output, emitter.op("Add", positive, bent), gamma)
    return True


def softplus(x: str, emitter: Emitter) -> str:
    """log(1 + exp(x)) that neither overflows nor has a wrong slope at zero."""
    size = emitter.op("Abs", x)
    positive = emitter.op("Mul", emitter.op("Add", x, size), 0.5)
    rest = emitter.op("Log", emitter.op("Add", emitter.op("Exp", emitter.op("Neg", size)), 1.0))
    return emitter.op("Add", positive, rest)


def _softplus(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    emitter.ops("Identity", node.output, softplus(node.input[0], emitter))
    return True


def _sum(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """No gradient: add one by one."""
    total = node.input[0]
    for name in node.input[1:]:
        total = emitter.op("Add", total, name)
    emitter.ops("Identity", node.output, total)
    return True


def recurrent_obstacles(node: NodeProto) -> list[str]:
    """What the kernels of LSTM and GRU, which know only the plain form, would stumble over."""
    special = {"sequence lengths": optional_input(node, 4), "peepholes": optional_input(node, 7)}
    special |= {name: attribute(node, name) for name in ("activations", "clip", "input_forget", "layout")}
    found = [name for name, value in special.items() if value]
    plain = node.op_type != "GRU" or attribute(node, "linear_before_reset", 0)
    return found if plain else [*found, "linear_before_reset=0"]


def _recurrent(node: NodeProto, emitter: Emitter, types: Types) -> bool:
    """LSTM and GRU train forwards only, with bias and initial states given: run each direction as its own node."""
    if recurrent_obstacles(node):
        return False
    sides = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}[attribute(node, "direction", "forward")]
    x, hidden = node.input[0], attribute(node, "hidden_size")
    settings = {k: v for k, v in attributes(node).items() if k != "direction"}
    states = 2 if node.op_type == "LSTM" else 1
    batch = emitter.op("Gather", emitter.op("Shape", x), [1], axis=0)
    still = emitter.op("ConstantOfShape", emitter.op("Concat", [1], batch, [hidden], axis=0))
    no_bias = np.zeros((1, (8 if states == 2 else 6) * hidden), np.float32)
    results = []
    for index, side in enumerate(sides):
        pick = _picker(node, emitter, index, len(sides))
        first = [pick(5 + i) or still for i in range(states)]
        sequence = x if side > 0 else _reversed(x, emitter)
        inputs = [sequence, pick(1), pick(2), pick(3) or no_bias, "", *first]
        every, *last = emitter.ops(node.op_type, 1 + states, *inputs, **settings)
        results.append([every if side > 0 else _reversed(every, emitter), *last])
    for position, name in enumerate(node.output):
        if name:
            emitter.ops("Concat", [name], *(result[position] for result in results), axis=0 if position else 1)
    return True


def _picker(node: NodeProto, emitter: Emitter, index: int, directions: int) -> Callable[[int], str]:
    """Gives one direction's share of an input; the empty name if the input is absent."""

    def pick(position: int) -> str:
        name = optional_input(node, position) or ""
        return emitter.op("Slice", name, [index], [index + 1], [0]) if name and directions > 1 else name

    return pick


def _reversed(x: str, emitter: Emitter) -> str:
    """Last step first.

    A Slice backwards has no gradient. A Gather has, but the package turns a Gather by a falling Range into a Slice, and
    that into an empty one: hence the subtraction from a rising one.
    """
    length = emitter.op("Gather", emitter.op("Shape", x), 0, axis=0)
    last = emitter.op("Sub", length, 1)
    return emitter.op("Gather", x, emitter.op("Sub", last, emitter.op("Range", 0, length, 1)), axis=0)


REPAIRS: dict[str, Callable[[NodeProto, Emitter, Types], bool]] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "Dropout": _dropout,
    "Elu": _exponential_unit,
    "GRU": _recurrent,
    "InstanceNormalization": _instance_norm,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_norm,
    "Selu": _exponential_unit,
    "Softplus": _softplus,
    "Sum": _sum,
}
