"""From whatever an exporter wrote to a `Graph` that is easy to cut and to differentiate.

Functions are inlined, Constant and Identity nodes disappear, shape arithmetic is replaced by what it amounts to,
parameters are told from constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, inliner, numpy_helper, version_converter

from model_export.autodiff.rules.dropout import SEEDED
from model_export.control_flow import write_out
from model_export.crossing import LARGEST
from model_export.errors import ExportError
from model_export.expansions import expansion
from model_export.graph import (
    Graph,
    attribute,
    attributes,
    inputs_with_subgraphs,
    module_of,
    needed_nodes,
    optional_input,
)
from model_export.random_layers import constants_of, seed_random
from model_export.shapes import BATCHES, measure, symbolic_shape

OLDEST_OPSET, NEWEST_OPSET = 18, 21
INLINE_DOMAIN = "embrace.inline"
# In front of every value of the source but its parameters: the names of our own values and of a graph's inputs and
# outputs can then never be met.
VALUE_PREFIX = "source:"
RESERVED = {"input", "output", "labels", "seed", "loss", "predictions"}
AS_LOOP = {"Range"}  # the standard defines it by a loop, which devices refuse
SHAPE_SOURCES = {"Shape", "Size"}
LOGICAL = {"Not", "And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"}


def normalise(
    model: onnx.ModelProto,
    trainable: Iterable[str],
    sample: Callable[[int], np.ndarray],
    has_rule: Callable[[str], bool],
    statistics: Iterable[str] = (),
    keep_inference: bool = False,
    prefix: str = VALUE_PREFIX,
    follows_batch: bool = True,
) -> Graph:
    """The working form of a forward model. `sample(batch)` makes an input; `has_rule` tells what needs no inlining.

    `statistics` are buffers that a training step moves, besides those of batch norm. Batch norm in inference form stays
    so with `keep_inference`. `prefix` begins the names of values; `follows_batch`: the output is one of each sample.
    """
    model = to_supported_opset(model)
    model = inline_functions(model, has_rule)
    opset = next(item.version for item in model.opset_import if item.domain == "")
    make_batch_dynamic(model)
    write_out(model, sample)
    model = inline_functions(model, has_rule)
    seed_random(model)
    _avoid_runtime_quirks(model)
    _without_sequences(model)
    initialisers = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    data_inputs = [value.name for value in model.graph.input if value.name not in initialisers]
    if len(data_inputs) != 1 or len(model.graph.output) != 1:
        raise ExportError(
            f"the model must have one input and one output, it has {len(data_inputs)} and {len(model.graph.output)}"
        )
    first, second = measure(model, data_inputs[0], (sample(BATCHES[0]), sample(BATCHES[1])))
    first |= initialisers | {data_inputs[0]: sample(BATCHES[0])}
    second |= initialisers | {data_inputs[0]: sample(BATCHES[1])}

    weights = {name: initialisers[name] for name in trainable}
    graph = Graph(
        nodes=list(model.graph.node),
        input=data_inputs[0],
        output=model.graph.output[0].name,
        opset=opset,
        constants={name: array for name, array in initialisers.items() if name not in weights},
        weights=weights,
        statistics={},
        shapes={name: symbolic_shape(first[name].shape, second[name].shape, name) for name in first},
        dtypes={name: array.dtype for name, array in first.items()},
        unstorable={name for name in first if _is_unstorable(first[name], second[name])},
    )
    if follows_batch and graph.shapes[graph.output][:1] != (None,):
        raise ExportError("the output does not follow the batch size: the model fixes its batch dimension somewhere")
    if keep_inference:
        graph.nodes = [part for node in graph.nodes for part in _inference_norm(graph, node)]
    _separate_statistics(graph, statistics)
    _resolve_static_values(graph, first, second)
    _drop_identities(graph)
    graph.nodes = needed_nodes(graph.nodes, [graph.output])
    _name_nodes(graph)
    _keep_used(graph)
    _rename_values(graph, prefix)
    return graph


def _is_unstorable(first: np.ndarray, second: np.ndarray) -> bool:
    sizes = zip(first.shape, second.shape, strict=True)
    large = first.dtype.kind in "iu" and bool((np.abs(first.astype(np.float64)) >= LARGEST).any())
    return large or any(a != b and (a, b) != BATCHES for a, b in sizes)


def _avoid_runtime_quirks(model: onnx.ModelProto) -> None:
    """Write nodes so that every onnxruntime computes what PyTorch does."""
    shapes = {item.name: list(item.dims) for item in model.graph.initializer}
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    for number, node in reversed(list(enumerate(model.graph.node))):
        given = attributes(node)
        if node.op_type == "CumSum" and makers.get(node.input[0]) in LOGICAL:
            # PyTorch counts what is true, and leaves the change of type out of the graph.
            counted = f"{node.output[0]}.counted"
            cast = helper.make_node("Cast", [node.input[0]], [counted], f"{node.name}.counted", to=TensorProto.INT64)
            node.input[0] = counted
            model.graph.node.insert(number, cast)
            continue
        if node.op_type == "AveragePool" and given.get("count_include_pad") and not any(given.get("pads", [])):
            # Without padding the flag means nothing, but with ceil_mode some versions then count what hangs over.
            _set_attributes(node, {**given, "count_include_pad": 0})
        same = given.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER")
        if node.op_type == "Conv" and same and set(given.get("strides", [1])) == {1}:
            kernel = given.get("kernel_shape") or shapes.get(node.input[1], [0, 0])[2:]
            spans = [(k - 1) * d for k, d in zip(kernel, given.get("dilations", [1] * len(kernel)), strict=True)]
            less, more = [n // 2 for n in spans], [n - n // 2 for n in spans]
            given["pads"] = [*less, *more] if given.pop("auto_pad") == "SAME_UPPER" else [*more, *less]
            _set_attributes(node, given)  # with dilations onnxruntime refuses the automatic form


def _without_sequences(model: onnx.ModelProto) -> None:
    """Write a list of pieces (SplitToSequence) of which some are taken (SequenceAt) as slices."""
    known = constants_of(model)
    lists = {node.output[0]: node for node in model.graph.node if node.op_type == "SplitToSequence"}
    kept: list[NodeProto] = []
    for node in model.graph.node:
        taken = lists.get(node.input[0]) if node.op_type == "SequenceAt" else None
        if taken is not None and node.input[1] in known:
            sizes = known.get(taken.input[1]) if len(taken.input) > 1 else np.array(1)
            kept += _slice_nodes(taken, node, sizes, int(known[node.input[1]]))
        else:
            kept.append(node)
    wanted = [value.name for value in model.graph.output]
    kept = needed_nodes(kept, wanted)
    for node in kept:
        if "Sequence" in node.op_type:
            raise ExportError(
                f"node {node.name!r} (module {module_of(node)!r}): {node.op_type} makes a list whose pieces are known "
                "only at run time; split by fixed sizes"
            )
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _slice_nodes(split: NodeProto, at: NodeProto, sizes: np.ndarray | None, index: int) -> list[NodeProto]:
    """Piece `index` of what a SplitToSequence makes."""
    if sizes is None or (sizes.ndim == 0 and index < 0):
        return [at]
    bounds = np.cumsum([0, *sizes]) if sizes.ndim else np.arange(index + 2) * int(sizes)
    place = index % len(sizes) if sizes.ndim else index
    axis, name = int(attribute(split, "axis", 0)), at.output[0]
    parts = {"start": [bounds[place]], "end": [bounds[place + 1]], "axis": [axis]}
    nodes = [
        helper.make_node("Constant", [], [f"{name}.{key}"], value=numpy_helper.from_array(np.array(value, np.int64)))
        for key, value in parts.items()
    ]
    dropped = len(split.input) < 2 and not attribute(split, "keepdims", 1)
    piece = f"{name}.piece" if dropped else name
    nodes.append(helper.make_node("Slice", [split.input[0], *(f"{name}.{key}" for key in parts)], [piece], at.name))
    if dropped:
        nodes.append(helper.make_node("Squeeze", [piece, f"{name}.axis"], [name], f"{at.name}.squeeze"))
    return nodes


def _set_attributes(node: NodeProto, values: dict[str, Any]) -> None:
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in sorted(values.items()))


def to_supported_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert to an opset that old and new runtimes load and the rules are written for."""
    foreign = sorted({item.domain for item in model.opset_import} - {"", "ai.onnx"})
    used = {node.domain for node in model.graph.node}
    local = {function.domain for function in model.functions}
    for domain in foreign:
        if domain in used and domain not in local:
            ops = sorted({node.op_type for node in model.graph.node if node.domain == domain})
            raise ExportError(
                f"operators {', '.join(ops)} of domain {domain!r} are not standard ONNX; export without them"
            )
    version = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), None)
    if version is None:
        raise ExportError("the model does not say which ONNX opset it uses")
    if OLDEST_OPSET <= version <= NEWEST_OPSET:
        return model
    target = OLDEST_OPSET if version < OLDEST_OPSET else NEWEST_OPSET
    try:
        return version_converter.convert_version(model, target)
    except Exception as error:  # the converter raises bare RuntimeErrors
        raise ExportError(
            f"cannot convert opset {version} to {target}: {str(error).splitlines()[0]}; export at {target} instead"
        ) from None


def inline_functions(model: onnx.ModelProto, has_rule: Callable[[str], bool]) -> onnx.ModelProto:
    """Replace model-local functions, and operators that have a function body but no rule, by primitives."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    kept = (has_rule(node.op_type) or node.op_type in AS_LOOP for node in model.graph.node)
    others = [index for index, is_kept in enumerate(kept) if not is_kept]
    if not others:  # inferring types takes long in a model with large weights
        return model
    types = value_types(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for index in others:
        node = result.graph.node[index]
        body = _function_body(node, opset, types) or expansion(node, opset, types)
        if body:
            body.domain, body.name = INLINE_DOMAIN, f"{node.op_type}_{index}"
            node.domain, node.op_type = INLINE_DOMAIN, body.name
            for item in body.opset_import:
                item.version = opset
            result.functions.append(body)
    if not result.functions:
        return model
    result.opset_import.append(helper.make_opsetid(INLINE_DOMAIN, 1))
    # A body may use operators that themselves have bodies.
    return inline_functions(inliner.inline_local_functions(result), has_rule)


def _function_body(node: NodeProto, opset: int, types: dict[str, onnx.TypeProto]) -> onnx.FunctionProto | None:
    """The standard's own definition of an operator by simpler ones, if any; states its omitted attributes."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")  # its functions are missing in onnx's stubs
    given = {item.name for item in node.attribute}
    missing = [schema.attributes[name].default_value for name in sorted(schema.attributes) if name not in given]
    node.attribute.extend(item for item in missing if item.name)
    if schema.has_function:
        fitting = [version for version in schema.function_opset_versions if version <= opset]
        text = schema.get_function_with_opset_version(max(fitting)) if fitting else None
    elif schema.has_context_dependent_function:
        fitting = [version for version in schema.context_dependent_function_opset_versions if version <= opset]
        inputs = [types[name].SerializeToString() if name else b"" for name in node.input]
        build = schema.get_context_dependent_function_with_opset_version
        text = build(max(fitting), node.SerializeToString(), inputs) if fitting else None
    else:
        text = None
    return onnx.FunctionProto.FromString(text) if text else None


def value_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Type and shape of every value as far as ONNX can infer them."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type for value in [*graph.value_info, *graph.input, *graph.output]}
    for item in graph.initializer:
        types[item.name] = helper.make_tensor_type_proto(item.data_type, item.dims)
    return types


def make_batch_dynamic(model: onnx.ModelProto) -> None:
    """Let dimension 0 of input and output vary; recorded shapes in between would contradict that."""
    initialisers = {item.name for item in model.graph.initializer}
    for value in [*model.graph.input, *model.graph.output]:
        if value.name not in initialisers and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "N"
    del model.graph.value_info[:]


def _inference_norm(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """Batch norm that uses its running statistics in training, too, as arithmetic; other nodes as they are."""
    if node.op_type != "BatchNormalization" or attribute(node, "training_mode", 0):
        return [node]
    x, scale, bias, mean, variance = node.input
    y, column = node.output[0], (-1, *[1] * (len(graph.shapes[x]) - 2))
    deviation = np.sqrt(graph.constants[variance] + np.float32(attribute(node, "epsilon", 1e-5)))
    _hold(graph, f"{y}.column", np.array(column, np.int64))
    _hold(graph, f"{y}.mean", graph.constants[mean].reshape(column))
    _hold(graph, f"{y}.inverse", (1.0 / deviation).reshape(column))
    steps = []
    for name, own in ((f"{y}.scale", scale), (f"{y}.bias", bias)):
        if own in graph.constants:
            _hold(graph, name, graph.constants[own].reshape(column))
        else:
            steps.append(("Reshape", [own, f"{y}.column"], name))
            graph.shapes[name], graph.dtypes[name] = (len(deviation), *column[1:]), deviation.dtype
    steps += [
        ("Sub", [x, f"{y}.mean"], f"{y}.centred"),
        ("Mul", [f"{y}.centred", f"{y}.inverse"], f"{y}.normal"),
        ("Mul", [f"{y}.normal", f"{y}.scale"], f"{y}.scaled"),
        ("Add", [f"{y}.scaled", f"{y}.bias"], y),
    ]
    for part in ("centred", "normal", "scaled"):
        graph.shapes[f"{y}.{part}"], graph.dtypes[f"{y}.{part}"] = graph.shapes[y], graph.dtypes[y]
    return [helper.make_node(kind, given, [out], f"{node.name}.{n}") for n, (kind, given, out) in enumerate(steps)]


def _hold(graph: Graph, name: str, value: np.ndarray) -> None:
    """Add a constant."""
    graph.constants[name], graph.shapes[name], graph.dtypes[name] = value, value.shape, value.dtype


def _separate_statistics(graph: Graph, known: Iterable[str]) -> None:
    """Running mean and variance of batch norm are statistics: they belong to the layer but have no gradient."""
    norms = [node for node in graph.nodes if node.op_type == "BatchNormalization"]
    for name in [*known, *(name for node in norms for name in node.input[3:5])]:
        for place in (graph.constants, graph.weights):
            if name in place:
                graph.statistics[name] = place.pop(name)


def _resolve_static_values(graph: Graph, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Fold what depends on shapes and constants alone; keep what follows the batch as `slope * batch + offset`."""
    static = set(graph.constants)
    step = BATCHES[1] - BATCHES[0]
    kept = []
    for node in graph.nodes:
        names = inputs_with_subgraphs(node)
        is_static = node.op_type in SHAPE_SOURCES or all(name in static for name in names)
        if not is_static or node.op_type in SEEDED:
            kept.append(node)
            continue
        static.update(node.output)
        keep_node = False
        for name in filter(None, node.output):
            a, b = first[name], second[name]
            if a.shape == b.shape and np.array_equal(a, b):
                graph.constants[name] = a
            elif a.shape == b.shape and a.dtype == np.int64:
                slope = (b - a) // step
                graph.batch_values[name] = (slope, a - slope * BATCHES[0])
            else:
                keep_node = True
        if keep_node:
            kept.append(node)
    graph.nodes = kept
    for node in graph.nodes:
        _simplify_static_input(graph, node, first)


def _simplify_static_input(graph: Graph, node: NodeProto, first: dict[str, np.ndarray]) -> None:
    if node.op_type == "Reshape":
        shape = graph.shapes[node.output[0]]
        if shape.count(None) == 1:  # also drops 0 = "copy this dimension", so that rules need not know it
            name = f"{node.output[0]}.shape"
            graph.constants[name] = np.array([-1 if dim is None else dim for dim in shape], np.int64)
            node.input[1] = name
    if node.op_type in ("LSTM", "GRU", "RNN"):
        for index in (5, 6):  # initial states that are zero are the default
            state = optional_input(node, index)
            if state and _is_static(graph, state) and not first[state].any():
                node.input[index] = ""
        while node.input and not node.input[-1]:
            del node.input[-1]


def _is_static(graph: Graph, name: str) -> bool:
    """Whether a value depends on neither the data nor a parameter."""
    maker = {output: node for node in graph.nodes for output in node.output}
    pending = [name]
    while pending:
        item = pending.pop()
        if item == graph.input or item in graph.weights or item in graph.statistics:
            return False
        if item in maker and maker[item].op_type not in SHAPE_SOURCES:
            pending += [i for i in inputs_with_subgraphs(maker[item]) if i not in graph.batch_values]
    return True


def _drop_identities(graph: Graph) -> None:
    """Forget Identity nodes, and casts to the type a value already has."""
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        same_type = (
            node.op_type == "Cast"
            and helper.tensor_dtype_to_np_dtype(attribute(node, "to")) == graph.dtypes[node.input[0]]
        )
        if (node.op_type == "Identity" or same_type) and node.output[0] != graph.output:
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    graph.nodes = kept


def _name_nodes(graph: Graph) -> None:
    """A name for every node, no two alike: runtimes ask for that, files from elsewhere need not have it."""
    seen: set[str] = set()
    for number, node in enumerate(graph.nodes):
        if not node.name or node.name in seen:
            node.name = f"{node.name or node.op_type}_n{number}"
        seen.add(node.name)


def _rename_values(graph: Graph, prefix: str) -> None:
    known = graph.parameters()
    for name in known:
        if name in RESERVED or name.startswith(prefix):
            raise ExportError(f"a parameter must not be called {name!r}: that name is used by the graphs themselves")

    def renamed(name: str) -> str:
        return name if not name or name in known else f"{prefix}{name}"

    for node in graph.nodes:
        _rename_node(node, renamed)
    graph.input, graph.output = renamed(graph.input), renamed(graph.output)
    graph.constants = {renamed(k): v for k, v in graph.constants.items()}
    graph.shapes = {renamed(k): v for k, v in graph.shapes.items()}
    graph.dtypes = {renamed(k): v for k, v in graph.dtypes.items()}
    graph.batch_values = {renamed(k): v for k, v in graph.batch_values.items()}
    graph.unstorable = {renamed(k) for k in graph.unstorable}


def _rename_node(node: NodeProto, renamed: Callable[[str], str]) -> None:
    """In a node and in graphs inside it, whose own inputs and initialisers are renamed along."""
    for names in (node.input, node.output):
        for index, name in enumerate(names):
            names[index] = renamed(name)
    for item in node.attribute:
        if item.type == onnx.AttributeProto.GRAPH:
            for value in [*item.g.input, *item.g.output, *item.g.initializer]:
                value.name = renamed(value.name)
            for child in item.g.node:
                _rename_node(child, renamed)


def _keep_used(graph: Graph) -> None:
    used = {name for node in graph.nodes for name in inputs_with_subgraphs(node)}
    graph.constants = {k: v for k, v in graph.constants.items() if k in used}
    graph.weights = {k: v for k, v in graph.weights.items() if k in used}
    graph.statistics = {k: v for k, v in graph.statistics.items() if k in used}
    graph.batch_values = {k: v for k, v in graph.batch_values.items() if k in used}
