"""What onnxruntime-training 1.19.2 can differentiate on a CPU, and why it cannot train a given graph.

The tables were found by trying: every standard operator in a small graph with an open batch dimension, at opsets 18
and 21, its gradient compared with PyTorch's. An operator may be missing because nothing is registered for it (Einsum),
because the gradient has no CPU kernel (ConvTranspose, Resize), because it ends the process (AveragePool, a division by
zero), or because its gradient is wrong; `ort_repair` rewrites what can be rewritten before anything is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from federation.manifest import Loss
from model_export.graph import attribute, optional_input
from model_export.normalise import value_types
from model_export.ort_repair import recurrent_obstacles, repair

OPSETS = range(18, 22)
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
ALL = range(1 << 16)

_OF_ALL_INPUTS = "Add Concat Conv Div Gemm MatMul Max Min Mul Sub"
_OF_THE_FIRST = """
    Abs Cast Clip Cos Dropout Erf Exp Expand Flatten Gather GatherElements GatherND GlobalAveragePool Identity LeakyRelu
    Log LogSoftmax MaxPool Neg Pad Pow Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Sigmoid Sin
    Slice Softmax Split Sqrt Squeeze Tanh Tile TopK Transpose Trilu Unsqueeze
"""
# Operator -> the inputs whose gradient is computed, and is right.
DIFFERENTIABLE: dict[str, Collection[int]] = {
    **dict.fromkeys(_OF_ALL_INPUTS.split(), ALL),
    **dict.fromkeys(_OF_THE_FIRST.split(), (0,)),
    "BatchNormalization": (0, 1, 2),
    "GRU": (0, 1, 2, 3, 5),
    "LSTM": (0, 1, 2, 3, 5, 6),
    "LayerNormalization": (0, 1, 2),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "Where": (1, 2),
}


@dataclass(frozen=True)
class Knowledge:
    """What the checks below may ask about a graph."""

    types: dict[str, onnx.TypeProto]
    constants: dict[str, np.ndarray]
    active: set[str]
    used: set[str]

    def dims(self, name: str) -> list[int | str] | None:
        """Dimensions as numbers, or as names ("" where nothing is known); None if not even the rank is known."""
        tensor = self.types[name].tensor_type if name in self.types else None
        if tensor is None or not tensor.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]

    def elem_type(self, name: str) -> int:
        return self.types[name].tensor_type.elem_type if name in self.types else TensorProto.UNDEFINED


def unsupported(forward: onnx.ModelProto, loss: Loss, trainable: Sequence[str] | None = None) -> list[str]:
    """One line for each reason why onnxruntime-training cannot train this graph; empty if it can.

    Each line names the node and its operator. Without `trainable`, every floating-point initialiser that is neither a
    single number nor a batch-norm statistic counts as trained.
    """
    opset = next((item.version for item in forward.opset_import if item.domain in ("", "ai.onnx")), 0)
    if opset not in OPSETS:
        return [f"the graph has opset {opset}; onnxruntime-training needs {OPSETS[0]} to {OPSETS[-1]}"]
    model = repair(forward)
    nodes, types = list(model.graph.node), value_types(model)
    active = active_values(nodes, _parameters(model) if trainable is None else trainable, types)
    used = {name for node in nodes for name in node.input} | {value.name for value in model.graph.output}
    knowledge = Knowledge(types, _constants(model), active, used)
    found = [f"{node.name or node.output[0]}: {line}" for node in nodes for line in _reasons(node, knowledge)]
    dims = knowledge.dims(model.graph.output[0].name)
    masked = loss.ignore_index is not None and loss.name != "cross_entropy"
    if loss.name not in ("cross_entropy", "bce_with_logits", "mse") or loss.classes_last or loss.next_token or masked:
        found.append(f"the loss {loss.name} with these settings is for the portable engine only")
    if loss.name == "cross_entropy" and dims is not None and len(dims) < 2:
        found.append(f"{model.graph.output[0].name}: cross_entropy needs a class dimension after the batch")
    return found


def active_values(nodes: Sequence[NodeProto], trainable: Collection[str], types: dict[str, onnx.TypeProto]) -> set[str]:
    """The values that depend on a trained parameter and carry a gradient: not integers, not truth values."""
    active = set(trainable)
    for node in nodes:
        if any(name in active for name in node.input):
            known = {name: types[name].tensor_type.elem_type for name in node.output if name in types}
            active.update(name for name in node.output if name and known.get(name, TensorProto.FLOAT) in FLOATS)
    return active


def _parameters(model: onnx.ModelProto) -> list[str]:
    statistics = {name for node in model.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]}
    tensors = [item for item in model.graph.initializer if item.data_type in FLOATS and item.dims]
    return [item.name for item in tensors if item.name not in statistics]


def _constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Values known in advance, of initialisers and Constant nodes."""
    found = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and attribute(node, "value") is not None:
            found[node.output[0]] = numpy_helper.to_array(attribute(node, "value"))
    return found


def _reasons(node: NodeProto, knowledge: Knowledge) -> list[str]:
    """Why the gradient of one node is missing or wrong."""
    reached = [index for index, name in enumerate(node.input) if name in knowledge.active]
    if not reached or not any(name in knowledge.active for name in node.output):
        return []
    if node.domain not in ("", "ai.onnx"):
        return [f"operator {node.domain}.{node.op_type} is not standard ONNX"]
    if node.op_type not in DIFFERENTIABLE:
        return [f"operator {node.op_type} has no usable gradient"]
    blind = [index for index in reached if index not in DIFFERENTIABLE[node.op_type]]
    if blind:
        names = ", ".join(node.input[index] for index in blind)
        return [f"operator {node.op_type} has no gradient for its input {names}"]
    reason = CHECKS[node.op_type](node, knowledge) if node.op_type in CHECKS else None
    return [f"operator {node.op_type} {reason}"] if reason else []


# Each check is for one operator whose gradient exists but fails, or is wrong, in some form of it.


def _auto_pad(node: NodeProto, knowledge: Knowledge) -> str | None:
    """The gradient ignores auto_pad; with stride 1 it was repaired."""
    return None if attribute(node, "auto_pad", "NOTSET") == "NOTSET" else "has a wrong gradient with auto_pad"


def _matmul(node: NodeProto, knowledge: Knowledge) -> str | None:
    dims = knowledge.dims(node.input[1])
    return "has no gradient for a vector on the right" if dims is not None and len(dims) == 1 else None


def _pad(node: NodeProto, knowledge: Knowledge) -> str | None:
    """The gradient pads by minus the amounts, all axes, with zeros."""
    if attribute(node, "mode", "constant") != "constant":
        return f"has no gradient with mode={attribute(node, 'mode')}"
    return "has no gradient with axes" if optional_input(node, 3) else None


def _pow(node: NodeProto, knowledge: Knowledge) -> str | None:
    """The gradient subtracts a float 1 from the exponent and does not undo broadcasting."""
    dims = knowledge.dims(node.input[1])
    if knowledge.elem_type(node.input[1]) not in FLOATS | {TensorProto.UNDEFINED}:
        return "has no gradient with an integer exponent"
    if dims is not None and any(dim != 1 for dim in dims):
        return "has a wrong gradient unless the exponent is a single number"
    return None


def _recurrent(node: NodeProto, knowledge: Knowledge) -> str | None:
    obstacles = recurrent_obstacles(node)
    return f"has no gradient with {', '.join(obstacles)}" if obstacles else None


def _scatter(node: NodeProto, knowledge: Knowledge) -> str | None:
    """The gradient is that of overwriting, whatever the reduction."""
    reduction = attribute(node, "reduction", "none")
    return None if reduction == "none" else f"has a wrong gradient with reduction={reduction}"


def _slice(node: NodeProto, knowledge: Knowledge) -> str | None:
    steps = knowledge.constants.get(optional_input(node, 4) or "", np.ones(1))
    return "has no gradient with negative steps" if (steps < 0).any() else None


def _split(node: NodeProto, knowledge: Knowledge) -> str | None:
    """The gradient joins those of the outputs in use, as if there were no others."""
    return None if all(name in knowledge.used for name in node.output) else "has a wrong gradient with an unused output"


def _transpose(node: NodeProto, knowledge: Knowledge) -> str | None:
    return None if attribute(node, "perm") else "has no gradient without perm"


def _where(node: NodeProto, knowledge: Knowledge) -> str | None:
    """The gradient does not undo broadcasting."""
    whole = knowledge.dims(node.output[0])
    for name in node.input[1:]:
        part = knowledge.dims(name)
        if name in knowledge.active and part is not None and whole is not None:
            stretched = any(a == 1 and b != 1 for a, b in zip(part, whole, strict=False))
            if len(part) != len(whole) or stretched:
                return f"has a wrong gradient for its broadcast input {name}"
    return None


CHECKS: dict[str, Callable[[NodeProto, Knowledge], str | None]] = {
    "Conv": _auto_pad,
    "GRU": _recurrent,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "Pad": _pad,
    "Pow": _pow,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
    "Where": _where,
}
