"""Every zoo model against PyTorch at every boundary with every engine, and whether verification can fail at all."""

from __future__ import annotations

import hashlib
import importlib.util
import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from federation.errors import BundleError
from model_export.bundle import Choices, export_bundle, load_graph
from model_export.source import load_source
from model_export.verify import TOLERANCE, Comparison, relative_error, verify_bundle
from model_export.zoo import ZOO

HAS_ORT_TRAINING = importlib.util.find_spec("onnxruntime.training") is not None
ENGINES = ("portable", "ort-training") if HAS_ORT_TRAINING else ("portable",)
LONG = {"mobilenetv2", "resnet20", "resnet20_keras", "resnet56_gn"}  # ten to thirty boundaries, of layers that repeat
WIDE = {"vgg11", "vgg16"}  # a minute each; narrower ones of the same layers are quick


def check_every_boundary(source, folder, choices):
    manifest = export_bundle(source, folder, choices)
    results = verify_bundle(folder)
    compared = {(result.boundary, result.engine) for result in results}
    for boundary in manifest.boundaries:
        assert (boundary.name, "portable") in compared
        if boundary.ort_training:
            assert (boundary.name, "ort-training") in compared
    assert not [result for result in results if result.skipped]
    worst = max(results, key=lambda result: result.largest())
    assert worst.largest() < TOLERANCE, (worst.boundary, worst.engine, worst.worst)


def slow_where_wide(name):
    return pytest.param(name, marks=[pytest.mark.slow] if name in WIDE else [])


@pytest.mark.parametrize("name", [slow_where_wide(name) for name in ZOO if name not in LONG])
def test_a_zoo_model_agrees_with_pytorch_at_every_boundary(name, tmp_path):
    check_every_boundary(load_source(name), tmp_path / name, Choices(engines=ENGINES))


@pytest.mark.parametrize("name", ("mobilenetv2", "resnet20"))
def test_a_deep_zoo_model_agrees_with_pytorch_at_some_boundaries(name, tmp_path):
    source = load_source(name)
    layers = [layer.name for layer in load_graph(source)[1]]
    check_every_boundary(source, tmp_path / name, Choices(splits=[layers[0], *layers[-3::-10]], engines=ENGINES))


def test_every_engine_moves_statistics_at_the_pace_of_the_model(tmp_path):
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "def network():\n"
        "    front = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=0.01)]\n"
        "    return nn.Sequential(*front, nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))\n"
    )
    source = load_source(f"{tmp_path / 'model.py'}:network", input_shape=(1, 8, 8))
    check_every_boundary(source, tmp_path / "bundle", Choices(engines=ENGINES))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_a_deep_zoo_model_agrees_with_pytorch_at_every_boundary(name, tmp_path):
    check_every_boundary(load_source(name), tmp_path / name, Choices(engines=ENGINES))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles") / "digits"
    export_bundle(load_source("digits"), folder)
    return folder


def damaged_copy(digits, target, name, change):
    """A bundle with one changed graph, its sha256 put right so that only the arithmetic is wrong."""
    target.mkdir()
    for file in digits.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    model = onnx.load(str(target / name), load_external_data=False)
    change(model)
    (target / name).write_bytes(model.SerializeToString())
    content = (target / name).read_bytes()
    text = (target / "manifest.json").read_text()
    old = next(
        item
        for part in json.loads(text)["boundaries"] + json.loads(text)["layers"]
        for item in (part.get("train"), part.get("forward"))
        if item and item["name"] == name
    )
    text = text.replace(old["sha256"], hashlib.sha256(content).hexdigest())
    (target / "manifest.json").write_text(text.replace(f'"bytes": {old["bytes"]}', f'"bytes": {len(content)}'))
    return target


def test_a_wrong_constant_in_a_training_graph_is_found(digits, tmp_path):
    def weaken(model):
        """Momentum of running statistics: 0.1 becomes 0.2."""
        for item in model.graph.initializer:
            value = numpy_helper.to_array(item)
            if value.ndim == 1 and value.dtype == np.float32 and np.abs(value - 0.1).max() < 1e-6:
                item.CopyFrom(numpy_helper.from_array(2 * value, item.name))
                return
        raise AssertionError("no such constant")

    bad = damaged_copy(digits, tmp_path / "bad", "train.01-conv2.onnx", weaken)
    wrong = [result for result in verify_bundle(bad) if result.largest() > TOLERANCE]
    assert [result.boundary for result in wrong] == ["conv2"]
    assert wrong[0].largest("statistics") > 0.01 and wrong[0].largest("gradients") < TOLERANCE
    assert "running" in wrong[0].worst


def test_a_wrong_layer_is_found(digits, tmp_path):
    def no_relu(model):
        for node in model.graph.node:
            if node.op_type == "Relu":
                node.op_type = "Sigmoid"

    bad = damaged_copy(digits, tmp_path / "bad", "forward.00-conv1.onnx", no_relu)
    first = verify_bundle(bad)[0]
    assert first.boundary == "(forward)" and first.largest("layers") > 0.1


def test_a_file_that_changed_is_named(digits, tmp_path):
    target = tmp_path / "bad"
    target.mkdir()
    for file in digits.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "train.00-conv1.onnx").write_bytes(b"\x00" * 10)
    with pytest.raises(BundleError, match=r"train\.00-conv1\.onnx"):
        verify_bundle(target)


def test_relative_error_counts_nan_and_wrong_shapes_as_infinite():
    good = np.ones(3)
    assert relative_error(good, good) == 0.0
    assert relative_error(np.array([1.0, np.nan, 1.0]), good) == np.inf
    assert relative_error(np.ones(2), good) == np.inf


def test_an_error_that_is_not_a_number_is_the_largest():
    result = Comparison("b", "portable")
    result.add({("loss", "loss"): float("nan"), ("gradients", "w"): 1e-7})
    assert result.largest() == np.inf and result.worst == "loss"


def test_a_wrong_last_layer_is_found(digits, tmp_path):
    """Its output has the size of many tensors; only the module's own output counts."""

    def add_softmax(model):
        model.graph.node[-1].output[0] = "scores"
        model.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["output"]))

    bad = damaged_copy(digits, tmp_path / "bad", "forward.04-classifier.onnx", add_softmax)
    assert verify_bundle(bad)[0].largest("layers") > 0.1
