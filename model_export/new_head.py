"""Replace the last dense layer of an ONNX classifier by one for other classes: fine-tuning on one's own data."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from model_export.errors import ExportError
from model_export.graph import attribute, producers

# What may stand behind the last dense layer; it is dropped, because losses take scores.
SCORES = {"Softmax", "LogSoftmax", "Sigmoid", "Identity"}


def replace_head(model: onnx.ModelProto, classes: int, seed: int) -> None:
    """Give the last dense layer `classes` outputs and random weights, as PyTorch draws them; the rest stays."""
    maker = producers(model.graph.node)
    held = {item.name: item for item in model.graph.initializer}
    name = model.graph.output[0].name
    while name in maker and maker[name].op_type in SCORES:
        name = maker[name].input[0]
    product, added = _dense(maker, held, name)
    rng = np.random.default_rng(seed)
    weight = held[product.input[1]]
    turned = bool(attribute(product, "transB", 0))
    width = weight.dims[1 if turned else 0]
    spread = 1.0 / math.sqrt(width)
    _replace(model, product, 1, rng.uniform(-spread, spread, (classes, width) if turned else (width, classes)))
    bias = next((i for i, given in enumerate(added.input) if given in held and given != weight.name), None)
    if bias is not None:
        _replace(model, added, bias, rng.uniform(-spread, spread, classes))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", classes]))


def _dense(maker: dict[str, NodeProto], held: dict[str, TensorProto], name: str) -> tuple[NodeProto, NodeProto]:
    """The node that multiplies by the last weights, and the one that adds their bias: the same for Gemm."""
    last = maker.get(name)
    product = last
    if last is not None and last.op_type == "Add":
        product = next((maker[given] for given in last.input if given in maker), None)
    is_dense = product is not None and product.op_type in ("Gemm", "MatMul") and product.input[1] in held
    if last is None or product is None or not is_dense or len(held[product.input[1]].dims) != 2:
        found = "its input" if last is None else f"{last.op_type} (node {last.name!r})"
        raise ExportError(f"--new-head replaces a dense layer at the end of the model; this one ends with {found}")
    return product, last


def _replace(model: onnx.ModelProto, node: NodeProto, index: int, values: np.ndarray) -> None:
    """Let a node read new values, under the name of the old ones if no other node reads those."""
    old = node.input[index]
    users = sum(name == old for other in model.graph.node for name in other.input)
    name = old if users == 1 else f"{old}.head"
    if users == 1:
        model.graph.initializer.remove(next(item for item in model.graph.initializer if item.name == old))
    model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    node.input[index] = name
