"""Local training on scikit-learn's digits with nothing but numpy and a bundle: what a device does between two rounds.

The frozen layers run once over all images, layer by layer (the multi-step forward pass); their output is stored, and
only the layers behind the boundary train, from the stored activations.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.portable import LayerForward, TrainingStep
from federation.capacity import predicted_memory
from federation.errors import InputError
from federation.manifest import Manifest, read_manifest
from federation.space import ParameterSpace, Vector
from federation.weights import map_weights, write_weights

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Progress = Callable[[str, int, int], None]

BATCH, RATE, MOMENTUM = 32, 0.03, 0.9
HELD_OUT = 360  # of 1797 images


@dataclass(frozen=True)
class Digits:
    """Images as the network takes them, and what they show."""

    train_x: Floats
    train_y: Labels
    test_x: Floats
    test_y: Labels

    def share(self, number: int, of: int) -> Digits:
        """The training images of one of several devices; what is held out stays."""
        return replace(self, train_x=self.train_x[number::of], train_y=self.train_y[number::of])


@dataclass(frozen=True)
class LocalResult:
    """What training from one boundary did."""

    boundary: str
    images: int
    trained: int  # parameters
    stored: int  # bytes of stored activations
    memory: int  # predicted bytes
    steps: int
    milliseconds: float  # per step, median
    accuracy_before: float
    accuracy_after: float


def load_digits(seed: int = 0) -> Digits:
    """scikit-learn's 1797 images of 8×8 pixels, shuffled; the last part is held out."""
    from sklearn import datasets

    data = datasets.load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    x = (data.images[order, None] / 16).astype(np.float32)
    y = data.target[order].astype(np.int64)
    return Digits(x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:])


def train_locally(
    directory: Path,
    boundary_name: str,
    data: Digits,
    *,
    epochs: int,
    start: Vector | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Vector, LocalResult]:
    """Train from a boundary (or tier) for some epochs of SGD with momentum; gives the whole model's new weights.

    `start` are the weights to begin with, the bundle's own if not given.
    """
    manifest = read_manifest(directory)
    boundary, space = manifest.boundary(boundary_name), manifest.space
    if boundary.train is None:
        raise InputError(f"boundary {boundary.name!r} has no graph for the portable engine")
    vector = np.array(map_weights(directory / manifest.weights.name, space) if start is None else start)
    before = accuracy(directory, manifest, vector, data)
    stored = run_layers(directory, manifest, vector, data.train_x, stop=boundary.layer)
    step = TrainingStep(directory / boundary.train.name, space, boundary.layer)
    suffix = space.suffix(boundary.layer)
    step.parameters[:] = vector[suffix]
    times = _descend(step, statistic_mask(space)[suffix], stored, data.train_y, epochs, progress)
    vector[suffix] = step.parameters
    result = LocalResult(
        boundary=boundary.name,
        images=len(data.train_y),
        trained=manifest.weights_from(boundary.layer),
        stored=stored.nbytes if boundary.layer else 0,
        memory=predicted_memory(manifest, boundary, BATCH).total,
        steps=len(times),
        milliseconds=1e3 * statistics.median(times),
        accuracy_before=before,
        accuracy_after=accuracy(directory, manifest, vector, data),
    )
    return vector, result


def _descend(
    step: TrainingStep, statistic: NDArray[np.bool_], x: Floats, y: Labels, epochs: int, progress: Progress
) -> list[float]:
    """SGD with momentum on the flat vector; a statistic is replaced by its new value. Gives seconds per step."""
    velocity = np.zeros_like(step.parameters)
    rng, times = np.random.default_rng(0), []
    for _ in range(epochs):
        order = rng.permutation(len(y))
        for start in range(0, len(y) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            started = time.perf_counter()
            loss = step.run(x[rows], y[rows], seed=len(times))
            step.parameters[statistic] = step.gradients[statistic]
            step.gradients[statistic] = 0.0
            velocity *= MOMENTUM
            velocity += step.gradients
            step.parameters -= RATE * velocity
            times.append(time.perf_counter() - started)
            progress(f"loss {loss:.3f}", len(times), epochs * (len(y) // BATCH))
    return times


def statistic_mask(space: ParameterSpace) -> NDArray[np.bool_]:
    """Which elements of the flat vector are statistics."""
    mask = np.zeros(space.size, np.bool_)
    for parameter in space:
        mask[space.slice_of(parameter.name)] = parameter.kind == "statistic"
    return mask


def run_layers(directory: Path, manifest: Manifest, vector: Vector, x: Floats, stop: int | None = None) -> Floats:
    """The first layers in inference mode with these weights, each loaded, run and freed before the next.

    A layer's graph reads its weights from the file beside it, so the graphs are put beside a new one.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder) / manifest.weights.name, manifest.space, vector)
        for layer in manifest.layers[:stop]:
            graph = shutil.copy(directory / layer.forward.name, folder)
            x = LayerForward(Path(graph))(x)
    return x


def accuracy(directory: Path, manifest: Manifest, vector: Vector, data: Digits) -> float:
    """Share of held-out images recognised with these weights."""
    predictions = run_layers(directory, manifest, vector, data.test_x)
    return float((predictions.argmax(1) == data.test_y).mean())
