"""A trained bundle as what other programs read: one ONNX file, and a PyTorch state dict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from edge_runtime.bundle_files import map_weights, read_manifest
from federation.inputs import NamedInput, row_dtype
from federation.manifest import Manifest
from federation.preprocessing import PLAIN
from federation.space import Vector
from model_export.errors import ExportError
from model_export.frozen import read_frozen, restore
from model_export.graph import PRODUCER, serialise
from model_export.lora import A, B, merge_adapters
from model_export.normalise import VALUE_PREFIX

INPUT_ROW, OUTPUT_ROW = "inputs/row", "outputs/row"  # of several
MOST_BYTES = 2**31 - 2**20  # what fits into one protobuf message


def write_onnx(directory: Path, path: Path) -> None:
    """The whole model as one forward graph with its weights inside: input `input`, output `output`.

    A model of several inputs has these by their names, in their own types and shapes; several outputs likewise.
    Its metadata says what a program that runs it has to know: names of the classes, and how values become inputs.
    """
    manifest = read_manifest(directory)
    if manifest.weights.bytes > MOST_BYTES:
        raise ExportError(f"{manifest.weights.bytes} bytes of weights do not fit into one ONNX file; use the bundle")
    values = manifest.space.views(np.array(map_weights(directory / manifest.weights.name, manifest.space)))
    frozen = read_frozen(directory, manifest)
    nodes, constants, entering = [], [], "input" if manifest.inputs is None else INPUT_ROW
    first = last = None
    held: set[str] = set()
    for number, layer in enumerate(manifest.layers):
        model = onnx.load(directory / layer.forward.name, load_external_data=False)
        graph = model.graph
        restore(graph, frozen)
        if manifest.source.lora is not None:
            merge_adapters(graph, values, manifest.source.lora)
        leaving = f"{layer.name}/output"
        if number == len(manifest.layers) - 1:
            leaving = "output" if manifest.loss.outputs is None else OUTPUT_ROW
        names = {"input": entering, "output": leaving}

        def renamed(name: str, prefix: str = layer.name, names: dict[str, str] = names) -> str:
            return names.get(name, name if not name or name in values else f"{prefix}/{name}")

        for tensor in graph.initializer:
            own = values.get(tensor.name)
            if own is not None and tensor.name in held:
                continue  # a later layer's, borrowed
            held.add(tensor.name)
            kept = numpy_helper.from_array(own, tensor.name) if own is not None else tensor
            kept.name = renamed(tensor.name)
            constants.append(kept)
        for node in graph.node:
            _rename(node, renamed)
            nodes.append(node)
        first, last, entering = first or model, model, leaving
    assert first is not None and last is not None
    takes, gives = first.graph.input, last.graph.output
    if manifest.inputs is not None:
        takes = [_tensor_info(item) for item in manifest.inputs]
        nodes = [*_side_by_side(manifest.inputs, constants), *nodes]
    if manifest.loss.outputs is not None:
        gives = [_tensor_info(item) for item in manifest.loss.outputs]
        nodes += _apart(manifest.loss.outputs, constants)
    graph = helper.make_graph(nodes, manifest.name, takes, gives, constants)
    made = helper.make_model(graph, opset_imports=first.opset_import, producer_name=PRODUCER)
    made.ir_version = first.ir_version
    helper.set_model_props(made, metadata(manifest))
    path.write_bytes(serialise(made))


def _tensor_info(item: NamedInput) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(item.dtype))
    return helper.make_tensor_value_info(item.name, kind, ["N", *item.shape])


def _held(constants: list[onnx.TensorProto], name: str, numbers: Sequence[int]) -> str:
    constants.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
    return name


def _side_by_side(inputs: Sequence[NamedInput], constants: list[onnx.TensorProto]) -> list[onnx.NodeProto]:
    """Write named inputs into the row that the first layer takes."""
    nodes, rows = [], []
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(row_dtype(inputs)))
    for number, item in enumerate(inputs):
        place = f"inputs/{number}"
        shape = _held(constants, f"{place}/shape", [-1, item.size])
        nodes.append(helper.make_node("Reshape", [item.name, shape], [f"{place}/flat"], f"{place}/Reshape"))
        nodes.append(helper.make_node("Cast", [f"{place}/flat"], [f"{place}/row"], f"{place}/Cast", to=kind))
        rows.append(f"{place}/row")
    return [*nodes, helper.make_node("Concat", rows, [INPUT_ROW], "inputs/Concat", axis=1)]


def _apart(outputs: Sequence[NamedInput], constants: list[onnx.TensorProto]) -> list[onnx.NodeProto]:
    """Take the row that the last layer gives apart into named outputs."""
    sizes = _held(constants, "outputs/sizes", [item.size for item in outputs])
    rows = [f"outputs/{number}" for number in range(len(outputs))]
    nodes = [helper.make_node("Split", [OUTPUT_ROW, sizes], rows, "outputs/Split", axis=1)]
    for row, item in zip(rows, outputs, strict=True):
        shape = _held(constants, f"{row}/shape", [-1, *item.shape])
        nodes.append(helper.make_node("Reshape", [row, shape], [item.name], f"{row}/Reshape"))
    return nodes


def metadata(manifest: Manifest) -> dict[str, str]:
    """Describe input and output: JSON under names that ONNX's `metadata_props` takes."""
    shape, dtype = manifest.input.shape, manifest.input.dtype
    image = len(shape) == 3 and shape[0] in (1, 3) and dtype.startswith("float")
    layout = {"layout": "NCHW", "channels": "RGB" if shape[0] == 3 else "grey"} if image else {}
    facts: dict[str, Any] = {"input": {"dtype": dtype, "shape": shape, **layout}, "loss": manifest.loss.name}
    if manifest.classes is not None:
        facts["classes"] = manifest.classes
    if dtype.startswith("float"):
        own = manifest.preprocessing or PLAIN
        scale = {"uint8": own.factor(np.dtype(np.uint8)), "other": own.factor(np.dtype(np.float32))}
        facts["preprocessing"] = {"scale": scale, "mean": own.mean or (0.0,), "std": own.std or (1.0,)}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()}


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
    """Parameters and statistics by their names in the module: `module.load_state_dict(torch.load(path))`.

    Adapters are added to the weights that they belong to.
    """
    manifest: Manifest = read_manifest(directory)
    vector: Vector = np.array(map_weights(directory / manifest.weights.name, manifest.space))
    values = _whole(directory, manifest, dict(manifest.space.views(vector)))
    torch.save({name: torch.from_numpy(value.copy()) for name, value in values.items()}, path)


def _whole(directory: Path, manifest: Manifest, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights of the model itself: stored ones, too, and those that adapters were added to."""
    frozen, lora = read_frozen(directory, manifest), manifest.source.lora
    if lora is None:
        return {**values, **frozen}
    found = {**{name: value for name, value in values.items() if not name.endswith((f".{A}", f".{B}"))}, **frozen}
    for layer in manifest.layers:
        graph = onnx.load(directory / layer.forward.name, load_external_data=False).graph
        found |= {item.name: numpy_helper.to_array(item) for item in graph.initializer if _is_small_weight(item)}
        restore(graph, frozen)
        found |= merge_adapters(graph, values, lora)
    return found


def _is_small_weight(item: onnx.TensorProto) -> bool:
    """Tell a frozen weight, which a graph holds under its own name, from constants of the graph."""
    own = VALUE_PREFIX not in item.name and ":" not in item.name and ".const" not in item.name
    return own and item.data_type == onnx.TensorProto.FLOAT and item.data_location != onnx.TensorProto.EXTERNAL
