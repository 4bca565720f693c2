"""Find the weights of an ONNX file wherever its exporter put them.

Some write weights as Constant nodes, some fill them at run time (ConstantOfShape), store them in half precision or as
integers and convert them (Cast, DequantizeLinear), or turn them before use. All become initialisers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from model_export.errors import ExportError

# Nodes that make a weight out of other constants, and nodes that only arrange one.
MAKERS = {"Constant", "ConstantOfShape", "Cast", "DequantizeLinear"}
VIEWS = {"Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand"}
WITH_VECTORS = {"BatchNormalization", "Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization"}
MOST_ELEMENTS = 1 << 28  # that a file may ask to fill


def lift_constant_weights(model: onnx.ModelProto) -> None:
    """Replace nodes whose result is a weight by initialisers of the same name."""
    known = {item.name: item for item in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    wanted = {name for node in model.graph.node if node.op_type in WITH_VECTORS for name in node.input[1:]}
    made: dict[str, onnx.TensorProto] = {}
    kept = []
    for node in model.graph.node:
        value = _result(node, {**known, **made}, made, readers) if _may_be_weight(node) else None
        if value is not None and (value.ndim > 1 or value.size > 1 or node.output[0] in wanted):
            made[node.output[0]] = numpy_helper.from_array(value, node.output[0])
        else:
            kept.append(node)
    used = {name for node in kept for name in node.input} | {value.name for value in model.graph.output}
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.initializer.extend(item for name, item in made.items() if name in used)


def _may_be_weight(node: NodeProto) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in MAKERS | VIEWS


def _result(
    node: NodeProto, known: Mapping[str, onnx.TensorProto], made: Mapping[str, onnx.TensorProto], readers: Counter[str]
) -> np.ndarray | None:
    """The value of a node that depends on constants alone.

    A view of a tensor that others read, too, is a tied weight and stays a view.
    """
    given = [name for name in node.input if name]
    if any(name not in known for name in given):
        return None
    if node.op_type in VIEWS and (given[0] not in made or readers[given[0]] > 1):
        return None
    feed = {name: numpy_helper.to_array(known[name]) for name in given}
    if node.op_type == "Constant" and node.attribute[0].name != "value":
        return None
    if node.op_type == "ConstantOfShape" and int(np.prod(feed[given[0]], dtype=np.int64)) > MOST_ELEMENTS:
        raise ExportError(
            f"node {node.name!r} fills a tensor of {feed[given[0]].tolist()}, more than a bundle may hold"
        )
    if node.op_type == "Cast" and feed[given[0]].dtype.kind != "f":
        return None  # integers that become floats are positions, masks, counts
    results: Any = ReferenceEvaluator(node).run(None, feed)
    value = results[0]
    return value if isinstance(value, np.ndarray) and value.dtype == np.float32 else None
