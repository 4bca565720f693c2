"""Counting on the graph: activations and multiply-accumulates of a layer, as the manifest records them.

What follows from these numbers (capacity, bytes) is in federation/capacity.py, which needs no graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import NodeProto

from model_export.graph import Graph, Shape, attribute
from model_export.layers import LayerGraph, with_helpers

# Values a recurrent cell keeps per unit and step: gates before and after activation, states. Ten is the papers' figure
# for the LSTM; a GRU has three gates instead of four and no cell state, an RNN one gate, which is its state.
RECURRENT_VALUES = {"LSTM": 10, "GRU": 7, "RNN": 2}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DENSE = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def layer_activations(graph: Graph, layer: LayerGraph, last_steps: int | None = None) -> int:
    """Activations of one layer per sample. A single number per sample is not worth counting."""
    nodes = with_helpers(graph, layer.nodes)
    weights = {name for p in [*layer.parameters, *layer.borrowed] for name in _derived(nodes, p.name)}
    total = 0
    for node in layer.nodes:
        if node.op_type in RECURRENT_VALUES:
            steps, units = _recurrent_size(graph, node)
            total += RECURRENT_VALUES[node.op_type] * units * min(steps, last_steps or steps)
        elif node.op_type in DENSE and any(name in weights for name in node.input):
            size = _per_sample(graph.shapes[node.output[0]])
            total += size if size > 1 else 0
    return total


def layer_macs(graph: Graph, layer: LayerGraph, last_steps: int | None = None) -> int:
    """Multiply-accumulates of a forward pass per sample."""
    return sum(_node_macs(graph, node, last_steps) for node in layer.nodes)


def _derived(nodes: Sequence[NodeProto], name: str) -> set[str]:
    """A parameter and what is made from it by moving elements (a transposed weight is still a weight)."""
    names = {name}
    for node in nodes:
        if node.op_type in ("Transpose", "Reshape") and node.input[0] in names:
            names.update(node.output)
    return names


def _recurrent_size(graph: Graph, node: NodeProto) -> tuple[int, int]:
    steps = graph.shapes[node.input[0]][0] or 0
    directions = 2 if attribute(node, "direction") == "bidirectional" else 1
    return steps, directions * int(attribute(node, "hidden_size"))


def _node_macs(graph: Graph, node: NodeProto, last_steps: int | None) -> int:
    shapes = graph.shapes
    if node.op_type in ("Conv", "ConvTranspose"):
        weight = _per_sample((None, *shapes[node.input[1]]))
        wide = node.output[0] if node.op_type == "Conv" else node.input[0]
        return weight * _per_sample((None, *shapes[wide][2:]))
    if node.op_type in ("Gemm", "MatMul"):
        inner = shapes[node.input[0]][-2 if attribute(node, "transA", 0) else -1] or 1
        return _per_sample(shapes[node.output[0]]) * inner
    if node.op_type in RECURRENT_VALUES:
        steps, units = _recurrent_size(graph, node)
        hidden = int(attribute(node, "hidden_size"))
        return (
            min(steps, last_steps or steps) * units * GATES[node.op_type] * (hidden + (shapes[node.input[0]][2] or 0))
        )
    return 0


def _per_sample(shape: Shape) -> int:
    return math.prod(dim for dim in shape if dim is not None)
