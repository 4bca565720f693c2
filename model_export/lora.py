"""Low-rank adapters: a frozen weight W gets a trained change B·A of small rank, W + (alpha / rank)·B·A.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. The graph gets the adapters as nodes beside
the layers that it has; the PyTorch module, which the graph is compared with, gets them as modules of its own. B begins
at zero, so the adapted model begins where the model is; all other weights are frozen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import NodeProto, helper, numpy_helper
from torch import Tensor, nn

from federation.errors import InputError
from federation.manifest import Lora
from model_export.errors import ExportError
from model_export.graph import Graph, Shape, attribute, inputs_with_subgraphs, needed_nodes, producers

A, B = "lora_A", "lora_B"
MERGED = "lora_merge"  # of the node that adds an adapter's change
Kind = Literal["linear", "embedding"]


@dataclass(frozen=True)
class Target:
    """A layer that may be adapted: its weight's name in the graph, and how the layer uses it."""

    weight: str
    kind: Kind


def module_targets(module: nn.Module) -> dict[str, Target]:
    """Find the layers of a module by their paths; a weight that two of them share belongs to neither."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {}
    for path, part in module.named_modules():
        kind = _kind(part)
        if kind is not None:
            found[path] = Target(names[id(part.weight)], kind)
    return _unshared(found)


def graph_targets(graph: Graph) -> dict[str, Target]:
    """Find the layers of a graph without a module: weights that it multiplies by or looks up."""
    found = {}
    for name, weight in graph.weights.items():
        if weight.ndim == 2:
            users = {"linear": _products(graph, name), "embedding": _lookups(graph, name)}
            kinds = [kind for kind, nodes in users.items() if nodes]
            if len(kinds) == 1:
                found[name.removesuffix(".weight")] = Target(name, cast(Kind, kinds[0]))
    return _unshared(found)


def _unshared(found: Mapping[str, Target]) -> dict[str, Target]:
    weights = [target.weight for target in found.values()]
    return {path: target for path, target in found.items() if weights.count(target.weight) == 1}


def _kind(part: nn.Module) -> Kind | None:
    if type(part) is nn.Linear or _is_conv1d(part):
        return "linear"
    return "embedding" if type(part) is nn.Embedding else None


def _is_conv1d(part: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: a dense layer whose weight lies the other way round."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf")


def choose(targets: Mapping[str, Target], lora: Lora) -> dict[str, Target]:
    """Take the layers that the patterns name, without patterns every linear layer; those trained in full need none."""
    targets = {path: target for path, target in targets.items() if not trained_in_full(target.weight, lora)}
    if lora.layers is None:
        found = {path: target for path, target in targets.items() if target.kind == "linear"}
    else:
        found = {path: target for path, target in targets.items() if matches(path, lora.layers)}
    if not found:
        known = ", ".join(list(targets)[:8]) or "none"
        raise InputError(f"no linear or embedding layer is called {lora.layers or 'so'}; the model has: {known}")
    return found


def matches(path: str, patterns: str) -> bool:
    """Whether one of several patterns fits, parted by commas: *.q_proj,lm_head. A bare name fits the end of a path."""
    return any(
        fnmatchcase(path, pattern) or path.endswith(f".{pattern}")
        for pattern in map(str.strip, patterns.split(","))
        if pattern
    )


def trained_in_full(name: str, lora: Lora) -> bool:
    """Whether a parameter is trained itself, beside the adapters."""
    return lora.full is not None and (matches(name.rpartition(".")[0], lora.full) or matches(name, lora.full))


# -- the graph ---------------------------------------------------------------------------------------------------------


def adapt_graph(graph: Graph, targets: Mapping[str, Target], lora: Lora, seed: int) -> list[str]:
    """Put adapters beside the chosen layers; return the names of the weights that are now frozen."""
    base = list(graph.weights)
    if lora.full is not None and not any(trained_in_full(name, lora) for name in base):
        raise InputError(f"--lora-full: no layer is called {lora.full}; the model has: {', '.join(base[:8])}")
    for path, target in targets.items():
        users = (_products if target.kind == "linear" else _lookups)(graph, target.weight)
        if not users:
            raise ExportError(f"layer {path!r}: its weight is used in another way; leave it out of --lora-layers")
        _hold(graph, path, target, lora.rank, seed, users[0])
        for node in users:
            _adapt_node(graph, path, target.kind, lora, node)
    return [name for name in base if not trained_in_full(name, lora)]


def _hold(graph: Graph, path: str, target: Target, rank: int, seed: int, user: NodeProto) -> None:
    """Make the two matrices: of a linear layer A is drawn and B is zero, of an embedding the other way round."""
    rows, columns = graph.weights[target.weight].shape
    entering, leaving = (columns, rows) if target.kind == "linear" and _by_rows(graph, user) else (rows, columns)
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    if target.kind == "linear":
        bound = entering**-0.5
        first = rng.uniform(-bound, bound, (rank, entering))
        second = np.zeros((leaving, rank))
    else:
        first, second = np.zeros((entering, rank)), rng.standard_normal((leaving, rank))
    for name, value in ((f"{path}.{A}", first), (f"{path}.{B}", second)):
        graph.weights[name] = value.astype(np.float32)
        graph.shapes[name], graph.dtypes[name] = value.shape, np.dtype(np.float32)


def _by_rows(graph: Graph, user: NodeProto) -> bool:
    """Whether a row of the weight belongs to one output, as PyTorch stores it."""
    if user.op_type == "Gemm":
        return bool(attribute(user, "transB", 0))
    return user.input[1] not in graph.weights


def _products(graph: Graph, weight: str) -> list[NodeProto]:
    """Nodes that multiply by a weight as it is or transposed."""
    maker = producers(graph.nodes)

    def is_weight(name: str) -> bool:
        made = maker.get(name)
        return name == weight or (made is not None and made.op_type == "Transpose" and made.input[0] == weight)

    return [
        node
        for node in graph.nodes
        if (node.op_type == "MatMul" and is_weight(node.input[1]))
        or (node.op_type == "Gemm" and node.input[1] == weight and not attribute(node, "transA", 0))
    ]


def _lookups(graph: Graph, weight: str) -> list[NodeProto]:
    return [n for n in graph.nodes if n.op_type == "Gather" and n.input[0] == weight and not attribute(n, "axis", 0)]


def _adapt_node(graph: Graph, path: str, kind: Kind, lora: Lora, node: NodeProto) -> None:
    """Let a node write elsewhere, and add the adapter's change to what it wrote."""
    result = node.output[0]
    shape, dtype = graph.shapes[result], graph.dtypes[result]
    nodes: list[NodeProto] = []

    def value(name: str, shape: Shape) -> str:
        graph.shapes[name], graph.dtypes[name] = shape, dtype
        return name

    def write(op: str, name: str, shape: Shape, *inputs: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [value(name, shape)], name=f"{node.name}/{name}", **attrs))
        return name

    first, second = f"{path}.{A}", f"{path}.{B}"
    low = (*shape[:-1], lora.rank)
    if kind == "linear":
        flat = write("Transpose", f"{result}::A", graph.shapes[first][::-1], first, perm=[1, 0])
        inner = write("MatMul", f"{result}::low", low, node.input[0], flat)
    else:
        inner = write("Gather", f"{result}::low", low, first, node.input[1], axis=0)
    flat = write("Transpose", f"{result}::B", graph.shapes[second][::-1], second, perm=[1, 0])
    change = write("MatMul", f"{result}::change", shape, inner, flat)
    if lora.scale != 1:
        graph.constants[f"{result}::scale"] = np.array(lora.scale, np.float32)
        change = write("Mul", f"{result}::scaled", shape, change, value(f"{result}::scale", ()))
    node.output[0] = value(f"{result}::base", shape)
    write("Add", result, shape, node.output[0], change)
    nodes[-1].name = f"{node.name}/{MERGED}"
    graph.uncut |= {result, node.output[0], *(name for made in nodes for name in made.output)}
    place = next(index for index, other in enumerate(graph.nodes) if other is node)
    graph.nodes[place + 1 : place + 1] = nodes


# -- the module --------------------------------------------------------------------------------------------------------


def adapt_module(module: nn.Module, lora: Lora) -> nn.Module:
    """Give a module's layers the same adapters, and freeze the rest."""
    targets = choose(module_targets(module), lora)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained_in_full(name, lora))
    for path, target in targets.items():
        part = module.get_submodule(path)
        weight = cast(Tensor, part.weight)
        by_rows = target.kind == "linear" and not _is_conv1d(part)
        entering, leaving = (weight.shape[1], weight.shape[0]) if by_rows else weight.shape
        first = (lora.rank, entering) if target.kind == "linear" else (entering, lora.rank)
        part.register_parameter(A, nn.Parameter(torch.zeros(first)))
        part.register_parameter(B, nn.Parameter(torch.zeros(leaving, lora.rank)))
        change = _linear_change if target.kind == "linear" else _embedding_change
        part.__class__ = _adapted(type(part), change, lora.scale)  # a copy of the module has adapters of its own
    return module


def _adapted(kind: type[nn.Module], change: Callable[[nn.Module, Tensor], Tensor], scale: float) -> type[nn.Module]:
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        plain: Tensor = kind.forward(self, input)
        return plain + change(self, input) * scale

    return type(f"Adapted{kind.__name__}", (kind,), {"forward": forward})


def _linear_change(part: nn.Module, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, cast(Tensor, part.lora_A)), cast(Tensor, part.lora_B))


def _embedding_change(part: nn.Module, x: Tensor) -> Tensor:
    return F.linear(F.embedding(x, cast(Tensor, part.lora_A)), cast(Tensor, part.lora_B))


# -- merging -----------------------------------------------------------------------------------------------------------


def merge_adapters(graph: onnx.GraphProto, values: Mapping[str, np.ndarray], lora: Lora) -> dict[str, np.ndarray]:
    """Add the changes of a graph's adapters to their weights, in place; return the new weights by name.

    `values` has the adapters' own values. The graph's frozen weights must be float32 constants.
    """
    maker, held = producers(graph.node), {item.name: item for item in graph.initializer}
    found: dict[str, np.ndarray] = {}
    gone: set[str] = set()
    for node in graph.node:
        if not node.name.endswith(f"/{MERGED}"):
            continue
        base, product = maker[node.input[0]], maker[node.input[1]]
        product = product if product.op_type == "MatMul" else maker[product.input[0]]
        inner, second = maker[product.input[0]], values[maker[product.input[1]].input[0]]
        if base.op_type == "Gather":
            weight, change = base.input[0], values[inner.input[0]] @ second.T
        else:
            turned = maker.get(base.input[1])
            weight = base.input[1] if turned is None else turned.input[0]
            change = second @ values[maker[inner.input[1]].input[0]]
            if turned is None and not attribute(base, "transB", 0):
                change = change.T
        if weight not in found:  # a layer that is used twice has one adapter
            found[weight] = numpy_helper.to_array(held[weight]) + np.float32(lora.scale) * change
            held[weight].CopyFrom(numpy_helper.from_array(found[weight], weight))
        base.output[0] = node.output[0]
        gone.add(node.name)
    kept = [node for node in graph.node if node.name not in gone]
    needed = needed_nodes(kept, [value.name for value in graph.output])
    used = {name for node in needed for name in inputs_with_subgraphs(node)}
    constants = [item for item in graph.initializer if item.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(needed)
    graph.initializer.extend(constants)
    return found
