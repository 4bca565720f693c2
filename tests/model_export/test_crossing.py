"""Boundaries that several tensors cross, and weights that several layers use: at every boundary against autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from edge_runtime.activations import ActivationStore
from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.portable import LayerForward, TrainingStep
from federation.manifest import Loss, TensorSpec
from model_export.bundle import export_bundle
from model_export.crossing import make_row, pack_arrays, pack_nodes, unpack_nodes
from model_export.graph import Graph, make_model, tensor_info
from model_export.source import load_source
from model_export.to_onnx import write_onnx
from model_export.verify import TOLERANCE, verify_bundle
from tests.model_export import crossing_models

MODELS = Path(crossing_models.__file__)
TOKENS = {"input_dtype": "int64", "vocabulary": 11}
CASES = {
    "UNet": (11, {"input_shape": (1, 8, 8), "loss": Loss("mse")}),
    "Denoiser": (6, {"input_shape": (1, 5, 5), "loss": Loss("mse")}),
    "TiedLanguageModel": (7, {"input_shape": (5,), **TOKENS}),
    "SharedBlocks": (5, {"input_shape": (5,)}),
    "Cell": (4, {"input_shape": (4, 3)}),
    "TimeFirst": (8, {"input_shape": (5,), "input_dtype": "int64", "vocabulary": 7}),
    "Roads": (4, {"input_shape": (4,)}),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    made = {}

    def export(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("bundles") / name
            made[name] = folder, export_bundle(load_source(f"{MODELS}:{name}", **CASES[name][1]), folder)
        return made[name]

    return export


@pytest.mark.parametrize("name", CASES)
def test_a_model_has_boundaries_and_agrees_with_pytorch_at_each(name, exported):
    folder, manifest = exported(name)
    assert len(manifest.boundaries) >= CASES[name][0]
    results = verify_bundle(folder)
    assert not [result for result in results if result.skipped]
    worst = max(results, key=lambda result: result.largest())
    assert worst.largest() < TOLERANCE, (worst.boundary, worst.worst)


def test_a_trained_use_has_a_gradient_and_a_frozen_one_has_none(exported):
    """By hand, without the search for tensors that verify relies on: the module itself, cut in its own code."""
    folder, manifest = exported("SharedBlocks")
    module = load_source(f"{MODELS}:SharedBlocks", **CASES["SharedBlocks"][1]).module()
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((6, 5)).astype(np.float32), rng.integers(0, 3, 6)
    assert [layer.borrowed for layer in manifest.layers] == [None, *[("block.weight", "block.bias")] * 2, None, None]
    weights = np.array(map_weights(folder / manifest.weights.name, manifest.space))
    value = x
    for boundary in manifest.boundaries:
        if boundary.layer:
            value = LayerForward(folder / manifest.layers[boundary.layer - 1].forward.name)(value)
        step = TrainingStep(folder / boundary.train.name, manifest.space, boundary.layer)
        step.parameters[:] = weights[step.suffix]
        step.run(value, labels, 0)
        module.zero_grad()
        hidden = module.enter(torch.from_numpy(x))
        for call in range(1, 4):
            hidden = hidden.detach() if call == boundary.layer else hidden
            hidden = hidden + torch.tanh(module.block(hidden))
        hidden = hidden.detach() if boundary.layer == 4 else hidden
        F.cross_entropy(module.leave(hidden), torch.from_numpy(labels)).backward()
        for name, found in manifest.space.views(step.gradients, start=step.suffix.start).items():
            np.testing.assert_allclose(found, module.get_parameter(name).grad.numpy(), atol=1e-6)


def test_the_whole_model_as_one_file_has_a_shared_weight_once(exported, tmp_path):
    folder, _ = exported("TiedLanguageModel")
    write_onnx(folder, tmp_path / "model.onnx")
    held = [item.name for item in onnx.load(tmp_path / "model.onnx").graph.initializer]
    assert held.count("words.weight") == 1 and len(set(held)) == len(held)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 5))
    module = load_source(f"{MODELS}:TiedLanguageModel", **CASES["TiedLanguageModel"][1]).module().eval()
    found = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"input": tokens})[0]
    np.testing.assert_allclose(found, module(torch.from_numpy(tokens)).detach().numpy(), atol=1e-5)


PARTS = {
    "hidden": ((None, 2, 3), np.float32),
    "time_first": ((4, None, 2), np.float32),
    "keep": ((None, 1, 5), np.bool_),
    "ids": ((None, 3), np.int64),
    "short": ((2, None), np.int32),
}


def test_what_is_packed_comes_out_as_it_was_even_from_a_store_of_float16():
    rng = np.random.default_rng(1)
    values = {name: _some(rng, shape, kind).astype(kind) for name, (shape, kind) in PARTS.items()}
    values["ids"][0] = -1, 0, 2**31 - 1
    graph = Graph([], "", "", 18, {}, {}, {}, {n: s for n, (s, _) in PARTS.items()}, {})
    graph.dtypes = {name: np.dtype(kind) for name, (_, kind) in PARTS.items()}
    row = make_row(graph, list(PARTS))
    front = _run(graph, pack_nodes(graph, list(PARTS), row), values, [row])[0]
    assert front.dtype == np.float32 and front.shape == (6, graph.shapes[row][1])
    axes = [shape.index(None) for shape, _ in PARTS.values()]
    np.testing.assert_array_equal(front, pack_arrays(list(values.values()), axes))
    store = ActivationStore(6, TensorSpec("float32", front.shape[1:]), stored_as="float16")
    store.write(0, front)
    behind = _run(graph, unpack_nodes(graph, row, list(PARTS)), {row: store.rows(0, 6)}, list(PARTS))
    for value, found in zip(values.values(), behind, strict=True):
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)


def _some(rng, shape, kind):
    size = [6 if dim is None else dim for dim in shape]
    if kind in (np.int64, np.int32):
        return rng.integers(-(2**31), 2**31, size)
    return rng.random(size) > 0.5 if kind is np.bool_ else rng.standard_normal(size).astype(np.float16)


def _run(graph, nodes, feed, outputs):
    inputs = [tensor_info(name, graph.dtypes[name], graph.shapes[name]) for name in feed]
    results = [tensor_info(name, graph.dtypes[name], graph.shapes[name]) for name in outputs]
    model = make_model("packing", nodes, inputs, results, graph.constants, 18)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString()).run(outputs, feed)
