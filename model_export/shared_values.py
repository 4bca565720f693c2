"""Take superfluous nodes out of a training graph: every node takes memory of its own in a session.

Sizes of equal shapes, and the small values that follow from them, are made once for all batch norms; a reshaped value
is reshaped from where it lay first; copies that only carry another name go. No bit of any result changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from model_export.graph import attribute, inputs_with_subgraphs, needed_nodes
from model_export.lifetimes import Size

SMALL = 1 << 14  # bytes at the largest batch looked at: what is shared lives longer
_SHAREABLE = frozenset({"Add", "Cast", "Div", "Max", "Mul", "Sub", "Unsqueeze"})


def share_values(model: onnx.ModelProto, sizes: Mapping[str, Size], batch: int) -> onnx.ModelProto:
    """Write the graph with fewer nodes."""
    writer = _Writer(model, sizes, batch)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    outputs = [value.name for value in model.graph.output]
    result.graph.node.extend(needed_nodes([writer.write(node) for node in model.graph.node], outputs))
    return result


class _Writer:
    def __init__(self, model: onnx.ModelProto, sizes: Mapping[str, Size], batch: int) -> None:
        nodes = model.graph.node
        self._sizes = sizes
        self._batch = batch
        self._names: dict[str, str] = {}  # of values that another one stands for
        self._known: dict[tuple[object, ...], str] = {}
        self._reshaped: dict[str, str] = {}  # what a reshaped value was reshaped from
        self._fixed = {value.name for value in model.graph.output}
        for node in nodes:  # bodies of loops read what they capture by its name
            self._fixed |= set(inputs_with_subgraphs(node)) - set(node.input)
        shapes = (tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT64)
        # Those that do not depend on what is reshaped: 0 would take over a size.
        self._targets = {tensor.name for tensor in shapes if 0 not in numpy_helper.to_array(tensor)}

    def write(self, node: NodeProto) -> NodeProto:
        """Copy a node that reads what stands for its inputs; note if its output is another's."""
        twin = NodeProto()
        twin.CopyFrom(node)
        twin.input[:] = [self._names.get(name, name) for name in node.input]
        output = node.output[0] if len(node.output) == 1 else None
        if output is None:
            return twin
        if twin.op_type == "Reshape" and twin.input[1] in self._targets:
            twin.input[0] = self._reshaped.get(twin.input[0], twin.input[0])
            self._reshaped[output] = twin.input[0]
        if output not in self._fixed:
            other = twin.input[0] if twin.op_type == "Identity" else self._equal(twin)
            if other is not None:
                self._names[output] = other
                if other in self._reshaped:
                    self._reshaped[output] = self._reshaped[other]
        return twin

    def _equal(self, node: NodeProto) -> str | None:
        """Find an earlier small value that is equal; remember the first."""
        key = self._key(node)
        if key is None:
            return None
        first = self._known.setdefault(key, node.output[0])
        return first if first != node.output[0] else None

    def _key(self, node: NodeProto) -> tuple[object, ...] | None:
        if node.op_type == "Shape" and node.input[0] in self._sizes:
            part = slice(attribute(node, "start", 0), attribute(node, "end", None))
            return ("Shape", *(shape[part] for shape in self._sizes[node.input[0]].shapes))
        size = self._sizes.get(node.output[0])
        if node.op_type not in _SHAREABLE or size is None or size.at(self._batch) > SMALL:
            return None
        return (node.op_type, tuple(node.input), *sorted(item.SerializeToString() for item in node.attribute))
