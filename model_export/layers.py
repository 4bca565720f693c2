"""Cutting a forward graph into layers.

A layer may begin wherever exactly one tensor crosses: residual blocks stay whole by themselves. A new layer starts in
front of an operator that has weights to multiply by; activations, pooling and normalisation stay with what produced
their input, except that dropout goes with what follows it (a stored activation must not have one mask for ever).

Where that leaves a large part in one layer, several tensors may cross (crossing.py). A value that lives through most of
the layer, a mask or a skip connection, is carried along, and the layer is cut where besides it one tensor crosses. A
model that still has few layers is cut further, where the row is smallest.

A weight that several layers use belongs to the last of them: training from a layer on then changes every weight that
is used from there on. The layers before it borrow it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
from onnx import NodeProto

from federation.space import Parameter
from model_export.autodiff.rules.dropout import SEEDED
from model_export.crossing import can_travel, is_plain, make_row, row_size
from model_export.errors import ExportError
from model_export.graph import Graph, inputs_with_subgraphs, module_of, producers

# Operators that multiply by weights; a layer starts with one of them.
WEIGHTED = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Gather"}


# A layer is worth dividing if it has this many of them, and more than this share of the model's.
MANY, SHARE = 6, 1 / 8
FEW = 4  # a model of fewer layers is cut wherever it can be
MOST_BORROWING = 12  # layers that own nothing: a network that calls one block for every step would have no end of them


@dataclass
class LayerGraph:
    """The nodes of one layer in order, parameter arithmetic included."""

    name: str
    nodes: list[NodeProto]
    entering: tuple[str, ...]  # values of the graph that cross in front of it, behind it
    leaving: tuple[str, ...]
    input: str  # the one of them, or the row that they are packed into
    output: str
    parameters: list[Parameter]  # its own
    borrowed: list[Parameter]  # those that it uses and a later layer owns


@dataclass(frozen=True)
class _Flow:
    """The nodes that work on data, what each of them uses, and what crosses behind it."""

    graph: Graph
    nodes: list[NodeProto]
    uses: list[list[str]]  # parameters, in order of use
    crossing: list[tuple[str, ...]]  # data, in order of appearance
    storable: list[bool]  # whether a device can store what crosses
    fixed: list[bool]  # whether a node multiplies by weights that are not trained

    def is_weighted(self, position: int) -> bool:
        return self.nodes[position].op_type in WEIGHTED and bool(self.uses[position])

    def weighted(self, part: range) -> list[int]:
        """Find the nodes of a part that multiply by weights."""
        return [position for position in part if self.is_weighted(position)]

    def is_plain(self, position: int) -> bool:
        """Whether one tensor crosses, as it is."""
        return self.storable[position] and is_plain(self.graph, self.crossing[position])

    def row_size(self, position: int) -> int:
        return row_size(self.graph, self.crossing[position])


@dataclass
class _Segment:
    """Nodes between two neighbouring cuts."""

    part: range  # of the flow's nodes
    size: int  # of what enters, per sample
    plain: bool  # one tensor enters, as it is
    parameters: list[str]  # in order of use
    weighted: bool
    dropout: bool
    frozen: bool  # multiplies by weights that are not trained


def split_layers(graph: Graph) -> list[LayerGraph]:
    """All layers, input side first."""
    flow = _flow(graph)
    layers, later = [], set[str]()
    for part in reversed(_parts(flow)):
        names = list(dict.fromkeys(name for used in flow.uses[part.start : part.stop] for name in used))
        entering = flow.crossing[part.start - 1] if part.start else (graph.input,)
        leaving = flow.crossing[part.stop - 1] if part.stop < len(flow.nodes) else (graph.output,)
        layers.append(
            LayerGraph(
                name="",
                nodes=flow.nodes[part.start : part.stop],
                entering=entering,
                leaving=leaving,
                input=make_row(graph, entering) if part.start else graph.input,
                output=make_row(graph, leaving) if part.stop < len(flow.nodes) else graph.output,
                parameters=_parameters(graph, [name for name in names if name not in later]),
                borrowed=_parameters(graph, [name for name in names if name in later]),
            )
        )
        later.update(names)
    layers.reverse()
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
    """Values that depend on the input, not only on its shape, or are drawn."""
    data = {graph.input}
    for node in graph.nodes:
        reads = node.op_type not in ("Shape", "Size") and any(name in data for name in inputs_with_subgraphs(node))
        if reads or node.op_type in SEEDED:
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


def _flow(graph: Graph) -> _Flow:
    data = _data_values(graph)
    behind = _parameters_behind(graph, data)
    nodes = [node for node in graph.nodes if any(name in data for name in node.output)]
    uses: list[list[str]] = []
    last_use: dict[str, int] = {graph.output: len(nodes)}
    for position, node in enumerate(nodes):
        names = inputs_with_subgraphs(node)
        uses.append(list(dict.fromkeys(p for name in names if name not in data for p in behind.get(name, []))))
        last_use |= dict.fromkeys([*(n for n in names if n in data), *uses[-1]], position)
    live: dict[str, None] = {graph.input: None}
    crossing, storable = [], []
    for position, node in enumerate(nodes):
        # A step moves a statistic once: what uses it stays together.
        live |= dict.fromkeys([*node.output, *(name for name in uses[position] if name in graph.statistics)])
        live = {name: None for name in live if last_use.get(name, -1) > position}
        crossing.append(tuple(name for name in live if name in data))
        storable.append(
            len(crossing[-1]) == len(live) and all(can_travel(graph, n) and n not in graph.uncut for n in live)
        )
    fixed = [node.op_type in WEIGHTED and _constant_weights(graph, node, data, behind) for node in nodes]
    return _Flow(graph, nodes, uses, crossing, storable, fixed)


def _parts(flow: _Flow) -> list[range]:
    """The nodes of each layer."""
    inner = range(len(flow.nodes) - 1)  # a cut lies behind a node
    cuts = {position for position in inner if flow.is_plain(position)}
    parts = _layers_between(flow, cuts)
    worth = max(MANY, SHARE * len(flow.weighted(range(len(flow.nodes)))))
    while (
        more := {p for part in parts if len(flow.weighted(part)) >= worth for p in _beside_carried(flow, part)} - cuts
    ):
        cuts |= more
        parts = _layers_between(flow, cuts)
    while len(parts) < FEW and (cut := _smallest_row(flow, parts)) is not None:
        cuts.add(cut)
        before, parts = parts, _layers_between(flow, cuts)
        if len(parts) == len(before):
            break
    return _without_many_borrowers(flow, parts)


def _beside_carried(flow: _Flow, part: range) -> set[int]:
    """Cuts in a part where, besides what lives through most of it, one value crosses at most."""
    weighted = flow.weighted(part)
    inside = range(part.start, part.stop - 1)
    passed = Counter(
        name
        for one, other in pairwise(weighted)
        for name in set(flow.crossing[one]).intersection(*flow.crossing[one:other])
    )
    carried = {name for name, gaps in passed.items() if 2 * (gaps + 1) >= len(weighted)}
    return {
        position for position in inside if flow.storable[position] and len(set(flow.crossing[position]) - carried) <= 1
    }


def _smallest_row(flow: _Flow, parts: Sequence[range]) -> int | None:
    """The cut that divides the part with most weights best: of those near its middle the one with the smallest row."""
    for part in sorted(parts, key=lambda part: -len(flow.weighted(part))):
        weighted = flow.weighted(part)
        found = [p for p in range(part.start, part.stop - 1) if flow.storable[p] and weighted and p < weighted[-1]]
        sides = {p: sum(place <= p for place in weighted) for p in found}
        found = [p for p in found if sides[p]]
        if found:
            even = len(weighted) // 4
            return min(found, key=lambda p: (not even < sides[p] < len(weighted) - even, flow.row_size(p), -p))
    return None


def _without_many_borrowers(flow: _Flow, parts: list[range]) -> list[range]:
    """Join parts whose weights all belong to later ones with what is in front of them, where they are too many."""
    later: set[str] = set()
    starts = {part.start for part in parts}
    borrowing = []
    for part in reversed(parts):
        own = {name for used in flow.uses[part.start : part.stop] for name in used}
        if own and own <= later and part.start:
            borrowing.append(part.start)
        later |= own
    if len(borrowing) > MOST_BORROWING:
        kept = {borrowing[round(i)] for i in np.linspace(0, len(borrowing) - 1, MOST_BORROWING)}
        starts -= set(borrowing) - kept
    ordered = [*sorted(starts), len(flow.nodes)]
    return [range(start, stop) for start, stop in pairwise(ordered)]


def _layers_between(flow: _Flow, cuts: set[int]) -> list[range]:
    """Group the segments that some cuts leave into layers."""
    edges = [0, *(cut + 1 for cut in sorted(cuts)), len(flow.nodes)]
    segments = [_segment(flow, range(start, stop)) for start, stop in pairwise(edges)]
    starts = [segments[index].part.start for index in _layer_starts(segments)]
    return [range(start, stop) for start, stop in pairwise([*starts, len(flow.nodes)])]


def _segment(flow: _Flow, part: range) -> _Segment:
    nodes = flow.nodes[part.start : part.stop]
    fixed, stored = any(flow.fixed[part.start : part.stop]), bool(flow.graph.stored)
    return _Segment(
        part=part,
        size=flow.row_size(part.start - 1) if part.start else 0,
        plain=not part.start or flow.is_plain(part.start - 1),
        parameters=list(dict.fromkeys(p for used in flow.uses[part.start : part.stop] for p in used)),
        weighted=bool(flow.weighted(part)) or (stored and fixed),  # devices run stored weights piece by piece, too
        dropout=any(node.op_type in SEEDED for node in nodes),
        frozen=fixed and not stored,
    )


def _layer_starts(segments: list[_Segment]) -> list[int]:
    """Index of the segment each layer starts with."""
    if not any(segment.parameters for segment in segments):
        raise ExportError("the model has no trainable parameters: there is nothing to train")
    starts: list[int] = [0]
    previous = _last_frozen(segments)
    for index, segment in enumerate(segments):
        if segment.weighted:
            if previous is not None:
                starts.append(_best_cut(segments, previous + 1, index))
            previous = index
        elif segment.parameters and previous is not None:
            previous = index  # normalisation stays with what it normalises
    return starts


def _last_frozen(segments: list[_Segment]) -> int | None:
    """The end of a part at the input that trains nothing: it becomes a layer without parameters."""
    first = next(index for index, segment in enumerate(segments) if segment.parameters)
    return max((index for index in range(first) if segments[index].frozen), default=None)


def _constant_weights(graph: Graph, node: NodeProto, data: set[str], behind: Mapping[str, list[str]]) -> bool:
    """Whether a node has a matrix that follows from constants alone: of real numbers, or stored in bytes."""
    fixed = [name for name in node.input if name and name not in data and not behind.get(name)]
    matrices = [name for name in fixed if len(graph.shapes[name]) > 1]
    return any(graph.dtypes[name].kind == "f" or graph.dtypes[name].itemsize == 1 for name in matrices)


def _best_cut(segments: list[_Segment], first: int, last: int) -> int:
    """Where between two weighted segments the row is smallest; the latest of equals, but before any dropout."""
    allowed = list(range(first, last + 1))
    for index in range(first, last):
        if segments[index].dropout:
            allowed = [i for i in allowed if i <= index]
            break
    return min(allowed, key=lambda i: (segments[i].size, not segments[i].plain, -i))


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
        others = [name for i, names in enumerate(owners) if i != index for name in names if name not in owners[index]]
        parts = owners[index][0].split(".")
        for length in range(1, len(parts) + 1):
            layer.name = ".".join(parts[:length])
            if not any(other == layer.name or other.startswith(layer.name + ".") for other in others):
                break
    taken: set[str] = set()
    for layer in layers:
        free = (f"{layer.name}_{number}" for number in count(2))
        layer.name = layer.name if layer.name not in taken else next(name for name in free if name not in taken)
        taken.add(layer.name)


def _owners(layer: LayerGraph) -> list[str]:
    """The modules whose parameters a layer holds, or uses; nameless parameters are known by their node."""
    used = layer.parameters or layer.borrowed
    names = [p.name.rsplit(".", 1)[0] for p in used if "." in p.name and "::" not in p.name]
    if not names:
        node = next((n for n in layer.nodes if n.op_type in WEIGHTED), layer.nodes[0])
        module = module_of(node)
        names = [node.name.strip("/") or node.op_type if module == "(top level)" else module]
    return [re.sub(r"[^A-Za-z0-9_.-]", "_", name) for name in names]
