"""What `verify` calls an error when float32 itself is inexact: distance from float64, measured by PyTorch's own."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from model_export.bundle import Choices, export_bundle
from model_export.oracle import StepResult
from model_export.source import module_source
from model_export.verify import TOLERANCE, _compare_boundary, verify_bundle
from tests.model_export.test_verify import damaged_copy


def step(error: float, seed: int) -> StepResult:
    """A step whose gradient is off by a share of its largest element, everywhere and at random."""
    truth = np.random.default_rng(0).uniform(-1, 1, 100)
    noise = np.random.default_rng(seed).uniform(-1, 1, 100)
    return StepResult(1.0, {"w": truth + error * noise}, {})


@dataclass
class Judge:
    """An oracle in float32 with an error of its own, and perhaps one in float64."""

    own: float
    has_float64: bool = True

    def step(self, *given: Any) -> StepResult:
        return step(self.own, 1)

    def precise_step(self, *given: Any) -> StepResult | None:
        return step(0.0, 0) if self.has_float64 else None

    def calm(self, boundary: Any, vector: np.ndarray) -> np.ndarray:
        return vector


@pytest.mark.parametrize(
    ("own", "found", "passes"),
    [
        (1e-6, 1e-5, True),
        (1e-6, 3e-4, False),  # PyTorch is exact here: it is we who are wrong
        (4e-4, 4e-4, True),  # both round alike
        (4e-4, 1e-3, True),
        (4e-4, 3e-3, False),
        (1e-1, 5e-2, False),  # an input that judges nothing is no excuse
        (1e-1, 1e-5, True),
    ],
)
def test_an_error_is_what_rounding_does_not_explain(own: float, found: float, passes: bool) -> None:
    samples: Any = [SimpleNamespace(x=None, labels=None, seed=1, entering=lambda layer: None)] * 10
    result = _compare_boundary(
        SimpleNamespace(name="b", layer=0),
        "portable",
        lambda *_: step(found, 2),
        Judge(own),
        np.zeros(1),
        samples,
        TOLERANCE,
    )
    assert (result.largest() <= TOLERANCE) is passes


def test_without_float64_the_tolerance_alone_counts() -> None:
    samples: Any = [SimpleNamespace(x=None, labels=None, seed=1, entering=lambda layer: None)] * 10
    result = _compare_boundary(
        SimpleNamespace(name="b", layer=0),
        "portable",
        lambda *_: step(4e-4, 2),
        Judge(4e-4, False),
        np.zeros(1),
        samples,
        1e-4,
    )
    assert result.largest() > TOLERANCE


def test_a_deep_network_over_few_samples_passes_if_it_is_right_and_fails_if_it_is_wrong(tmp_path) -> None:
    torch.manual_seed(0)
    blocks = [part for _ in range(40) for part in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU())]
    source = module_source(
        nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.Flatten(), nn.LazyLinear(4)), input_shape=(3, 2, 2)
    )
    export_bundle(source, tmp_path / "bundle", Choices(splits=("0",)))
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle", source=source)) <= TOLERANCE

    def enlarge(model: onnx.ModelProto) -> None:
        """One gradient of eighty is two per cent too large."""
        node = next(node for node in model.graph.node if "1.weight.grad" in node.output)
        node.output[:] = ["right" if name == "1.weight.grad" else name for name in node.output]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.02, np.float32), "more"))
        model.graph.node.append(onnx.helper.make_node("Mul", ["right", "more"], ["1.weight.grad"]))

    bad = damaged_copy(tmp_path / "bundle", tmp_path / "bad", "train.00-0.onnx", enlarge)
    wrong = verify_bundle(bad, source=source)[1]
    assert wrong.largest() > TOLERANCE and wrong.worst == "1.weight"
