"""Build the PyTorch module of a bundle, whole or cut where the manifest cuts it.

A bundle's layers are cuts through an ONNX graph. To find the same place in the module it is traced with torch.fx; of
the values that could be the one that enters a layer, the one is taken that equals what the layers in front of it give
on a device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.portable import LayerForward
from federation.errors import EmbraceError, InputError
from federation.manifest import Manifest
from federation.space import Vector
from model_export.inputs import sample_of
from model_export.modes import training_modes
from model_export.plain_operators import plain_operators
from model_export.source import reload_source
from model_export.zoo import narrower

SAME = 1e-3  # relative: two programs for the same layers differ by rounding only


def build_module(manifest: Manifest, width: float | None = None) -> nn.Module:
    """Build the module that a bundle was exported from; `width` keeps the first channels of every layer."""
    origin = manifest.source
    if origin.kind == "onnx":
        raise InputError(f"{manifest.name} was exported from an ONNX file, which PyTorch cannot train; use portable")
    if origin.storage not in (None, "float32"):
        raise InputError(f"{manifest.name} stores frozen weights as {origin.storage}; use the engine portable for it")
    if manifest.loss.own is not None:
        raise InputError(f"{manifest.name} has the loss {manifest.loss.own.function}; use the engine portable for it")
    if width is not None:
        origin = replace(origin, reference=narrower(origin.reference, width))
    source = reload_source(
        origin,
        input_shape=manifest.input.shape,
        input_dtype=manifest.input.dtype,
        vocabulary=manifest.vocabulary,
        loss=manifest.loss,
        batch=manifest.batch,
        inputs=manifest.inputs,
    )
    module = source.module()
    still = [path for path, trains in training_modes(module).items() if not trains]
    if still:
        raise InputError(f"{manifest.name} keeps {still[0]!r} in inference mode; use the engine portable for it")
    for part in module.modules():  # counting batches is of use only where an average is taken over all of them
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.momentum is not None:
            part.num_batches_tracked = None
    return module


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def front_module(directory: Path, manifest: Manifest, layer: int, training: bool = False) -> fx.GraphModule:
    """Build a module of everything in front of a layer of the bundle in a directory, in evaluation or training mode."""
    return _cut(directory, manifest, layer, back=False, training=training)


def back_module(directory: Path, manifest: Manifest, layer: int) -> nn.Module:
    """Build a module that takes what enters a layer, in training mode."""
    return _cut(directory, manifest, layer, back=True, training=True)


def _cut(directory: Path, manifest: Manifest, layer: int, back: bool, training: bool) -> fx.GraphModule:
    module = build_module(manifest).train(training)
    load_vector(module, manifest, np.array(map_weights(directory / manifest.weights.name, manifest.space)))
    try:
        with plain_operators():  # what is written out as simple operators is traced as such
            model = _traced(module)
    except Exception as error:  # tracing runs the model's own code
        problem = str(error).strip().splitlines() or [type(error).__name__]
        raise EmbraceError(f"PyTorch cannot trace {manifest.name!r} to cut it: {problem[0]}; use portable") from None
    batch = sample_of(manifest, 2, 1)
    wanted = _entering(directory, manifest, layer, batch)
    number = _place(model, torch.from_numpy(batch), wanted, manifest, layer)
    if number is None:
        name = manifest.layers[layer].name
        raise EmbraceError(f"PyTorch cannot cut {manifest.name!r} in front of {name!r}; use portable")
    piece = _piece(model, number, back).train(training)
    assert isinstance(piece, fx.GraphModule)
    return piece


def fold_norms(module: nn.Module) -> nn.Module:
    """Let a convolution do the batch norm behind it, in a module that only infers: a tenth of the time less.

    Weights are read anew in every call. What PyTorch cannot trace stays as it is.
    """
    try:
        with plain_operators():
            model = module if isinstance(module, fx.GraphModule) else _traced(module)
    except Exception:  # tracing runs the model's own code
        return module
    for node in list(model.graph.nodes):
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or len(before.users) > 1:
            continue
        match [_module_of(model, before), _module_of(model, node)]:
            case [nn.Conv2d(padding_mode="zeros") as convolution, nn.BatchNorm2d(track_running_stats=True) as norm]:
                node.target, node.args = f"folded_{node.name}", before.args
                model.add_submodule(node.target, _Folded(convolution, norm))
                model.graph.erase_node(before)
    model.recompile()
    return model.eval()


def work_in_place(model: fx.GraphModule) -> fx.GraphModule:
    """Let additions and ReLUs overwrite what a batch norm gives: nothing else reads it, its gradient neither."""
    free = set[fx.Node]()
    for node in model.graph.nodes:
        given = node.args[0] if node.args else None
        alone = isinstance(given, fx.Node) and given in free and len(given.users) == 1
        if isinstance(_module_of(model, node), nn.BatchNorm2d):
            free.add(node)
        elif alone and _is_relu(model, node):
            node.op, node.target, node.args, node.kwargs = "call_function", torch.relu_, (given,), {}
        elif alone and node.target in (operator.add, torch.add) and not node.kwargs and given is not node.args[1]:
            node.target = _add
            free.add(node)
    model.recompile()
    return model


def _is_relu(model: fx.GraphModule, node: fx.Node) -> bool:
    return node.target in (torch.relu, F.relu) or isinstance(_module_of(model, node), nn.ReLU)


def _add(x: Tensor, y: Any) -> Tensor:
    """Add to `x` where it lies if the sum has room there."""
    return x.add_(y) if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype else x + y


def _module_of(model: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


class _Folded(nn.Module):
    """A convolution and the batch norm behind it, with running statistics."""

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        convolution, norm = self.convolution, self.norm
        assert norm.running_var is not None and norm.running_mean is not None
        scale, shift = torch.rsqrt(norm.running_var + norm.eps), -norm.running_mean
        if norm.affine:
            scale = scale * norm.weight
        if convolution.bias is not None:
            shift = shift + convolution.bias
        shift = shift * scale + norm.bias if norm.affine else shift * scale
        weight = convolution.weight * scale.reshape(-1, 1, 1, 1)
        return F.conv2d(
            x, weight, shift, convolution.stride, convolution.padding, convolution.dilation, convolution.groups
        )


def load_vector(module: nn.Module, manifest: Manifest, vector: Vector) -> None:
    """Copy a flat vector into a module's parameters and buffers."""
    known = tensors_of(module)
    with torch.no_grad():
        for name, value in manifest.space.views(vector).items():
            if name not in known:
                raise EmbraceError(f"the source model has no parameter {name!r}: it changed since the export")
            known[name].copy_(torch.from_numpy(value))


def _traced(module: nn.Module) -> fx.GraphModule:
    """Trace a module. If it asks for its mode, tracing fixes the present one; modules of torch.nn go on asking."""
    graph = fx.Tracer().trace(module)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (F.dropout, torch.dropout):
            node.target = _dropout
    return fx.GraphModule(module, graph)


def _dropout(*args: Any, **more: Any) -> Any:
    """Call dropout, looked up when it is called: that is where masks of a seed are put in place."""
    return F.dropout(*args, **more)


def _entering(directory: Path, manifest: Manifest, layer: int, batch: np.ndarray) -> np.ndarray:
    value = batch
    for piece in manifest.layers[:layer]:
        value = LayerForward(directory / piece.forward.name)(value)
    return value


def _place(model: fx.GraphModule, batch: Tensor, wanted: np.ndarray, manifest: Manifest, layer: int) -> int | None:
    """Find the node whose value enters a layer: nothing else crosses, and what is trained comes behind it."""
    values = _Values(model.eval())
    values.watch(batch)
    used = list(_used_names(model))
    everything = {p.name for p in manifest.space} & set().union(*used)
    trained = {p.name for piece in manifest.layers[layer:] for p in piece.parameters} & everything
    dropouts = sum(piece.dropouts for piece in manifest.layers[:layer])
    best, least = None, SAME
    for number, node in enumerate(model.graph.nodes):
        value, passed = values.found[node]
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted.shape or passed != dropouts:
            continue
        if set().union(*used[number + 1 :]) & everything == trained and _crosses_alone(model, number):
            gap = float(np.abs(value.numpy() - wanted).max()) / max(float(np.abs(wanted).max()), 1e-6)
            if gap <= least:  # the latest of equals, as the exporter cuts
                best, least = number, gap
    return best


class _Values(fx.Interpreter):
    """Keeps what every node gives, and how many dropouts there were up to it."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.found: dict[fx.Node, tuple[Any, int]] = {}
        self._dropouts = 0

    def watch(self, batch: Tensor) -> None:
        with torch.no_grad(), plain_operators(), mock.patch.object(F, "dropout", self._dropout):
            self.run(batch)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        value = result.clone() if isinstance(result, Tensor) else result  # some operators work in place
        self.found[n] = value, self._dropouts
        return result

    def _dropout(self, input: Tensor, p: float = 0.5, *_: Any, **__: Any) -> Tensor:
        self._dropouts += p > 0
        return input


def _used_names(model: fx.GraphModule) -> Iterator[set[str]]:
    """Yield for every node the names of the parameters and buffers that it uses."""
    for node in model.graph.nodes:
        found: set[str] = set()
        if node.op == "call_module":
            found = {f"{node.target}.{name}" for name in tensors_of(model.get_submodule(node.target))}
        elif node.op == "get_attr":
            found = {str(node.target)}
        yield found


def _data(model: fx.GraphModule) -> set[fx.Node]:
    """Find the nodes that depend on the input."""
    found: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node.op == "placeholder" or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _crosses_alone(model: fx.GraphModule, number: int) -> bool:
    nodes, data = list(model.graph.nodes), _data(model)
    before = set(nodes[: number + 1]) & data
    crossing = {source for node in nodes[number + 1 :] for source in node.all_input_nodes if source in before}
    return crossing == {nodes[number]}


def _piece(model: fx.GraphModule, number: int, back: bool) -> fx.GraphModule:
    """Make a module of the nodes up to a number, or those behind it."""
    nodes, data = list(model.graph.nodes), _data(model)
    graph, known = fx.Graph(), {}
    if back:
        known[nodes[number]] = graph.placeholder("entering")
    for place, node in enumerate(nodes):
        if node not in data or (place > number) == back:
            known[node] = graph.node_copy(node, lambda source: known[source])
    if not back:
        graph.output(known[nodes[number]])
    wanted = {known[node] for node in data if node in known}
    graph.eliminate_dead_code(lambda node: node in wanted or node.op == "output")  # constants of the other piece go
    return fx.GraphModule(model, graph)
