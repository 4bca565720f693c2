"""A pretrained ONNX classifier, fine-tuned on other classes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import embrace
from embrace.errors import InputError
from model_export.new_head import replace_head
from model_export.verify import TOLERANCE


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh()]
    model = nn.Sequential(*parts, nn.Linear(8, 10), nn.Softmax(-1)).eval()
    path = tmp_path / "classifier.onnx"
    names = {"input_names": ["x"], "dynamic_axes": {"x": {0: "N"}}}
    torch.onnx.export(model, (torch.randn(2, 3, 6, 6),), path, dynamo=False, **names)
    return path


def test_the_last_layer_is_new_and_the_rest_is_the_file_s(classifier, tmp_path):
    old = embrace.export(classifier).state_dict()
    bundle = embrace.export(classifier, tmp_path / "bundle", new_head=5, seed=3)
    new = bundle.state_dict()
    assert bundle.manifest.output.shape == (5,) and len(bundle.manifest.boundaries) == 3
    changed = sorted(name for name in new if old[name].shape != new[name].shape or (old[name] != new[name]).any())
    assert [new[name].shape for name in changed] == [(5,), (5, 8)]
    assert max(result.largest() for result in embrace.load(tmp_path / "bundle").verify()) < TOLERANCE
    again, other = (embrace.export(classifier, new_head=5, seed=seed).state_dict() for seed in (3, 4))
    assert all((new[name] == again[name]).all() for name in new)
    assert (new[changed[1]] != other[changed[1]]).all()


def test_a_product_and_a_sum_whose_weights_are_used_elsewhere():
    """As TensorFlow's converter writes a dense layer; the shared weight keeps its other use."""
    weight, bias = np.eye(4, dtype=np.float32), np.zeros(4, np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    held = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], initializer=held))
    replace_head(model, 2, 0)
    onnx.checker.check_model(model)
    shapes = {item.name: tuple(item.dims) for item in model.graph.initializer}
    assert shapes == {"w": (4, 4), "w.head": (4, 2), "b": (2,)}


def test_what_has_no_dense_layer_at_its_end_is_refused(tmp_path):
    path = tmp_path / "image.onnx"
    torch.onnx.export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(2, 3, 6, 6),), path, dynamo=False)
    with pytest.raises(InputError, match="replaces a dense layer at the end of the model; this one ends with Relu"):
        embrace.export(path, new_head=5)
    with pytest.raises(InputError, match="expected an ONNX file or minilm, and a number of classes"):
        embrace.export("digits", new_head=5)
