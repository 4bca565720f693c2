"""A training step of every model of the zoo on aarch64 against PyTorch on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from edge_runtime.bundle_files import map_weights
from model_export.bundle import Choices, export_bundle
from model_export.oracle import StepResult, TorchOracle, random_labels
from model_export.shapes import sample_input
from model_export.source import load_source
from model_export.verify import TOLERANCE, Comparison, step_errors
from model_export.zoo import ZOO
from tests.stock_python import ROOT

BATCH = 4
# As in model_export/verify.py: a ReLU within rounding of zero may switch between two correct programs. So each tensor
# counts with its smallest error over a few inputs, tried only where it is needed, every second with calmer weights.
MOST_INPUTS = 6
PATIENCE = 1800


@pytest.mark.parametrize("name", ZOO)
def test_a_step_is_pytorchs(name: str, arm_python: Path, tmp_path: Path, record_property) -> None:
    """From the first layer and from the weakest tier's boundary, with the frozen layers in front of it."""
    source, bundle = load_source(name), tmp_path / "bundle"
    weakest = [place.boundary for place in ZOO[name].tiers.values()][-1:]
    manifest = export_bundle(source, bundle, Choices(splits=weakest))
    space = manifest.space
    natural = np.array(map_weights(bundle / manifest.weights.name, space))
    oracle = TorchOracle(source, manifest, natural)
    compared = {one: Comparison(one.name, "portable") for one in manifest.boundaries}
    seconds = 0.0
    for seed in range(MOST_INPUTS):
        unsure = [one for one, so_far in compared.items() if not so_far.inputs or so_far.largest() > TOLERANCE]
        if not unsure:
            break
        weights = {one.name: oracle.calm(one, natural) if seed % 2 else natural for one in unsure}
        x = sample_input(manifest.input.shape, manifest.input.dtype, manifest.vocabulary, BATCH, seed)
        labels = random_labels(manifest, BATCH, seed)
        asked = {f"{one.name}/weights": weights[one.name][space.suffix(one.layer)] for one in unsure}
        answers = ask(arm_python, tmp_path, x=x, labels=labels, seed=np.array(seed), **asked)
        seconds += float(answers["seconds"])
        for boundary in unsure:
            expected = oracle.step(boundary, x, labels, seed, weights[boundary.name])
            own = {key: answers[f"{boundary.name}/{key}"] for key in (*expected.gradients, *expected.statistics)}
            found = StepResult(float(answers[f"{boundary.name}/loss"]), own, own)
            compared[boundary].add(step_errors(found, expected))
    record_property("seconds", f"{seconds:.1f}")
    for one in compared.values():
        record_property(one.boundary, f"{one.largest():.1e} ({one.inputs} inputs)")
    for one in compared.values():
        assert one.largest() <= TOLERANCE, one.worst


def ask(arm_python: Path, folder: Path, **asked: np.ndarray) -> dict[str, np.ndarray]:
    """Have steps taken on aarch64 with the bundle of a folder; return the numbers."""
    np.savez(folder / "asked.npz", **asked)
    files = (str(folder / name) for name in ("bundle", "asked.npz", "answers.npz"))
    subprocess.run([arm_python, "-m", "tests.arm64.answer_steps", *files], cwd=ROOT, check=True, timeout=PATIENCE)
    return dict(np.load(folder / "answers.npz"))
