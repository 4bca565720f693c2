"""ONNX graphs as the exporter works on them: plain NodeProtos in topological order, values known by name.

`Graph` is a captured model after normalisation; `Emitter` writes new nodes. Both stay close to the protobufs so
that a reader who knows ONNX can read a rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from federation.manifest import FROZEN_NAME

if TYPE_CHECKING:
    from model_export.power_iteration import PowerIteration

# The size of a dimension, or None where it follows the batch.
Dim = int | None
Shape = tuple[Dim, ...]
# What an Emitter accepts as an input: a value's name, or something that becomes a constant.
Operand = str | float | int | Sequence[int] | np.ndarray

PRODUCER = "embrace"
# The oldest IR version that may hold each opset: old runtimes on devices keep loading our files.
IR_VERSION = {18: 8, 19: 9, 20: 9, 21: 10}


@dataclass
class Graph:
    """A forward graph with one data input and one output; parameters are known by the names of the source model."""

    nodes: list[NodeProto]
    input: str
    output: str
    opset: int
    constants: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    shapes: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)
    # Rows of embeddings that looking up does not train (padding), by parameter.
    fixed_rows: dict[str, int] = field(default_factory=dict)
    # Spectral norms: their vectors are statistics that a step moves before it uses them.
    power_iterations: Sequence[PowerIteration] = ()
    # Parameters that the model itself does not train; constants that lie in the file of frozen weights, and where.
    untrained: Sequence[str] = ()
    stored: set[str] = field(default_factory=set)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    uncut: set[str] = field(default_factory=set)  # values inside an adapted layer: no boundary lies there
    # Integer vectors that are `slope * batch + offset`: what remains of shape arithmetic.
    batch_values: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    # Values that no device can store sample by sample: with a multiple of the batch as a dimension, or huge integers.
    unstorable: set[str] = field(default_factory=set)

    def parameters(self) -> dict[str, np.ndarray]:
        return {**self.weights, **self.statistics}


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute, strings decoded."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def attributes(node: NodeProto) -> dict[str, Any]:
    return {item.name: attribute(node, item.name) for item in node.attribute}


def optional_input(node: NodeProto, index: int) -> str | None:
    """The name of an input that may be absent (missing, or the empty name)."""
    return node.input[index] if index < len(node.input) and node.input[index] else None


def module_of(node: NodeProto) -> str:
    """The module a node came from, as the exporters write it into node names."""
    parts: list[str] = []
    for part in node.name.rsplit("/", 1)[0].strip("/").split("/"):
        if parts and part.startswith(f"{parts[-1]}."):  # 'layer1/layer1.0' is the module layer1.0
            parts.pop()
        parts.append(part)
    return ".".join(parts) or "(top level)"


def producers(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    return {name: node for node in nodes for name in node.output if name}


def count_readers(nodes: Iterable[NodeProto], result: str) -> dict[str, int]:
    """How often each value is read; the result is, once, from outside."""
    readers = {result: 1}
    for node in nodes:
        for name in inputs_with_subgraphs(node):
            readers[name] = readers.get(name, 0) + 1
    return readers


def needed_nodes(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes on which `outputs` depend, in their order: dead nodes go."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if any(name in wanted for name in node.output if name):
            kept.append(node)
            wanted.update(inputs_with_subgraphs(node))
    return kept[::-1]


def inputs_with_subgraphs(node: NodeProto) -> list[str]:
    """Names a node reads, those that the bodies of Scan, Loop and If capture included."""
    names = [name for name in node.input if name]
    for item in node.attribute:
        if item.type == onnx.AttributeProto.GRAPH:
            inner = {v.name for v in item.g.input} | {t.name for t in item.g.initializer}
            for child in item.g.node:
                names += [n for n in inputs_with_subgraphs(child) if n not in inner]
                inner.update(child.output)
    return names


class Emitter:
    """Writes nodes. Equal nodes are written once; scalars, lists and arrays given as inputs become constants."""

    def __init__(self, prefix: str = "v") -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self._prefix = prefix
        self._scope = ""
        self._counter = 0
        self._known_constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._known_nodes: dict[tuple[Any, ...], tuple[str, ...]] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names of nodes written inside start with `name`: profiles tell forward from backward by it."""
        outer, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = outer

    def inside(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A scope in the one that is open."""
        return self.scope(f"{self._scope}/{name}")

    @property
    def scope_name(self) -> str:
        return self._scope

    def forget(self, *op_types: str) -> None:
        """From here on nodes of these types, and so what is computed from them, are written again, not shared."""
        self._known_nodes = {key: names for key, names in self._known_nodes.items() if key[0] not in op_types}

    def constant(self, value: Operand, dtype: Any = None) -> str:
        """The name of a constant; floats are float32, integers int64, unless a dtype is given."""
        array = np.asarray(value, dtype)
        if dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known_constants:
            self._known_constants[key] = name = f"{self._prefix}.const{len(self._known_constants)}"
            self.constants[name] = array
        return self._known_constants[key]

    def op(self, op_type: str, *inputs: Operand, **attrs: Any) -> str:
        """Write a node with one output and give that output's name."""
        return self.ops(op_type, 1, *inputs, **attrs)[0]

    def ops(self, op_type: str, outputs: int | Sequence[str], *inputs: Operand, **attrs: Any) -> tuple[str, ...]:
        """Write a node with several outputs (a number, or their names); keyword None leaves an attribute out."""
        names = [item if isinstance(item, str) else self.constant(item) for item in inputs]
        attrs = {key: value for key, value in attrs.items() if value is not None}
        key = (op_type, tuple(names), repr(sorted(attrs.items())), outputs if isinstance(outputs, int) else None)
        if isinstance(outputs, int):
            if "body" not in attrs and key in self._known_nodes:
                return self._known_nodes[key]
            results = tuple(
                f"{self._prefix}{self._counter}.{i}" if i else f"{self._prefix}{self._counter}" for i in range(outputs)
            )
            self._known_nodes[key] = results
        else:
            results = tuple(outputs)
        own = f"{op_type}.{self._counter}"  # exporters write Type_number: with a dot ours never equals one of theirs
        name = f"{self._scope}/{own}" if self._scope else own
        self._counter += 1
        self.nodes.append(helper.make_node(op_type, names, results, name=name, **attrs))
        return results

    def copy(self, node: NodeProto) -> None:
        """Write a node of the source model as it is."""
        twin = NodeProto()
        twin.CopyFrom(node)
        twin.name = f"{self._scope}/{node.name.strip('/') or node.op_type}"
        self.nodes.append(twin)


def write_batch_values(emitter: Emitter, graph: Graph, source: str) -> None:
    """Integers that follow the batch size, from the size of the graph's own input."""
    with emitter.scope("forward/batch"):
        batch = emitter.op("Gather", emitter.op("Shape", source), [0], axis=0)
        for name, (slope, offset) in graph.batch_values.items():
            scaled = emitter.op("Add", emitter.op("Mul", batch, slope.reshape(-1)), offset.reshape(-1))
            emitter.ops("Reshape", [name], scaled, np.array(slope.shape, np.int64))


def tensor_info(name: str, dtype: Any, shape: Shape) -> onnx.ValueInfoProto:
    """A graph input or output; dimensions that follow the batch are called N."""
    dims = ["N" if dim is None else dim for dim in shape]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)


def make_model(
    name: str,
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, np.ndarray],
    opset: int,
    external: Sequence[TensorProto] = (),
    places: Mapping[str, tuple[int, int]] | None = None,
) -> onnx.ModelProto:
    """A model with only the constants that its nodes use; `places` says which lie in the file of frozen weights."""
    nodes = needed_nodes(nodes, [value.name for value in outputs])
    used = {item for node in nodes for item in inputs_with_subgraphs(node)}
    held = [
        stored_tensor(key, array, *places[key]) if places and key in places else numpy_helper.from_array(array, key)
        for key, array in constants.items()
        if key in used
    ]
    graph = helper.make_graph(nodes, name, inputs, outputs, initializer=[*held, *external])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], producer_name=PRODUCER)
    model.ir_version = IR_VERSION[opset]
    return model


def stored_tensor(name: str, array: np.ndarray, offset: int, length: int) -> TensorProto:
    """Describe an initialiser whose bytes lie in the file of frozen weights."""
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", FROZEN_NAME), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def serialise(model: onnx.ModelProto) -> bytes:
    """The same bytes for the same model."""
    return bytes(model.SerializeToString(deterministic=True))
