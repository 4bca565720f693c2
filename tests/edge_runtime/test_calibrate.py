"""Static batch norm: the statistics of data for given weights, against PyTorch's own cumulative average."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.calibrate import calibrated
from edge_runtime.engine.choose import open_step
from simulation.torch_engine import TorchEngine
from simulation.torch_model import build_module, load_vector

SHIPPED = Path(__file__).resolve().parents[2] / "embrace" / "demo" / "digits" / "model"


@pytest.mark.parametrize("engine", ["portable", "torch"])
def test_statistics_are_those_of_the_data(engine: str) -> None:
    manifest = read_manifest(SHIPPED)
    weights = np.array(map_weights(SHIPPED / manifest.weights.name, manifest.space))
    chance = np.random.default_rng(0)
    batches = [(chance.random((32, 1, 8, 8), np.float32), chance.integers(0, 10, 32)) for _ in range(3)]
    step = (
        TorchEngine(SHIPPED, manifest, weights).open_step(manifest.whole)
        if engine == "torch"
        else open_step(SHIPPED, manifest, manifest.whole)
    )
    found = calibrated(step, manifest.space, weights, batches)

    module = build_module(manifest)
    load_vector(module, manifest, weights)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum, part.num_batches_tracked = None, torch.tensor(0)  # the mean over all batches
    with torch.no_grad():
        for inputs, _ in batches:
            module.train()(torch.from_numpy(inputs))
    wanted = manifest.space.flatten({p.name: module.state_dict()[p.name].numpy() for p in manifest.space})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(weights - wanted).max() > 0.1, "it was no test if nothing had to change"


def test_a_model_without_batch_norm_stays_as_it_is() -> None:
    manifest = read_manifest(SHIPPED)
    weights = np.array(map_weights(SHIPPED / manifest.weights.name, manifest.space))
    plain = type(manifest.space)([[p for p in layer if p.kind == "weight"] for layer in manifest.space.layers])
    kept = weights[: plain.size]
    assert calibrated(None, plain, kept, []).tobytes() == kept.tobytes()  # type: ignore[arg-type]
