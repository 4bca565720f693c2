"""The same training graphs on the newest stock onnxruntime, where neither torch nor onnx is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.graph import serialise
from tests.model_export.autodiff.module_harness import Step, prepare_step
from tests.stock_python import STOCK_PYTHON, needs_stock_python

pytestmark = needs_stock_python


def convolutions() -> Step:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.GroupNorm(2, 8),
        nn.Hardswish(),
        nn.Conv2d(8, 6, 3, stride=2, padding=1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(24, 5),
    )
    return prepare_step(module, torch.randn(2, 3, 16, 16), Loss("cross_entropy", label_smoothing=0.1))


def frozen_convolutions() -> Step:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1),
    )
    return prepare_step(module, torch.randn(2, 3, 8, 8), Loss("bce_with_logits"), boundary=1)


def pooling_in_one_dimension() -> Step:
    module = nn.Sequential(nn.Conv1d(2, 4, 3), nn.MaxPool1d(3, stride=2, padding=1, dilation=1), nn.PReLU(4))
    return prepare_step(module, torch.randn(2, 2, 11))


class Reader(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.recurrence = nn.Embedding(11, 4), kind(4, 5, batch_first=True, bidirectional=True)
        self.dense = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.recurrence(self.words(x))[0].mean(1))


def lstm() -> Step:
    return prepare_step(Reader(nn.LSTM), torch.randint(0, 11, (2, 6)), Loss("cross_entropy"))


def gru() -> Step:
    return prepare_step(Reader(nn.GRU), torch.randint(0, 11, (2, 6)), Loss("cross_entropy"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(1, 2), -1)
        return self.out(nn.functional.gelu(x + weights @ value).mean(1))


def attention() -> Step:
    return prepare_step(Attention(), torch.randn(2, 5, 6), Loss("mse"))


STEPS: list[Callable[[], Step]] = [
    convolutions,
    frozen_convolutions,
    pooling_in_one_dimension,
    lstm,
    gru,
    attention,
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every graph, its inputs and what the other environment found lie, after one start of it."""
    directory = tmp_path_factory.mktemp("graphs")
    for make in STEPS:
        step = seeded(make)
        (directory / f"{make.__name__}.onnx").write_bytes(serialise(step.exported.train))
        np.savez(directory / f"{make.__name__}.npz", **step.feed)
    script = Path(__file__).with_name("run_graphs.py")
    subprocess.run([STOCK_PYTHON, script, directory], check=True)
    return directory


def seeded(make: Callable[[], Step]) -> Step:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_loss_gradients_and_statistics_agree_with_pytorch(make: Callable[[], Step], directory: Path) -> None:
    failure = directory / f"{make.__name__}.error"
    assert not failure.exists(), failure.read_text()
    with np.load(directory / f"{make.__name__}.found.npz") as found:
        seeded(make).check(dict(found))
