"""A person's own model, from capture to verified bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from model_export.bundle import export_bundle
from model_export.capture import capture_torch
from model_export.errors import ExportError
from model_export.source import load_source
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
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_agrees_with_pytorch_at_every_boundary(name, tmp_path):
    export_bundle(load_source(f"{MODELS}:{name}", **CASES[name]), tmp_path / "bundle")
    results = verify_bundle(tmp_path / "bundle")
    assert not [result for result in results if result.skipped]
    worst = max(results, key=lambda result: result.largest())
    assert worst.largest() < TOLERANCE, (worst.boundary, worst.worst)


def test_every_trained_parameter_is_in_the_bundle(tmp_path):
    manifest = export_bundle(load_source(f"{MODELS}:Recurrent", input_shape=(9, 6)), tmp_path / "bundle")
    module = load_source(f"{MODELS}:Recurrent", input_shape=(9, 6)).module()
    assert {p.name for p in manifest.space} == {name for name, _ in module.named_parameters()}


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
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout2d(0.5)), torch.randn(2, 3, 3, 3), "cannot export"),
        (nn.LSTM(3, 3), torch.randn(2, 4, 3), "must return one tensor, it returns tuple"),
        (nn.Linear(3, 3), torch.randn(2, 4), "does not accept an input of shape"),
        (nn.ReLU(), torch.randn(2, 4), "no trainable parameters"),
    ],
    ids=["momentum", "statistics", "max_norm", "dropout2d", "tuple", "shape", "nothing"],
)
def test_what_cannot_be_exported_faithfully_is_refused(module, sample, message):
    with pytest.raises(ExportError, match=message):
        capture_torch(module, sample)
