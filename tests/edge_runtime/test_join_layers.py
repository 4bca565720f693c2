"""Joined layers: a graph that the onnx package accepts, which computes what the layers do one after the other."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edge_runtime.join_layers import join_layers  # noqa: E402
from federation.errors import UnsafeGraph  # noqa: E402


def value(name: str, *shape: int | str):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape or ("batch", 3))


def layer(nodes, *, opset=18, **constants: float) -> bytes:
    """A layer with the same names as any other."""
    tensors = [numpy_helper.from_array(np.full(3, number, np.float32), name) for name, number in constants.items()]
    graph = helper.make_graph(nodes, "layer", [value("input")], [value("output")], tensors)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)]).SerializeToString()


def scaled(factor: float) -> bytes:
    return layer(
        [helper.make_node("Mul", ["input", "w"], ["h"]), helper.make_node("Relu", ["h"], ["output"])], w=factor
    )


def clipped(most: float) -> bytes:
    """With an input that is left out, and a graph in a node whose values come from outside of it."""
    inner = [helper.make_node("Add", ["h", "w"], ["y"])]
    other = [helper.make_node("Identity", ["input"], ["y"])]
    branches = [helper.make_graph(nodes, "branch", [], [value("y")]) for nodes in (inner, other)]
    nodes = [
        helper.make_node("Clip", ["input", "", "most"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "none"], ["some"]),
        helper.make_node("If", ["some"], ["output"], then_branch=branches[0], else_branch=branches[1]),
    ]
    read = onnx.load_from_string(layer(nodes, w=7.0))
    for name, number in (("most", most), ("none", 0.0)):
        read.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float32), name))
    return read.SerializeToString()


def run(graph: bytes, x: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(["output"], {"input": x})[0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_layers_with_the_same_names_are_run_one_after_the_other(sign):
    graphs = [scaled(2.0), clipped(1.5), clipped(8.25), scaled(-3.0 * sign)]
    joined = join_layers(graphs)
    onnx.checker.check_model(onnx.load_from_string(joined), full_check=True)
    x = expected = sign * np.arange(6, dtype=np.float32).reshape(2, 3)
    for graph in graphs:
        expected = run(graph, expected)
    assert np.array_equal(run(joined, x), expected)


def test_one_layer_stays_what_it_is():
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(run(join_layers([scaled(5.0)]), x), np.full((1, 3), 5.0))


def test_layers_for_different_operators_are_refused():
    with pytest.raises(UnsafeGraph, match="other versions of the operators"):
        join_layers([scaled(1.0), layer([helper.make_node("Relu", ["input"], ["output"])], opset=17)])


@pytest.mark.parametrize("data", [b"", b"junk", scaled(1.0)[:40], b"\x08\x08"])
def test_what_is_no_graph_is_refused(data):
    with pytest.raises(UnsafeGraph):
        join_layers([scaled(1.0), data])
