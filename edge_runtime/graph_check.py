"""Check the graphs that a coordinator sends before any of them sees a device's data.

A training graph takes a batch and may give anything: a "gradient" could be the batch itself. So its outputs must be
those of the manifest, shaped like their parameters, computed from the labels and summed over the batch. This stops
the blunt attack only: SECURITY.md says what it does not stop. Whose graphs a device trains is decided by signatures.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path

from edge_runtime.onnx_file import MOST_BYTES, Node, OnnxGraph, Shape, Tensor, Value, read_model, refuse
from federation.manifest import ROWS, Boundary, FileRef, Layer, Manifest, TensorSpec
from federation.space import Parameter
from federation.weights import header

STANDARD = ("", "ai.onnx")
ORT_TRAINING = (*STANDARD, "com.microsoft")  # where onnxruntime-training has its gradients
# Operators that run code or read files of their author's choice, or need not end.
FOREIGN = {"Loop", "ATen", "EPContext", "ExternalGradient", "PythonOp", "PythonOpGrad", "Snpe", "TritonOp", "YieldOp"}
FLOAT, INT64 = 1, 7  # of TensorProto.DataType
_DTYPES = {"float32": FLOAT, "int64": INT64}
BUFFER, WRITTEN = "_grad.accumulation.buffer", "_grad.accumulation.out"

# What a value carries: something of the batch, something of the labels, samples that were not added up.
BATCH, LABELS, RAW = 1, 2, 4
_SIZES = {"Shape", "Size"}  # which carry nothing of what they measure
_ADDING_UP = {
    *(
        "MatMul",
        "Gemm",
        "Einsum",
        "Conv",
        "ConvTranspose",
        "ConvGrad",
        "LSTM",
        "GRU",
        "RNN",
        "CumSum",
        "ScatterElements",
    ),
    *("ScatterND", "ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceMax"),
    *("ReduceLogSumExp", "ReduceMin", "ReduceProd", "GlobalAveragePool", "AveragePool", "BatchNormalization"),
    *("BatchNormInternal", "BatchNormalizationGrad", "LayerNormalizationGrad", "GatherGrad", "Softmax", "LogSoftmax"),
    *("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad", "NegativeLogLikelihoodLoss", "ArgMax", "ArgMin"),
}


def check_training_graph(path: Path, manifest: Manifest, boundary: Boundary) -> None:
    """Refuse a graph of the portable engine that gives other things than the loss, gradients and statistics."""
    graph = _read(path, STANDARD)
    parameters = _parameters(manifest, boundary)
    _check_inputs(graph, {**_batch(manifest, boundary), **_shapes(parameters)})
    results = {p.name + (".grad" if p.kind == "weight" else ".new"): p for p in parameters}
    expected: dict[str, Shape] = {"loss": ()}
    if manifest.loss_chunk is None:
        expected["predictions"] = (None, *manifest.output.shape)
    expected |= {name: p.shape for name, p in results.items()}
    _check_outputs(graph, expected)
    _check_nothing_outside(graph, stored=manifest.stored)
    carried = _carried(graph, {"input": BATCH | RAW, "labels": LABELS})
    _check_gradients(carried, {name for name, p in results.items() if p.kind == "weight"})
    _check_sums(carried, results)
    if not carried["loss"] & LABELS:
        refuse("its loss does not depend on the labels")


def check_ort_training_graph(path: Path, manifest: Manifest, boundary: Boundary) -> None:
    """Refuse a graph of onnxruntime-training in the same way: gradients are written to buffers, with a flag each."""
    graph = _read(path, ORT_TRAINING)
    parameters = _parameters(manifest, boundary)
    buffers: dict[str, Shape] = {p.name + BUFFER: p.shape for p in parameters if p.kind == "weight"}
    _check_inputs(graph, {**_batch(manifest, boundary), **_shapes(parameters), **buffers, "lazy_reset_grad": (1,)})
    flags = [p.name + WRITTEN for p in parameters if p.kind == "weight"]
    _check_outputs(graph, {"loss": (), **dict.fromkeys(flags, (1,))})
    _check_nothing_outside(graph)
    for node in graph.nodes:
        if any(name in buffers for name in node.inputs) and node.operator != "InPlaceAccumulatorV2":
            refuse(f"{node.operator} takes the buffer of a gradient")
    carried = _carried(graph, {"input": BATCH | RAW, "labels": LABELS})
    _check_gradients(carried, set(flags))
    _check_sums(carried, flags)


def check_loss_graph(path: Path, manifest: Manifest) -> None:
    """Refuse the graph of a loss that gives other things than two numbers for a batch."""
    graph = _read(path, STANDARD)
    _check_inputs(graph, {"predictions": (None, *manifest.output.shape), "labels": (None, *manifest.labels.shape)})
    _check_outputs(graph, {"loss": (), "counted": ()})
    _check_nothing_outside(graph)
    _carried(graph, {"predictions": BATCH, "labels": LABELS})


def check_forward_graph(path: Path, manifest: Manifest, layer: Layer, *, measuring: bool = False) -> None:
    """Refuse a frozen layer that takes its weights from elsewhere than their own places in the weights file.

    What a graph that is `measuring` gives of each row stays on the device, which sums it up over all its samples.
    """
    graph = _read(path, STANDARD)
    _check_inputs(graph, {"input": (None, *layer.input.shape)})
    rows = {p.name + ROWS: (None, *p.shape) for p in layer.parameters if measuring and p.name in layer.measured}
    _check_outputs(graph, {"output": (None, *layer.output.shape), **rows}, layer.output)
    space, start = manifest.space, len(header(manifest.space))
    own = {
        p.name: (p.shape, start + 4 * space.slice_of(p.name).start, 4 * p.size) for p in manifest.parameters_of(layer)
    }
    for tensor in graph.tensors:
        known = _is_stored(tensor, manifest.stored) or _is_own(tensor, own.get(tensor.name), manifest.weights.name)
        if tensor.external is not None and not known:
            refuse(f"{tensor.name[:80]!r} takes its values from another place than its own in the weights file")
    _check_nothing_outside(graph, besides=set(own), stored=manifest.stored)
    _carried(graph, {"input": BATCH})


def _read(path: Path, domains: Iterable[str]) -> OnnxGraph:
    size = path.stat().st_size
    if size > MOST_BYTES:
        refuse(f"{path.name} has {size} bytes; expected at most {MOST_BYTES}")
    model = read_model(path.read_bytes())
    if model.extras:
        refuse(f"{path.name} has {model.extras[0]}")
    for node in _all_nodes(model.graph):
        if node.domain not in domains or node.operator in FOREIGN:
            refuse(f"{path.name} has the operator {node.domain[:80] or 'ai.onnx'}::{node.operator[:80]}")
    return model.graph


def _all_nodes(graph: OnnxGraph) -> Iterable[Node]:
    for node in graph.nodes:
        yield node
        for inner in node.graphs:
            yield from _all_nodes(inner)


def _parameters(manifest: Manifest, boundary: Boundary) -> list[Parameter]:
    return [p for layer in boundary.space(manifest).layers[boundary.layer :] for p in layer]


def _shapes(parameters: Iterable[Parameter]) -> dict[str, Shape]:
    return {p.name: p.shape for p in parameters}


def _batch(manifest: Manifest, boundary: Boundary) -> dict[str, Shape]:
    first = manifest.entry(boundary)
    return {"input": (None, *first.shape), "labels": (None, *manifest.labels.shape), "seed": ()}


def _check_inputs(graph: OnnxGraph, known: Mapping[str, Shape]) -> None:
    for value in graph.inputs:
        if value.name not in known or not _fits(value, known[value.name]):
            refuse(f"its input {value.name[:80]!r} is none that the manifest describes")


def _check_outputs(graph: OnnxGraph, expected: Mapping[str, Shape], kind: TensorSpec | None = None) -> None:
    names = [value.name for value in graph.outputs]
    if len(set(names)) != len(names) or set(names) != set(expected):
        wrong = sorted(set(names) ^ set(expected)) or sorted(names)
        refuse(f"its outputs are not those of the manifest: {wrong[0][:80]!r}")
    dtype = _DTYPES.get(kind.dtype if kind else "float32")
    for value in graph.outputs:
        flag = value.name.endswith(WRITTEN)
        if not _fits(value, expected[value.name]) or (dtype is not None and value.dtype != dtype and not flag):
            refuse(f"its output {value.name[:80]!r} is not shaped like what it is the result for")


def _fits(value: Value, shape: Shape) -> bool:
    """Whether a value is declared with this shape; where None is expected, any size of a batch."""
    if value.shape is None or len(value.shape) != len(shape):
        return False
    return all(wanted is None or found == wanted for found, wanted in zip(value.shape, shape))


def _is_own(tensor: Tensor, place: tuple[Shape, int, int] | None, weights: str) -> bool:
    if place is None or tensor.external is None or tensor.shape != place[0]:
        return False
    return tensor.external == {"location": weights, "offset": str(place[1]), "length": str(place[2])}


def _is_stored(tensor: Tensor, stored: FileRef | None) -> bool:
    """Whether a tensor lies inside the file of frozen weights."""
    place = tensor.external
    if stored is None or place is None or set(place) != {"location", "offset", "length"}:
        return False
    numbers = [place["offset"], place["length"]]
    if place["location"] != stored.name or not all(text.isdecimal() and len(text) < 16 for text in numbers):
        return False
    return sum(map(int, numbers)) <= stored.bytes


def _check_nothing_outside(graph: OnnxGraph, besides: Iterable[str] = (), stored: FileRef | None = None) -> None:
    held = [tensor for node in _all_nodes(graph) for inner in node.graphs for tensor in inner.tensors]
    held += [tensor for node in _all_nodes(graph) for tensor in node.tensors]
    held += [t for t in graph.tensors if t.name not in set(besides) and not _is_stored(t, stored)]
    for tensor in held:
        if tensor.external is not None:
            refuse(f"{tensor.name[:80]!r} takes its values from another file")


def _carried(graph: OnnxGraph, inputs: Mapping[str, int], outer: Mapping[str, int] | None = None) -> Mapping[str, int]:
    """Follow what is computed from the batch and from the labels to every value of a graph."""
    own = dict.fromkeys((tensor.name for tensor in graph.tensors), 0)
    own |= {value.name: inputs.get(value.name, 0) for value in graph.inputs}
    values = own if outer is None else ChainMap(own, outer)  # type: ignore[arg-type]
    for node in graph.nodes:
        carried = 0
        for name in filter(None, node.inputs):
            if name not in values:
                refuse(f"{node.operator[:80]} takes {name[:80]!r}, which nothing gives before")
            carried |= values[name]
        for inner in node.graphs:
            found = _carried(inner, dict.fromkeys((value.name for value in inner.inputs), carried), values)
            carried |= _together(found, inner)
        if node.operator in _SIZES:
            carried = 0
        elif node.operator in _ADDING_UP:
            carried &= ~RAW
        for name in filter(None, node.outputs):
            if name in own:
                refuse(f"{node.operator[:80]} gives {name[:80]!r}, which is there already")
            own[name] = carried
    for value in graph.outputs:
        if value.name not in values:
            refuse(f"nothing gives its output {value.name[:80]!r}")
    return values


def _together(values: Mapping[str, int], graph: OnnxGraph) -> int:
    found = 0
    for value in graph.outputs:
        found |= values[value.name]
    return found


def _check_gradients(carried: Mapping[str, int], gradients: Iterable[str]) -> None:
    for name in gradients:
        if carried[name] & BATCH and not carried[name] & LABELS:
            refuse(f"{name[:80]!r} is computed from the batch and not through the loss: no path from the labels")


def _check_sums(carried: Mapping[str, int], results: Iterable[str]) -> None:
    for name in results:
        if carried[name] & RAW:
            refuse(f"{name[:80]!r} is made of single samples, not of a sum over the batch")
