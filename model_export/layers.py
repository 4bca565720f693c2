"""Cutting a forward graph into layers.

A layer may begin wherever exactly one tensor crosses: residual blocks stay whole by themselves. A new layer starts in
front of an operator that has weights to multiply by; activations, pooling and normalisation stay with what produced
their input, except that dropout goes with what follows it (a stored activation must not have one mask for ever).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from federation.space import Parameter
from model_export.errors import ExportError
from model_export.graph import Graph, Shape, inputs_with_subgraphs, module_of, producers

# Operators that multiply by weights; a layer starts with one of them.
WEIGHTED = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Gather"}


@dataclass
class LayerGraph:
    """The nodes of one layer in order, parameter arithmetic included."""

    name: str
    nodes: list[NodeProto]
    input: str
    output: str
    parameters: list[Parameter]


@dataclass
class _Segment:
    """Nodes between two neighbouring cuts."""

    nodes: list[NodeProto]
    input: str
    parameters: list[str]  # in order of use
    weighted: bool
    dropout: bool
    frozen: bool  # multiplies by weights that are not trained


def split_layers(graph: Graph) -> list[LayerGraph]:
    """All layers, input side first."""
    segments = _segments(graph)
    starts = _layer_starts(graph, segments)
    layers = []
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(segments)
        nodes = [node for segment in segments[start:end] for node in segment.nodes]
        output = segments[end].input if end < len(segments) else graph.output
        names = list(dict.fromkeys(name for segment in segments[start:end] for name in segment.parameters))
        layers.append(LayerGraph("", nodes, segments[start].input, output, _parameters(graph, names)))
    _name_layers(layers)
    return layers


def with_helpers(graph: Graph, nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes and everything beside the data that they need: arithmetic on parameters and on the batch size."""
    data = _data_values(graph)
    maker = producers(graph.nodes)
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    wanted = {id(node): node for node in nodes}
    pending = list(nodes)
    while pending:
        for name in inputs_with_subgraphs(pending.pop()):
            node = maker.get(name)
            if node is not None and name not in data and id(node) not in wanted:
                wanted[id(node)] = node
                pending.append(node)
    return sorted(wanted.values(), key=lambda node: order[id(node)])


def _data_values(graph: Graph) -> set[str]:
    """Values that depend on the input, not only on its shape."""
    data = {graph.input}
    for node in graph.nodes:
        if node.op_type not in ("Shape", "Size") and any(name in data for name in inputs_with_subgraphs(node)):
            data.update(filter(None, node.output))
    return data


def _parameters_behind(graph: Graph, data: set[str]) -> dict[str, list[str]]:
    """For every value that is not data: the parameters it is made of."""
    known = {**graph.weights, **graph.statistics}
    behind = {name: [name] for name in known}
    for node in graph.nodes:
        if not any(name in data for name in node.output):
            found = [p for name in inputs_with_subgraphs(node) for p in behind.get(name, [])]
            behind.update({name: list(dict.fromkeys(found)) for name in node.output})
    return behind


def _segments(graph: Graph) -> list[_Segment]:
    data = _data_values(graph)
    behind = _parameters_behind(graph, data)
    nodes = [node for node in graph.nodes if any(name in data for name in node.output)]
    last_use: dict[str, int] = {graph.output: len(nodes)}
    uses: list[list[str]] = []
    for position, node in enumerate(nodes):
        names = inputs_with_subgraphs(node)
        parameters = list(dict.fromkeys(p for name in names if name not in data for p in behind.get(name, [])))
        uses.append(parameters)
        for name in [*(n for n in names if n in data), *parameters]:
            last_use[name] = position
    segments: list[_Segment] = []
    start, entering, live = 0, graph.input, {graph.input}
    for position, node in enumerate(nodes):
        live.update(name for name in node.output if name in last_use)
        live.update(uses[position])
        live = {name for name in live if last_use.get(name, -1) > position}
        crossing = next(iter(live)) if len(live) == 1 else None
        if position + 1 == len(nodes) or (crossing is not None and _can_be_stored(graph, crossing)):
            piece = nodes[start : position + 1]
            names = list(dict.fromkeys(p for used in uses[start : position + 1] for p in used))
            weighted = any(n.op_type in WEIGHTED and u for n, u in zip(piece, uses[start:], strict=False))
            frozen = any(n.op_type in WEIGHTED and _constant_weights(graph, n) for n in piece)
            dropout = any(n.op_type == "Dropout" for n in piece)
            segments.append(_Segment(piece, entering, names, weighted, dropout, frozen))
            start, entering = position + 1, crossing or ""
    return segments


def _can_be_stored(graph: Graph, name: str) -> bool:
    """A device stores activations sample by sample: the batch comes first and nothing else depends on it."""
    shape = graph.shapes.get(name, ())
    is_batch_first = shape[:1] == (None,) and None not in shape[1:]
    return is_batch_first and name not in graph.weights and graph.dtypes[name] == np.float32


def _layer_starts(graph: Graph, segments: list[_Segment]) -> list[int]:
    """Index of the segment each layer starts with."""
    if not any(segment.parameters for segment in segments):
        raise ExportError("the model has no trainable parameters: there is nothing to train")
    starts: list[int] = [0]
    previous = _last_frozen(segments)
    for index, segment in enumerate(segments):
        if segment.weighted:
            if previous is not None:
                starts.append(_best_cut(graph, segments, previous + 1, index))
            previous = index
        elif segment.parameters and previous is not None:
            previous = index  # normalisation stays with what it normalises
    return starts


def _last_frozen(segments: list[_Segment]) -> int | None:
    """The end of a part at the input that trains nothing: it becomes a layer without parameters."""
    first = next(index for index, segment in enumerate(segments) if segment.parameters)
    return max((index for index in range(first) if segments[index].frozen), default=None)


def _constant_weights(graph: Graph, node: NodeProto) -> bool:
    return any(graph.dtypes[n].kind == "f" and graph.constants[n].ndim > 1 for n in node.input if n in graph.constants)


def _best_cut(graph: Graph, segments: list[_Segment], first: int, last: int) -> int:
    """Where between two weighted segments the tensor is smallest; the latest of equals, but before any dropout."""
    allowed = list(range(first, last + 1))
    for index in range(first, last):
        if segments[index].dropout:
            allowed = [i for i in allowed if i <= index]
            break
    return min(allowed, key=lambda i: (_per_sample(graph.shapes[segments[i].input]), -i))


def _per_sample(shape: Shape) -> int:
    return int(np.prod([dim for dim in shape[1:] if dim is not None], dtype=np.int64))


def _parameters(graph: Graph, names: list[str]) -> list[Parameter]:
    """Weights first, statistics last, each in order of use."""
    weights = [Parameter(n, "weight", graph.weights[n].shape) for n in names if n in graph.weights]
    return weights + [Parameter(n, "statistic", graph.statistics[n].shape) for n in names if n in graph.statistics]


def find_layer(layers: Sequence[LayerGraph], name: str) -> int:
    """The layer of this name, or the first that holds a parameter of the module of this name."""
    for index, layer in enumerate(layers):
        if layer.name == name:
            return index
    for index, layer in enumerate(layers):
        if any(owner == name or owner.startswith(name + ".") for owner in _owners(layer)):
            return index
    known = ", ".join(layer.name for layer in layers)
    raise ExportError(f"no layer starts with a module named {name!r}; boundaries of this model: {known}")


def _name_layers(layers: list[LayerGraph]) -> None:
    """After the module a layer starts with: the outermost one whose parameters all belong to this layer."""
    owners = [_owners(layer) for layer in layers]
    for index, layer in enumerate(layers):
        others = [name for i, names in enumerate(owners) if i != index for name in names]
        parts = owners[index][0].split(".")
        for length in range(1, len(parts) + 1):
            layer.name = ".".join(parts[:length])
            if not any(other == layer.name or other.startswith(layer.name + ".") for other in others):
                break
    seen: dict[str, int] = {}
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, 0) + 1
        if seen[layer.name] > 1:
            layer.name = f"{layer.name}_{seen[layer.name]}"


def _owners(layer: LayerGraph) -> list[str]:
    """The modules whose parameters a layer holds; nameless parameters are known by their node."""
    names = [p.name.rsplit(".", 1)[0] for p in layer.parameters if "." in p.name and "::" not in p.name]
    if not names:
        node = next((n for n in layer.nodes if n.op_type in WEIGHTED), layer.nodes[0])
        module = module_of(node)
        names = [node.name.strip("/") or node.op_type if module == "(top level)" else module]
    return [re.sub(r"[^A-Za-z0-9_.-]", "_", name) for name in names]
