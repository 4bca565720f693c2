"""Graphs that a device refuses before they see its data, and honest ones that it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.bundle_files import read_manifest
from edge_runtime.graph_check import check_forward_graph, check_ort_training_graph, check_training_graph
from edge_runtime.onnx_file import MOST_ITEMS, OnnxGraph, read_model
from federation.errors import UnsafeGraph
from federation.manifest import Manifest
from tests.hostile_bundles import (
    DEMO,
    STOLEN,
    Change,
    batch_as_gradient,
    batch_beside_labels,
    changed_bundle,
    constant,
    give_instead,
)
from tests.merged_graphs import MERGED, field, graph_by_a_long_key, with_graph

onnx = pytest.importorskip("onnx")
GRADIENT, STATISTIC = f"{STOLEN}.grad", "conv1.1.running_mean.new"


def check_all(directory: Path, manifest: Manifest) -> int:
    count = 0
    for layer in manifest.layers:
        check_forward_graph(directory / layer.forward.name, manifest, layer)
        count += 1
    for boundary in manifest.boundaries:
        if boundary.train is not None:
            check_training_graph(directory / boundary.train.name, manifest, boundary)
            count += 1
        for ref in boundary.ort_training:
            if ref.name.endswith("/training_model.onnx"):
                check_ort_training_graph(directory / ref.name, manifest, boundary)
                count += 1
    return count


def test_the_demo_s_graphs_are_honest() -> None:
    assert check_all(DEMO, read_manifest(DEMO)) == 10


def test_graphs_of_both_engines_and_all_widths_are_honest(digits: Any, narrowed: Any) -> None:
    for bundle in (digits, narrowed):
        assert check_all(bundle.directory, bundle.manifest) >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["imdb_bilstm", "mobilenetv2", "resnet56_gn", "text_transformer", "vgg11", "femnist_cnn"]
)
def test_graphs_of_the_zoo_are_honest(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.edge_runtime.conftest import export

    bundle = export(tmp_path / name, name, engines=("portable",))
    assert check_all(bundle.directory, bundle.manifest) > 0


def node(*arguments: Any, **more: Any) -> Any:
    return onnx.helper.make_node(*arguments, **more)


def batch_as_statistic(model: Any) -> None:
    shape, starts, ends = (constant(model, n, *v) for n, v in (("flat", (-1,)), ("starts", (0,)), ("ends", (8,))))
    model.graph.node.extend([node("Reshape", ["input", shape], ["spy"])])
    give_instead(model, STATISTIC, node("Slice", ["spy", starts, ends], [STATISTIC]))


def samples_in_a_subgraph(model: Any) -> None:
    """An `If` whose both branches give the batch of the graph around them."""
    shape = constant(model, "shape", 32, 128)
    value = onnx.helper.make_tensor_value_info("given", onnx.TensorProto.FLOAT, [32, 128])
    branch = onnx.helper.make_graph([node("Reshape", ["input", shape], ["given"])], "branch", [], [value])
    model.graph.node.append(node("Cast", [constant(model, "one", 1)], ["spy.true"], to=onnx.TensorProto.BOOL))
    give_instead(model, GRADIENT, node("If", ["spy.true"], [GRADIENT], then_branch=branch, else_branch=branch))


def labels_by_their_size_only(model: Any) -> None:
    """`Shape` of the labels is no path from them."""
    make = node
    nodes = [
        make("Shape", ["labels"], ["spy.size"]),
        make("Cast", ["spy.size"], ["spy.float"], to=onnx.TensorProto.FLOAT),
        make("ReduceSum", ["input"], ["spy.sum"], keepdims=0),
        make("Mul", ["spy.sum", "spy.float"], ["spy.mixed"]),
        make("Expand", ["spy.mixed", constant(model, "shape", 32, 128)], [GRADIENT]),
    ]
    give_instead(model, GRADIENT, *nodes)


def another_output(model: Any) -> None:
    model.graph.output.append(onnx.helper.make_tensor_value_info("spy", onnx.TensorProto.FLOAT, ["N", 1, 8, 8]))
    model.graph.node.append(node("Identity", ["input"], ["spy"]))


def missing_output(model: Any) -> None:
    del model.graph.output[-1]


def other_shape(model: Any) -> None:
    found = next(value for value in model.graph.output if value.name == GRADIENT)
    found.type.tensor_type.shape.dim[0].dim_value = 4096


def without_shape(model: Any) -> None:
    next(value for value in model.graph.output if value.name == GRADIENT).type.tensor_type.ClearField("shape")


def other_type(model: Any) -> None:
    next(value for value in model.graph.output if value.name == GRADIENT).type.tensor_type.elem_type = 11


def another_input(model: Any) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("spy", onnx.TensorProto.FLOAT, [1]))


def unknown_domain(model: Any) -> None:
    model.graph.node.append(node("Spy", ["input"], ["spy"], domain="com.example"))


def unknown_domain_in_a_subgraph(model: Any) -> None:
    value = onnx.helper.make_tensor_value_info("given", onnx.TensorProto.FLOAT, None)
    inner = onnx.helper.make_graph([node("Spy", [], ["given"], domain="com.example")], "inner", [], [value])
    model.graph.node.append(node("If", ["labels"], ["spy"], then_branch=inner, else_branch=inner))


def endless_loop(model: Any) -> None:
    model.graph.node.append(node("Loop", ["labels"], ["spy"]))


def function(model: Any) -> None:
    found = onnx.helper.make_function("com.example", "F", ["x"], ["y"], [node("Identity", ["x"], ["y"])], [])
    model.functions.append(found)


def external_data(model: Any) -> None:
    tensor = onnx.TensorProto(name="spy", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../credentials.json")
    model.graph.initializer.append(tensor)


def external_data_in_a_constant(model: Any) -> None:
    tensor = onnx.TensorProto(name="spy", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.safetensors")
    model.graph.node.append(node("Constant", [], ["spy"], value=tensor))


def value_from_nowhere(model: Any) -> None:
    model.graph.node.append(node("Identity", ["nowhere"], ["spy"]))


def value_given_twice(model: Any) -> None:
    model.graph.node.append(node("Identity", ["input"], [GRADIENT]))


def sparse(model: Any) -> None:
    model.graph.sparse_initializer.add()


def loss_without_labels(model: Any) -> None:
    give_instead(model, "loss", node("ReduceSum", ["input"], ["loss"], keepdims=0))


REFUSED: dict[Change, str] = {
    batch_as_gradient: "not through the loss: no path from the labels",
    batch_beside_labels: "made of single samples, not of a sum over the batch",
    batch_as_statistic: "made of single samples, not of a sum over the batch",
    samples_in_a_subgraph: "not through the loss",
    labels_by_their_size_only: "not through the loss",
    loss_without_labels: "its loss does not depend on the labels",
    another_output: "its outputs are not those of the manifest: 'spy'",
    missing_output: "its outputs are not those of the manifest: 'classifier.bias.grad'",
    other_shape: f"its output '{GRADIENT}' is not shaped like",
    without_shape: f"its output '{GRADIENT}' is not shaped like",
    other_type: f"its output '{GRADIENT}' is not shaped like",
    another_input: "its input 'spy' is none that the manifest describes",
    unknown_domain: "has the operator com.example::Spy",
    unknown_domain_in_a_subgraph: "has the operator com.example::Spy",
    endless_loop: "has the operator ai.onnx::Loop",
    function: "has functions",
    external_data: "'spy' takes its values from another file",
    external_data_in_a_constant: "'spy' takes its values from another file",
    value_from_nowhere: "takes 'nowhere', which nothing gives before",
    value_given_twice: f"gives '{GRADIENT}', which is there already",
    sparse: "sparse initialisers",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_hostile_training_graph_is_refused_in_one_line(change: Change, tmp_path: Path) -> None:
    manifest = changed_bundle(tmp_path / "bundle", change)
    with pytest.raises(UnsafeGraph) as caught:
        check_all(tmp_path / "bundle", manifest)
    assert REFUSED[change] in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.reason == "unsafe_graph"


@pytest.mark.parametrize("write", MERGED, ids=lambda write: write.__name__)
def test_a_graph_that_protobuf_would_merge_is_refused_in_one_line(write: Callable[[Any], bytes]) -> None:
    """Each but one is a file to onnx's own parser, which merges; keys of more than 32 bits are for parsers that cut."""
    data = write(onnx.load(DEMO / "train.03-dense.onnx"))
    if write is not graph_by_a_long_key:
        onnx.ModelProto.FromString(data)
    with pytest.raises(UnsafeGraph, match=r"there again|no ONNX file") as caught:
        read_model(data)
    assert "\n" not in str(caught.value)


def test_a_field_of_a_fixed_width_is_no_part_of_the_graph() -> None:
    """Protobuf takes a node or an output by its bytes only; what has another form in the file is not there."""
    model = onnx.load(DEMO / "train.03-dense.onnx")
    count = len(model.graph.output), len(model.graph.node)
    data = with_graph(model, b"\x61" + b"\x0a\x06spyspy" + b"\x09" + b"\x12\x03spy\x12\x01x")
    theirs, ours = onnx.ModelProto.FromString(data).graph, read_model(data).graph
    assert (len(ours.outputs), len(ours.nodes)) == (len(theirs.output), len(theirs.node)) == count


@pytest.mark.parametrize("entry", ["location", "offset", "length"])
def test_a_frozen_layer_reads_its_own_weights_only(entry: str, tmp_path: Path) -> None:
    manifest = read_manifest(DEMO)
    layer = manifest.layers[1]
    model = onnx.load(DEMO / layer.forward.name, load_external_data=False)
    for item in model.graph.initializer[0].external_data:
        if item.key == entry:
            item.value = {"location": "../secret", "offset": "0", "length": "4"}[entry]
    (tmp_path / "forward.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsafeGraph, match="takes its values from another place"):
        check_forward_graph(tmp_path / "forward.onnx", manifest, layer)


# --- the file --------------------------------------------------------------------------------------


def test_the_reader_agrees_with_onnx() -> None:
    """onnx's own parser is the oracle: names, operators, shapes, of every graph and every graph within."""

    def same(ours: OnnxGraph, theirs: Any) -> None:
        assert [(n.operator, n.domain, n.inputs, n.outputs) for n in ours.nodes] == [
            (n.op_type, n.domain, tuple(n.input), tuple(n.output)) for n in theirs.node
        ]
        assert [(t.name, t.shape) for t in ours.tensors] == [(t.name, tuple(t.dims)) for t in theirs.initializer]
        for mine, other in ((ours.inputs, theirs.input), (ours.outputs, theirs.output)):
            assert [(v.name, v.dtype, v.shape) for v in mine] == [
                (
                    v.name,
                    v.type.tensor_type.elem_type,
                    tuple(d.dim_value if d.HasField("dim_value") else None for d in v.type.tensor_type.shape.dim),
                )
                for v in other
            ]
        for node, other in zip(ours.nodes, theirs.node):
            inner = [item.g for item in other.attribute if item.type == onnx.AttributeProto.GRAPH]
            assert len(node.graphs) == len(inner)
            for one, two in zip(node.graphs, inner):
                same(one, two)

    for path in sorted(DEMO.glob("*.onnx")):
        same(read_model(path.read_bytes()).graph, onnx.load(path, load_external_data=False).graph)


GRAPH = (DEMO / "train.04-classifier.onnx").read_bytes()


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(UnsafeGraph):
        read_model(data)


@settings(deadline=None)
@given(st.integers(0, len(GRAPH) - 1), st.binary(min_size=0, max_size=8), st.integers(0, 8))
def test_a_damaged_graph_is_read_or_refused(at: int, instead: bytes, removed: int) -> None:
    with contextlib.suppress(UnsafeGraph):
        read_model(GRAPH[:at] + instead + GRAPH[at + removed :])


def test_graphs_inside_of_graphs_end_somewhere() -> None:
    inner = b""
    for _ in range(2000):  # GraphProto.node = NodeProto.attribute = AttributeProto.g
        for number in (6, 5, 1):
            inner = field(number, inner)
        if len(inner) > 100_000:
            break
    with pytest.raises(UnsafeGraph, match="deep"):
        read_model(field(7, inner))


def test_more_parts_than_a_device_reads() -> None:
    many = b"\x0a\x00" * (MOST_ITEMS + 1)  # empty nodes
    with pytest.raises(UnsafeGraph, match="more than"):
        read_model(field(7, many))
