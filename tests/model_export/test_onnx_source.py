"""Bundles from ONNX files that did not come from our own capture."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.portable import LayerForward, TrainingStep
from federation.errors import InputError
from model_export.bundle import export_bundle
from model_export.errors import ExportError
from model_export.onnx_oracle import OnnxOracle
from model_export.source import load_source
from model_export.verify import TOLERANCE, verify_bundle


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    )


def write_inference_model(path, module, opset=17, batch="N"):
    """As other people export: inference mode, an older opset; batch norm is kept apart from its convolution."""
    module.eval()
    axes = {"image": {0: batch}, "scores": {0: batch}} if batch else None
    torch.onnx.export(
        module,
        (torch.randn(2 if batch else 1, 1, 8, 8),),
        str(path),
        dynamo=False,
        opset_version=opset,
        input_names=["image"],
        output_names=["scores"],
        dynamic_axes=axes,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE,
    )
    return path


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_an_inference_model_becomes_a_verified_bundle(tmp_path, opset):
    path = write_inference_model(tmp_path / "net.onnx", network(), opset)
    export_bundle(load_source(str(path)), tmp_path / "bundle")
    results = verify_bundle(tmp_path / "bundle")
    assert len(results) == 3
    assert max(result.largest() for result in results) < TOLERANCE


def test_a_model_exported_for_one_sample_gets_a_dynamic_batch(tmp_path):
    path = write_inference_model(tmp_path / "net.onnx", network(), batch=None)
    manifest = export_bundle(load_source(str(path)), tmp_path / "bundle")
    x = np.random.default_rng(0).standard_normal((7, 1, 8, 8)).astype(np.float32)
    value = x
    for layer in manifest.layers:
        value = LayerForward(tmp_path / "bundle" / layer.forward.name)(value)
    one_by_one = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = np.concatenate([one_by_one.run(None, {"image": row[None]})[0] for row in x])
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_the_gradients_are_those_of_autograd_on_the_same_weights(tmp_path):
    module = network()
    path = write_inference_model(tmp_path / "net.onnx", module)
    manifest = export_bundle(load_source(str(path)), tmp_path / "bundle")
    boundary = manifest.boundary("strong")
    step = TrainingStep(tmp_path / "bundle" / boundary.train.name, manifest.space, 0)
    step.parameters[:] = map_weights(tmp_path / "bundle" / "weights.safetensors", manifest.space)
    x = np.random.default_rng(0).standard_normal((6, 1, 8, 8)).astype(np.float32)
    labels = np.arange(6) % 5
    loss = step.run(x, labels)
    module.train()
    expected = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    found = manifest.space.views(step.gradients)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(found[name], dict(module.named_buffers())[name].numpy(), rtol=1e-4, err_msg=name)


def test_labels_must_fit_the_loss(tmp_path):
    path = write_inference_model(tmp_path / "net.onnx", nn.Sequential(nn.Flatten(), nn.Linear(64, 1)))
    with pytest.raises(ExportError, match="for a single logit use --loss bce_with_logits"):
        export_bundle(load_source(str(path)), tmp_path / "bundle")


def test_an_operator_of_another_domain_is_named(tmp_path):
    node = helper.make_node("FusedThing", ["x", "w"], ["y"], domain="com.example", name="odd")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.ones(4, np.float32), "w")],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), str(tmp_path / "odd.onnx"))
    with pytest.raises(ExportError, match=r"FusedThing of domain 'com\.example'"):
        export_bundle(load_source(str(tmp_path / "odd.onnx")), tmp_path / "bundle")


def test_an_open_input_size_must_be_said(tmp_path):
    path = write_inference_model(tmp_path / "net.onnx", network())
    model = onnx.load(str(path))
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(model, str(path))
    with pytest.raises(InputError, match="--input 3,32,32"):
        load_source(str(path))
    assert load_source(str(path), input_shape=(1, 8, 8)).input_shape == (1, 8, 8)


@pytest.mark.parametrize("name", ["v0", "v.const0", "input", "labels", "loss", "predictions", "output", "w.grad"])
def test_values_of_a_file_may_have_any_name(tmp_path, name):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], [name]),
        helper.make_node("Relu", [name], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "u"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 5)), "u": rng.standard_normal((5, 3))}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(array.astype(np.float32), key) for key, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, str(tmp_path / "names.onnx"))
    export_bundle(load_source(str(tmp_path / "names.onnx")), tmp_path / "bundle")
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) < TOLERANCE


def test_a_file_with_a_fixed_batch_is_verified_at_other_batches(tmp_path):
    path = write_inference_model(tmp_path / "net.onnx", network(), batch=None)
    export_bundle(load_source(str(path)), tmp_path / "bundle")
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle", batch=5)) < TOLERANCE


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime.training") is None, reason="the oracle of gradients")
def test_a_wrong_gradient_of_an_onnx_source_is_found(tmp_path, monkeypatch):
    path = write_inference_model(tmp_path / "net.onnx", network())
    export_bundle(load_source(str(path)), tmp_path / "bundle")
    true_run = TrainingStep.run

    def half_of_a_gradient(self, *args):
        loss = true_run(self, *args)
        self.gradients[: self.gradients.size // 2] = 0.0
        return loss

    monkeypatch.setattr(TrainingStep, "run", half_of_a_gradient)
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) > TOLERANCE


@pytest.mark.parametrize("factor", [1.2, -1.0])
def test_without_an_oracle_of_gradients_slopes_tell(tmp_path, monkeypatch, factor):
    path = write_inference_model(tmp_path / "net.onnx", network())
    export_bundle(load_source(str(path)), tmp_path / "bundle")
    monkeypatch.setattr(OnnxOracle, "_has_training", False)
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) < TOLERANCE
    true_run = TrainingStep.run

    def wrong_length(self, *args):
        loss = true_run(self, *args)
        self.gradients *= np.float32(factor)
        return loss

    monkeypatch.setattr(TrainingStep, "run", wrong_length)
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) > TOLERANCE
