"""The last layers of a bundle as one training graph that also gives the gradient of what enters them.

A bundle's own training graphs end at their boundary: nothing in front of it is trained. This one is for a program that
trains the layers in front itself. It is differentiated anew from the layers' forward graphs, because capturing the
model again takes seconds, and this takes less than a tenth of one.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import external_data_helper, helper

from edge_runtime.join_layers import join_layers
from federation.manifest import Layer, Manifest
from model_export.autodiff.registry import has_rule
from model_export.errors import ExportError
from model_export.graph import attribute, serialise
from model_export.layers import split_layers
from model_export.normalise import normalise
from model_export.shapes import sample_input
from model_export.training import training_graph


def tail_graph(directory: Path, manifest: Manifest, first: int) -> bytes:
    """Write the training graph of a layer and all behind it; `directory` is the bundle's.

    Layers that draw random numbers, share weights or read stored ones need more than their forward graphs: ExportError.
    """
    layers = manifest.layers[first:]
    if any(layer.dropouts or layer.borrowed or layer.stored or layer.packed for layer in layers):
        raise ExportError(f"the layers from {layers[0].name!r} on are more than their forward graphs")
    entering = layers[0].input
    graph = normalise(
        _joined(directory, layers),
        [p.name for layer in layers for p in layer.parameters if p.kind == "weight"],
        lambda batch: sample_input(entering.shape, entering.dtype, None, batch, 1),
        has_rule,
    )
    return serialise(training_graph(graph, split_layers(graph), manifest.loss, entering=True))


def _joined(directory: Path, layers: tuple[Layer, ...]) -> onnx.ModelProto:
    """Join forward graphs, with weights inside."""
    model = onnx.load_from_string(join_layers([(directory / layer.forward.name).read_bytes() for layer in layers]))
    external_data_helper.load_external_data_for_model(model, str(directory))
    own = {p.name for layer in layers for p in layer.parameters}
    numbered = [name for node in model.graph.node for name in node.input]
    names = {name: name.partition("/")[2] for name in numbered if name.partition("/")[2] in own}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    _set_momentum(model, layers)
    return model


def _set_momentum(model: onnx.ModelProto, layers: tuple[Layer, ...]) -> None:
    """Say how fast statistics move: forward graphs of older bundles leave that out, what measures them knows it."""
    known = {norm.mean: norm.momentum for layer in layers if layer.measuring for norm in layer.measuring.norms}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and attribute(node, "momentum") is None:
            if node.input[3] not in known:
                raise ExportError(f"it is not known how fast {node.input[3]!r} moves")
            node.attribute.append(helper.make_attribute("momentum", 1.0 - known[node.input[3]]))
