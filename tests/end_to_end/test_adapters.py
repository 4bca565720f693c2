"""Adapters on a fleet: exported and verified by the command line, trained over HTTP, merged at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import onnxruntime as ort

from edge_runtime.engine.portable import LayerForward
from tests.embrace.cli.conftest import run
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, job_text, read_weights, simulate

MODEL = """
from torch import nn

def build():
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))
"""


def embrace(*words: object) -> str:
    answer = run(*words)
    assert answer.code == 0, answer.err
    return answer.out


def test_a_fleet_trains_adapters_beside_weights_of_four_bits(
    home: Path, write_job: WriteJob, fleet: Fleet, tmp_path: Path
) -> None:
    (home / "dense.py").write_text(MODEL)
    bundle = home / "adapted"
    choices = ("--lora", 4, "--lora-layers", "3,5", "--lora-full", "7", "--frozen", "int4")
    tiers = ("--tiers", "moderate=0.9,weak=0.4")
    embrace("export", home / "dense.py:build", "--input", "1,8,8", *choices, *tiers, "--out", bundle)
    assert "PASS" in embrace("verify", bundle)
    text = job_text(
        "embracing", 3, steps=4, rate='"0.003"', rules="[{ rule = 'adamw', between = 'keep' }]", clip_norm=1.0
    )
    file = write_job(text.replace('bundle = "digits"', 'bundle = "adapted"'))
    expected = simulate(file, tmp_path / "run")
    job = fleet.admin.create(file)
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    weights = tmp_path / "found.safetensors"
    fleet.admin.save_weights(job, fleet.job(job)["version"], weights)
    found = read_weights(bundle, weights)
    first = read_weights(bundle, bundle / "weights.safetensors")
    assert found.size == 2 * 4 * (128 + 128) + 128 * 10 + 10  # adapters and the last layer travel, nothing else
    assert (found != first).mean() > 0.5
    assert found.tobytes() == expected.weights.tobytes()
    trained = fleet.admin.export(job, tmp_path / "trained", bundle=bundle)
    model = trained.to_onnx(tmp_path / "model.onnx")
    x = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    value = x
    for layer in trained.manifest.layers:
        value = LayerForward(trained.path / layer.forward.name)(value)
    session = ort.InferenceSession(model)
    np.testing.assert_allclose(session.run(None, {"input": x})[0], value, atol=1e-5)
