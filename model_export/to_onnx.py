"""A trained bundle as what other programs read: one ONNX file, and a PyTorch state dict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from edge_runtime.bundle_files import map_weights, read_manifest
from federation.manifest import Manifest
from federation.space import Vector
from model_export.errors import ExportError
from model_export.graph import PRODUCER, serialise

MOST_BYTES = 2**31 - 2**20  # what fits into one protobuf message


def write_onnx(directory: Path, path: Path) -> None:
    """The whole model as one forward graph with its weights inside: input `input`, output `output`."""
    manifest = read_manifest(directory)
    if manifest.weights.bytes > MOST_BYTES:
        raise ExportError(f"{manifest.weights.bytes} bytes of weights do not fit into one ONNX file; use the bundle")
    values = manifest.space.views(np.array(map_weights(directory / manifest.weights.name, manifest.space)))
    nodes, constants, entering = [], [], "input"
    first = last = None
    for number, layer in enumerate(manifest.layers):
        model = onnx.load(directory / layer.forward.name, load_external_data=False)
        graph = model.graph
        leaving = "output" if number == len(manifest.layers) - 1 else f"{layer.name}/output"
        names = {"input": entering, "output": leaving}

        def renamed(name: str, prefix: str = layer.name, names: dict[str, str] = names) -> str:
            return names.get(name, name if not name or name in values else f"{prefix}/{name}")

        for tensor in graph.initializer:
            own = values.get(tensor.name)
            kept = numpy_helper.from_array(own, tensor.name) if own is not None else tensor
            kept.name = renamed(tensor.name)
            constants.append(kept)
        for node in graph.node:
            _rename(node, renamed)
            nodes.append(node)
        first, last, entering = first or model, model, leaving
    assert first is not None and last is not None
    graph = helper.make_graph(nodes, manifest.name, first.graph.input, last.graph.output, constants)
    made = helper.make_model(graph, opset_imports=first.opset_import, producer_name=PRODUCER)
    made.ir_version = first.ir_version
    path.write_bytes(serialise(made))


def _rename(node: onnx.NodeProto, renamed: object) -> None:
    assert callable(renamed)
    node.name = renamed(node.name)
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = renamed(name)
    for item in node.attribute:
        if item.type == onnx.AttributeProto.GRAPH:
            inner = {value.name for value in item.g.input}
            for child in item.g.node:
                _rename(child, lambda name, inner=inner: name if name in inner else renamed(name))
            for value in item.g.output:
                value.name = value.name if value.name in inner else renamed(value.name)
            for tensor in item.g.initializer:
                tensor.name = renamed(tensor.name)


def write_state_dict(directory: Path, path: Path) -> None:
    """Parameters and statistics by their names in the module: `module.load_state_dict(torch.load(path))`."""
    manifest: Manifest = read_manifest(directory)
    vector: Vector = np.array(map_weights(directory / manifest.weights.name, manifest.space))
    torch.save({name: torch.from_numpy(value.copy()) for name, value in manifest.space.views(vector).items()}, path)
