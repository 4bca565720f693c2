"""A person's own model, from capture to verified bundle."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.portable import TrainingStep
from model_export import bundle
from model_export.bundle import export_bundle
from model_export.capture import capture_torch
from model_export.errors import ExportError
from model_export.source import load_source, module_source
from model_export.verify import TOLERANCE, verify_bundle

MODELS = Path(__file__).with_name("user_models.py")
IMAGE = {"input_shape": (3, 16, 16)}
CASES = {
    "Encoder": {"input_shape": (7,), "input_dtype": "int64", "vocabulary": 5},
    "VisionTransformer": IMAGE,
    "SkipConnections": IMAGE,
    "Recurrent": {"input_shape": (9, 6)},
    "odd_convolutions": {"input_shape": (3, 33, 17)},
    "shuffled": {"input_shape": (3, 12, 12)},
    "signal": {"input_shape": (2, 16)},
    "UsedTwice": {"input_shape": (2, 9, 9)},
    "OtherExporter": {"input_shape": (9, 6)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_agrees_with_pytorch_at_every_boundary(name, tmp_path):
    export_bundle(load_source(f"{MODELS}:{name}", **CASES[name]), tmp_path / "bundle")
    results = verify_bundle(tmp_path / "bundle")
    assert not [result for result in results if result.skipped]
    worst = max(results, key=lambda result: result.largest())
    assert worst.largest() < TOLERANCE, (worst.boundary, worst.worst)


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5, (2, 3)])
def test_depthwise_convolutions_of_any_stride_on_a_larger_image(stride, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "from torch import nn\n"
        "def build():\n"
        f"    depthwise = nn.Conv2d(6, 6, 3, {stride}, 1, groups=6)\n"
        "    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.SiLU(), depthwise, nn.Flatten(1), nn.LazyLinear(4))\n"
    )
    export_bundle(load_source(f"{path}:build", input_shape=(3, 20, 24)), tmp_path / "bundle")
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) < TOLERANCE


def test_the_padding_row_of_an_embedding_is_not_trained(tmp_path):
    source = load_source(f"{MODELS}:Encoder", **CASES["Encoder"])
    manifest = export_bundle(source, tmp_path / "bundle")
    step = TrainingStep(tmp_path / "bundle" / manifest.boundary("strong").train.name, manifest.space, 0)
    step.parameters[:] = map_weights(tmp_path / "bundle" / "weights.safetensors", manifest.space)
    step.run(np.array([[0, 1, 2, 3, 0, 0, 0]] * 2), np.array([0, 1]), seed=3)
    gradient = manifest.space.views(step.gradients)["embedding.weight"]
    assert not gradient[0].any() and gradient[1].any() and not gradient[4].any()


def test_a_single_value_per_channel_leaves_statistics_finite(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))\n"
    )
    manifest = export_bundle(load_source(f"{path}:build", input_shape=(3,)), tmp_path / "bundle")
    step = TrainingStep(tmp_path / "bundle" / manifest.boundaries[0].train.name, manifest.space, 0)
    step.run(np.ones((1, 3), np.float32), np.array([1]))
    assert np.isfinite(step.gradients).all()


def test_draws_that_no_seed_reaches_are_refused_by_name(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Noisy(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.dense = nn.Linear(3, 3)\n"
        "    def forward(self, x):\n        return self.dense(x) * torch.multinomial(x.softmax(1), 1)\n"
    )
    with pytest.raises(ExportError, match="draws random numbers by Multinomial, which no seed"):
        export_bundle(load_source(f"{path}:Noisy", input_shape=(3,)), tmp_path / "bundle")


@pytest.mark.parametrize("name", ["Recurrent", "OtherExporter"])
def test_every_trained_parameter_is_in_the_bundle(name, tmp_path):
    source = load_source(f"{MODELS}:{name}", input_shape=(9, 6))
    manifest = export_bundle(source, tmp_path / "bundle")
    assert {p.name for p in manifest.space} == {parameter for parameter, _ in source.module().named_parameters()}


def test_frozen_and_unused_parameters_are_not_trained():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    module.spare = nn.Parameter(torch.ones(1))
    assert capture_torch(module, torch.randn(2, 3)).trainable == ["0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("module", "sample", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)), torch.randn(2, 3), "momentum=None"),
        (
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            torch.randn(2, 3),
            "track_running_stats=False",
        ),
        (nn.Embedding(4, 3, max_norm=1.0), torch.zeros(2, 2, dtype=torch.int64), "max_norm"),
        (nn.Linear(3, 3), torch.randn(2, 4), "does not accept an input of shape"),
        (nn.ReLU(), torch.randn(2, 4), "no trainable parameters"),
    ],
    ids=["momentum", "statistics", "max_norm", "shape", "nothing"],
)
def test_what_cannot_be_exported_faithfully_is_refused(module, sample, message):
    with pytest.raises(ExportError, match=message):
        capture_torch(module, sample)


class Unexportable(nn.Module):
    """Something that an exporter stumbles over, in front of a dense layer."""

    def __init__(self, what):
        super().__init__()
        self.dense = nn.Linear(3, 2)
        self.what = what

    def forward(self, x):
        return self.dense(self.what(x))


def of_both_exporters(x):
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return [x].shape
    return x


def test_a_crash_of_both_exporters_is_one_line_with_cause_place_and_remedy(tmp_path):
    source = module_source(Unexportable(of_both_exporters), input_shape=(3,))
    with pytest.raises(ExportError, match="'list' object has no attribute 'shape'") as caught:
        export_bundle(source, tmp_path / "bundle")
    text = str(caught.value)
    line = inspect.getsourcelines(of_both_exporters)[1] + 2
    assert "\n" not in text and f"test_user_models.py:{line}" in text and "embrace export model.onnx" in text


def test_the_other_exporter_is_tried_where_the_first_ones_graph_is_of_no_use(tmp_path):
    """The first graph has an operator without a gradient; the second one has not."""

    def bent_while_traced(x):
        return torch.atan(x) if torch.jit.is_tracing() else x

    class Model(nn.Sequential):
        def forward(self, x):
            return self[1](bent_while_traced(self[0](x)))

    source = module_source(Model(nn.Linear(3, 4), nn.Linear(4, 2)), input_shape=(3,))
    export_bundle(source, tmp_path / "bundle")
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle", source=source)) < TOLERANCE


def test_a_crash_after_the_export_is_one_line(tmp_path, monkeypatch):
    def crash(*given):
        raise AttributeError("'list' object has no attribute 'shape'")

    monkeypatch.setattr(bundle, "normalise", crash)
    with pytest.raises(ExportError, match="the forward graph cannot be used: AttributeError: 'list' object"):
        export_bundle(module_source(nn.Linear(3, 2), input_shape=(3,)), tmp_path / "bundle")
