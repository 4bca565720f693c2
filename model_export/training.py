"""The graphs of a bundle: one inference graph per layer, one training graph per boundary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from federation.manifest import ROWS, WEIGHTS_NAME, BatchNorm, Loss, TensorSpec
from federation.space import Parameter
from model_export.autodiff.chunked_loss import find_output_product, write_chunked_loss
from model_export.autodiff.engine import Context, active_values, write_backward, write_forward
from model_export.autodiff.fewer_passes import rewrite
from model_export.autodiff.layouts.layout import choose_layout
from model_export.autodiff.losses import LABELS_INPUT, labels_spec, write_loss
from model_export.autodiff.rules.dropout import (
    SEED_INPUT,
    SEEDED,
    dropout_forward,
    dropout_rate,
    mean_of_random,
    random_forward,
)
from model_export.autodiff.rules.recurrent import GATES
from model_export.crossing import pack_nodes, unpack_nodes
from model_export.frozen import remake_frozen, without_double_transposes
from model_export.graph import (
    Emitter,
    Graph,
    attribute,
    inputs_with_subgraphs,
    make_model,
    needed_nodes,
    tensor_info,
    write_batch_values,
)
from model_export.head import HeadCut
from model_export.layers import LayerGraph, with_helpers
from model_export.own_loss import TracedLoss
from model_export.packing import pack
from model_export.power_iteration import write_power_iterations

INPUT, OUTPUT, PREDICTIONS, LOSS = "input", "output", "predictions", "loss"
GRADIENT_SUFFIX, NEW_SUFFIX = ".grad", ".new"
INPUT_GRADIENT = f"{INPUT}{GRADIENT_SUFFIX}"
_WHOLE = np.dtype(np.int64)  # no gradient goes there


def tensor_spec(graph: Graph, name: str) -> TensorSpec:
    """Type and shape of a value for one sample."""
    return TensorSpec(str(graph.dtypes[name]), tuple(int(dim or 0) for dim in graph.shapes[name][1:]))


def dropout_numbers(graph: Graph) -> dict[str, int]:
    """Everything that draws, by its output: its number is part of its seed, whatever the boundary."""
    found = [node.output[0] for node in graph.nodes if node.op_type in SEEDED]
    return {name: number for number, name in enumerate(found)}


def dropout_rates(graph: Graph) -> dict[str, float]:
    """The share that each dropout drops, by its output."""
    context = Context(Emitter(), graph.shapes, graph.constants, set())
    return {node.output[0]: dropout_rate(context, node) for node in graph.nodes if node.op_type == "Dropout"}


def training_graph(
    graph: Graph,
    layers: Sequence[LayerGraph],
    loss: Loss,
    last_steps: int | None = None,
    cut: HeadCut | None = None,
    *,
    alone: bool = False,
    traced: TracedLoss | None = None,
    parts: Mapping[str, int] | None = None,
    entering: bool = False,
) -> onnx.ModelProto:
    """Loss, gradients and new statistics of consecutive layers that end at the output; `cut`: behind a head.

    `alone`: with stored weights inside, for a look at its values before their file is there. `traced`: the loss `own`.
    `parts`: see `Context`. `entering`: with the gradient of what enters, for whatever trains the layers in front.
    """
    source = layers[0].input
    nodes = _suffix_nodes(graph, layers)
    parameters = [p for layer in layers for p in layer.parameters]
    trainable = [p.name for p in parameters if p.kind == "weight"]
    wanted = [*trainable, source] if entering else trainable
    active = active_values(nodes, wanted, graph.dtypes)
    nodes, shapes, active = rewrite(nodes, graph.output, graph.shapes, graph.constants, active)
    layout = choose_layout(nodes, [source], graph.output, shapes, graph.constants, active)
    nodes = layout.nodes
    emitter = Emitter()
    numbers = dropout_numbers(graph)
    context = Context(
        emitter,
        layout.shapes,
        dict(graph.constants),
        layout.active,
        last_steps,
        numbers,
        graph.fixed_rows,
        cut.heads if cut else None,
        parts,
    )
    if cut:
        with emitter.scope("forward"):
            cut.read(context, INPUT)
    write_batch_values(emitter, graph, source)
    own = {p.name for p in parameters}
    moved = write_power_iterations(context, [item for item in graph.power_iterations if item.u in own])
    write_forward(context, nodes)
    remake_frozen(context, graph, nodes)
    product = find_output_product(graph, loss)
    behind: list[NodeProto] = []
    if traced is not None:
        value, behind, seeds = _write_traced(context, traced, graph)
    elif product is not None:
        value, seeds = write_chunked_loss(context, graph, loss, product)
    else:
        value, seed = write_loss(context, loss, graph.output)
        seeds = {graph.output: seed}
    gradients = write_backward(context, [*nodes, *behind], seeds, wanted)
    labels = traced.label_spec if traced else labels_spec(loss, tensor_spec(graph, graph.output))

    inputs = [tensor_info(INPUT, graph.dtypes[source], (None, cut.size) if cut else graph.shapes[source])]
    inputs.append(tensor_info(LABELS_INPUT, labels.dtype, (None, *labels.shape)))
    if any(SEED_INPUT in node.input for node in emitter.nodes):
        inputs.append(tensor_info(SEED_INPUT, np.int64, ()))
    inputs += [_parameter_info(p) for p in parameters]
    results = {LOSS: value} if product else {LOSS: value, PREDICTIONS: graph.output}
    results |= {f"{name}{GRADIENT_SUFFIX}": gradients[name] for name in trainable}
    results |= {INPUT_GRADIENT: gradients[source]} if entering else {}
    results |= {f"{name}{NEW_SUFFIX}": new for name, new in context.new_statistics.items()}
    outputs = [tensor_info(LOSS, np.float32, ())]
    outputs += [] if product else [tensor_info(PREDICTIONS, np.float32, graph.shapes[graph.output])]
    outputs += [tensor_info(INPUT_GRADIENT, np.float32, graph.shapes[source])] if entering else []
    outputs += [_parameter_info(p, GRADIENT_SUFFIX if p.kind == "weight" else NEW_SUFFIX) for p in parameters]
    constants = {**context.constants, **emitter.constants}
    nodes = rename(emitter, moved if cut else {source: INPUT, **moved}, results)
    if graph.stored:
        without_double_transposes(nodes)
    places = None if alone else graph.places
    return make_model("train", nodes, inputs, outputs, constants, graph.opset, places=places)


def _write_traced(context: Context, traced: TracedLoss, graph: Graph) -> tuple[str, list[NodeProto], dict[str, str]]:
    """Write a traced loss behind the model: (its value, its nodes, the gradient that it begins with)."""
    own = traced.graph
    nodes = [*traced.entry(graph.output), *own.nodes]
    context.constants = {**context.constants, **own.constants}
    context.shapes |= own.shapes
    context.active |= active_values(nodes, context.active, {**graph.dtypes, **own.dtypes, LABELS_INPUT: _WHOLE})
    write_batch_values(context.emitter, own, LABELS_INPUT)
    write_forward(context, nodes)
    with context.emitter.scope("forward/loss"):
        value = context.op("Gather", own.output, 0, axis=0)
    return value, nodes, {own.output: context.constant(np.array([1, 0], np.float32))}


def _suffix_nodes(graph: Graph, layers: Sequence[LayerGraph]) -> list[NodeProto]:
    """The nodes of consecutive layers, with those that take apart what enters the first."""
    unpacking = unpack_nodes(graph, layers[0].input, layers[0].entering)
    return [*unpacking, *with_helpers(graph, [node for layer in layers for node in layer.nodes])]


def _parameter_info(parameter: Parameter, suffix: str = "") -> onnx.ValueInfoProto:
    return tensor_info(f"{parameter.name}{suffix}", np.float32, parameter.shape)


def rename(emitter: Emitter, inputs: Mapping[str, str], results: Mapping[str, str]) -> list[NodeProto]:
    """Give inputs and results their public names; a value with two public names is copied to the second."""
    made = {name for node in emitter.nodes for name in node.output}
    names = dict(inputs)
    for public, value in results.items():
        if value in made and value not in names:
            names[value] = public
        else:
            with emitter.scope("backward" if public.endswith(GRADIENT_SUFFIX) else "forward"):
                emitter.ops("Identity", [public], names.get(value, value))
    for node in emitter.nodes:
        _rename_in(node, names)
    return emitter.nodes


def _rename_in(node: NodeProto, names: Mapping[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for item in node.attribute:
        if item.type == onnx.AttributeProto.GRAPH:
            for child in item.g.node:
                _rename_in(child, names)


def inference_graph(graph: Graph, layer: LayerGraph, places: Mapping[str, tuple[int, int]] | None) -> onnx.ModelProto:
    """One frozen layer. `places` says where in the weights file each parameter lies (offset, bytes).

    Without places the parameters are held in the graph itself.
    """
    context, used = _layer_context(graph, layer), [*layer.parameters, *layer.borrowed]
    results, outputs = {OUTPUT: layer.output}, [_layer_output(graph, layer)]
    return _frozen_graph(context.emitter, graph, layer.input, results, outputs, used, places)


def _layer_context(graph: Graph, layer: LayerGraph) -> Context:
    """The nodes of a frozen layer, written."""
    context = _frozen_context(graph, layer.input)
    for node in [*_suffix_nodes(graph, [layer]), *pack_nodes(graph, layer.leaving, layer.output)]:
        _write_inference_node(context, node)
    return context


def _layer_output(graph: Graph, layer: LayerGraph) -> onnx.ValueInfoProto:
    return tensor_info(OUTPUT, graph.dtypes[layer.output], graph.shapes[layer.output])


def measured_norms(graph: Graph, layer: LayerGraph) -> dict[BatchNorm, str]:
    """The batch norms of a layer that a device which does not train it can report of, with what enters each.

    One that is used twice has no statistics of a single place, and is left to devices that train it.
    """
    uses = Counter(node.input[3] for node in graph.nodes if node.op_type == "BatchNormalization")
    own, found = {p.name for p in layer.parameters if p.kind == "statistic"}, {}
    for node in (node for node in layer.nodes if node.op_type == "BatchNormalization"):
        x, mean, variance = node.input[0], node.input[3], node.input[4]
        positions = math.prod(size or 0 for size in graph.shapes[x][2:])  # 0: it is not known how many
        momentum = round(1.0 - float(attribute(node, "momentum", 0.9)), 6)
        if uses[mean] == 1 and {mean, variance} <= own and positions and momentum > 0:
            found[BatchNorm(mean, variance, momentum, positions)] = x
    return found


def measuring_graph(
    graph: Graph, layer: LayerGraph, places: Mapping[str, tuple[int, int]] | None
) -> tuple[onnx.ModelProto, tuple[BatchNorm, ...]] | None:
    """One frozen layer that also gives, of every row that enters a batch norm, mean and biased variance per channel.

    None: it has no batch norm.
    """
    norms = measured_norms(graph, layer)
    if not norms:
        return None
    context = _layer_context(graph, layer)
    results, outputs = {OUTPUT: layer.output}, [_layer_output(graph, layer)]
    for norm, x in norms.items():
        flat = context.op("Reshape", x, np.array([0, 0, -1], np.int64))
        mean = context.op("ReduceMean", flat, [2], keepdims=1)
        centred = context.op("Sub", flat, mean)
        variance = context.op("ReduceMean", context.op("Mul", centred, centred), [2], keepdims=0)
        rows = {norm.mean: context.op("Squeeze", mean, [2]), norm.variance: variance}
        results |= {name + ROWS: value for name, value in rows.items()}
        outputs += [tensor_info(name + ROWS, np.float32, (None, graph.shapes[x][1])) for name in rows]
    used = [*layer.parameters, *layer.borrowed]
    return _frozen_graph(context.emitter, graph, layer.input, results, outputs, used, places), tuple(norms)


def head_graph(cut: HeadCut, places: Mapping[str, tuple[int, int]] | None) -> tuple[onnx.ModelProto, list[Parameter]]:
    """The steps in front of a cut as one frozen layer, and the parameters it has."""
    graph, source = cut.graph, cut.layers[0].input
    context = _frozen_context(graph, source, cut.last_steps)
    for node in [*unpack_nodes(graph, source, cut.layers[0].entering), *with_helpers(graph, cut.nodes)]:
        _write_inference_node(context, node)
        if node.op_type in GATES:
            cut.write(context, node)
    packed = pack(context.emitter, cut.values)
    nodes = needed_nodes(context.emitter.nodes, [packed])
    used = {name for node in nodes for name in inputs_with_subgraphs(node)}
    parameters = [p for layer in cut.layers for p in layer.parameters if p.name in used]
    output = tensor_info(OUTPUT, np.float32, (None, cut.size))
    return _frozen_graph(context.emitter, graph, source, {OUTPUT: packed}, [output], parameters, places), parameters


def _frozen_context(graph: Graph, source: str, last_steps: int | None = None) -> Context:
    emitter = Emitter()
    write_batch_values(emitter, graph, source)
    return Context(emitter, graph.shapes, graph.constants, set(), last_steps)


def _frozen_graph(
    emitter: Emitter,
    graph: Graph,
    source: str,
    results: Mapping[str, str],
    outputs: Sequence[onnx.ValueInfoProto],
    parameters: Sequence[Parameter],
    places: Mapping[str, tuple[int, int]] | None,
) -> onnx.ModelProto:
    held = {} if places is not None else {p.name: graph.parameters()[p.name] for p in parameters}
    external = [] if places is None else [_external(p, *places[p.name]) for p in parameters]
    nodes = rename(emitter, {source: INPUT}, results)
    inputs = [tensor_info(INPUT, graph.dtypes[source], graph.shapes[source])]
    constants = {**graph.constants, **emitter.constants, **held}
    return make_model("forward", nodes, inputs, outputs, constants, graph.opset, external, graph.places)


def _write_inference_node(context: Context, node: NodeProto) -> None:
    """Batch norm uses its running statistics, dropout does nothing, what is drawn is its mean."""
    if node.op_type == "BatchNormalization":
        # onnxruntime-training makes this node train again, with its momentum.
        kept = {name: float(attribute(node, name, usual)) for name, usual in (("epsilon", 1e-5), ("momentum", 0.9))}
        context.ops("BatchNormalization", [node.output[0]], *node.input, **kept)
    elif node.op_type == "Dropout":
        context.ops("Identity", [node.output[0]], node.input[0])
    elif node.op_type in SEEDED:
        value = numpy_helper.from_array(np.array([mean_of_random(node)], np.float32))
        context.ops("ConstantOfShape", [node.output[0]], context.runtime_shape(node.input[0]), value=value)
    else:
        context.emitter.copy(node)


def _external(parameter: Parameter, offset: int, length: int) -> TensorProto:
    """An initialiser whose bytes lie in the weights file (or are supplied at load)."""
    tensor = TensorProto(name=parameter.name, data_type=TensorProto.FLOAT, dims=parameter.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS_NAME), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def uses_seed(graph: Graph) -> bool:
    draws = any(node.op_type in SEEDED and node.op_type != "Dropout" for node in graph.nodes)
    return draws or any(rate > 0 for rate in dropout_rates(graph).values())


def ort_forward_graph(graph: Graph, layers: Sequence[LayerGraph]) -> onnx.ModelProto:
    """The forward pass of a suffix with its parameters inside, as onnxruntime-training wants it.

    Batch norm stays in inference form (that package turns it into its own training operator). Dropout is written out
    with masks from the seed, so that both engines drop the same elements.
    """
    source = layers[0].input
    emitter = Emitter()
    write_batch_values(emitter, graph, source)
    context = Context(emitter, graph.shapes, graph.constants, set(), dropout_numbers=dropout_numbers(graph))
    for node in _suffix_nodes(graph, layers):
        if node.op_type == "Dropout":
            dropout_forward(context, node)
        elif node.op_type in SEEDED:
            random_forward(context, node)
        else:
            _write_inference_node(context, node)
    inputs = [tensor_info(INPUT, graph.dtypes[source], graph.shapes[source])]
    if any(SEED_INPUT in node.input for node in emitter.nodes):
        inputs.append(tensor_info(SEED_INPUT, np.int64, ()))
    known = graph.parameters()
    held = {p.name: known[p.name] for layer in layers for p in layer.parameters}
    nodes = rename(emitter, {source: INPUT}, {PREDICTIONS: graph.output})
    outputs = [tensor_info(PREDICTIONS, np.float32, graph.shapes[graph.output])]
    return make_model("forward", nodes, inputs, outputs, {**graph.constants, **emitter.constants, **held}, graph.opset)
