"""Local training on scikit-learn's digits with the edge runtime: what a device does between two rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_runtime.data import Samples, from_arrays
from edge_runtime.engine.session import Settings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from edge_runtime.trained_bundle import write_trained
from edge_runtime.trainer import Received, Trainer
from federation.axes.local import Momentum
from federation.capacity import predicted_memory
from federation.manifest import Manifest, read_manifest
from federation.messages import Task
from federation.weights import map_weights

Progress = Callable[[str, int, int], None]

BATCH, RATE, MOMENTUM = 32, 0.03, 0.9
HELD_OUT = 360  # of 1797 images


@dataclass(frozen=True)
class LocalResult:
    """What training from one boundary did."""

    boundary: str
    images: int
    trained: int  # parameters
    stored: int  # bytes of stored activations
    memory: int  # predicted bytes
    steps: int
    milliseconds: float  # per step, mean
    accuracy_before: float
    accuracy_after: float


def load_digits(manifest: Manifest, devices: int, seed: int = 0) -> tuple[list[Samples], Samples]:
    """scikit-learn's 1797 images of 8×8 pixels, dealt to some devices; the rest is held out."""
    from sklearn import datasets

    data = datasets.load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    x, y = (data.images[order] / 16).astype(np.float32), data.target[order]
    mine = [slice(number, -HELD_OUT, devices) for number in range(devices)]
    return [from_arrays(x[part], y[part], manifest) for part in mine], from_arrays(
        x[-HELD_OUT:], y[-HELD_OUT:], manifest
    )


def train_locally(
    directory: Path,
    boundary_name: str,
    samples: Samples,
    held_out: Samples,
    out: Path,
    *,
    epochs: int,
    progress: Progress = lambda what, done, total: None,
) -> LocalResult:
    """Train a bundle from a boundary (or tier) for some epochs; the trained bundle is written to `out`."""
    manifest = read_manifest(directory)
    boundary, source = manifest.boundary(boundary_name), BundleSource(directory, manifest)
    received = map_weights(directory / manifest.weights.name, manifest.space)[manifest.space.suffix(boundary.layer)]
    evaluator = Evaluator(directory, source, boundary.layer, held_out, settings=Settings(), plan=ForwardPlan())
    before = evaluator.score(received).accuracy
    task = Task(boundary.name, epochs * (len(samples) // BATCH), BATCH, RATE, (Momentum(MOMENTUM),))
    trainer = Trainer(directory, source, samples, progress=progress)
    outcome = trainer.run(task, Received(received))
    write_trained(directory, manifest, boundary.layer, outcome.parameters, out)
    report = outcome.report
    return LocalResult(
        boundary=boundary.name,
        images=len(samples),
        trained=manifest.weights_from(boundary.layer),
        stored=report.bytes["stored_activations"],
        memory=predicted_memory(manifest, boundary, BATCH).total,
        steps=report.steps,
        milliseconds=1e3 * report.seconds["training"] / report.steps,
        accuracy_before=before or 0.0,
        accuracy_after=evaluator.score(outcome.parameters).accuracy or 0.0,
    )
