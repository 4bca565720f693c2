"""Spectral norm: the vectors of its power iteration move as PyTorch moves them, and only in layers that are trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as spectral_hook

from model_export.bundle import export_bundle
from model_export.capture import capture_torch
from model_export.errors import ExportError
from model_export.source import module_source
from model_export.verify import TOLERANCE, verify_bundle
from tests.model_export.autodiff.harness import run
from tests.model_export.autodiff.module_harness import check_module, prepare_step

Norm = Callable[..., nn.Module]
NORMS = pytest.mark.parametrize(
    "norm", [spectral_hook, parametrizations.spectral_norm], ids=["hook", "parametrization"]
)


def network(norm: Norm, steps: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        norm(nn.Conv2d(2, 4, 3), n_power_iterations=steps),
        nn.Tanh(),
        norm(nn.ConvTranspose2d(4, 3, 2), n_power_iterations=steps, dim=1),
        nn.Flatten(),
        norm(nn.Linear(75, 3), n_power_iterations=steps),
    )


@NORMS
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("boundary", [0, 1])
def test_gradients_and_vectors_after_a_step(norm: Norm, steps: int, boundary: int) -> None:
    exported = check_module(network(norm, steps), torch.randn(2, 2, 6, 6), boundary=boundary)
    assert sum(p.kind == "statistic" for layer in exported.layers for p in layer.parameters) == 6


@NORMS
def test_vectors_move_on_from_where_the_last_step_left_them(norm: Norm) -> None:
    module = network(norm)
    step = prepare_step(module, torch.randn(2, 2, 6, 6))
    x = torch.from_numpy(step.feed["input"])
    feed = dict(step.feed)
    module.train()
    for _ in range(3):
        module(x)
        found = run(step.exported.train, feed)
        feed |= {name: found[f"{name}.new"] for name in feed if f"{name}.new" in found}
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(feed[name], buffer.numpy(), rtol=1e-4, atol=1e-6)


@NORMS
def test_a_bundle_agrees_with_pytorch_at_every_boundary(norm: Norm, tmp_path) -> None:
    source = module_source(network(norm), input_shape=(2, 6, 6))
    manifest = export_bundle(source, tmp_path / "bundle")
    results = verify_bundle(tmp_path / "bundle", source=source)
    assert len(manifest.boundaries) == 3 and max(result.largest() for result in results) < TOLERANCE


def test_a_layer_that_is_called_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = spectral_hook(nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(self.dense(x))

    with pytest.raises(ExportError, match=r"spectral norm of 'dense.weight_orig' is computed more than once"):
        capture_torch(Twice(), torch.randn(2, 3))
