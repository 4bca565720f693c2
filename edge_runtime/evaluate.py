"""How well weights do on data: the multi-step forward pass through all layers, and the model's own loss.

Outputs over a large vocabulary are never whole (Manifest.loss_chunk): then the forward pass ends at the last boundary,
and the loss is that of its training step. Such a score has no accuracy.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.activations import ActivationStore
from edge_runtime.bundle_loss import BundleLoss
from edge_runtime.data import TrainingSamples
from edge_runtime.engine.choose import choose_engine, open_step
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.files import disk_errors
from edge_runtime.forward import ForwardPlan, Inputs, Report, store_activations
from edge_runtime.layers import LayerSource, TrainedSource
from edge_runtime.timing import Stopwatch
from federation.errors import OutOfMemory
from federation.manifest import Boundary, Manifest
from federation.metrics import Score
from federation.space import Vector


class Evaluator:
    """Scores what is trained from one layer on; the frozen layers in front are run once."""

    def __init__(
        self,
        directory: Path,
        source: LayerSource,
        first_layer: int,
        samples: TrainingSamples,
        *,
        settings: RuntimeSettings,
        plan: ForwardPlan,
        progress: Report = lambda what, done, total: None,
    ) -> None:
        self.directory = directory
        self.source = source
        self.first_layer = first_layer
        self.samples = samples
        self.settings = settings
        self.plan = replace(plan, stored_as="float32")
        self.progress = progress
        self._stored: ActivationStore | None = None

    def score(self, trained: Vector, watch: Stopwatch | None = None) -> Score:
        """Score the model with these weights from the first trained layer on."""
        place = self.plan.folder or tempfile.gettempdir()
        no_room = f"no room to evaluate in {place}; free some or use --holdout 0"
        try:
            with disk_errors(no_room=no_room, otherwise=f"cannot evaluate in {place}"):
                return self._score(trained, watch or Stopwatch())
        except MemoryError:
            raise OutOfMemory(f"not enough memory to evaluate {len(self.samples)} samples; hold out fewer") from None

    def predict(self, trained: Vector) -> NDArray[Any]:
        """Return the outputs of all samples with these weights; they are few enough to lie in memory."""
        manifest, watch = self.source.manifest, Stopwatch()
        with tempfile.TemporaryDirectory(prefix="embrace-") as folder:
            source = TrainedSource(self.directory, manifest, self.first_layer, trained, Path(folder))
            if self.first_layer and self._stored is None:
                self._stored = self._run(self.source, range(self.first_layer), watch)
            outputs = self._run(source, range(self.first_layer, len(manifest.layers)), watch)
            found = np.array(outputs.rows(0, len(self.samples)))
            outputs.close()
        return found

    def _score(self, trained: Vector, watch: Stopwatch) -> Score:
        manifest = self.source.manifest
        place = self.plan.folder  # where memory is short, not in /tmp: that is memory on many systems
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        with watch.part("evaluation"), tempfile.TemporaryDirectory(prefix="embrace-", dir=place) as folder:
            own = Stopwatch(watch.now)  # its parts are part of evaluation, not of training
            if self.first_layer and self._stored is None:
                self._stored = self._run(self.source, range(self.first_layer), own)
            source = TrainedSource(self.directory, manifest, self.first_layer, trained, Path(folder))
            return _score_layers(
                source,
                self.first_layer,
                self._inputs,
                self.samples,
                BundleLoss(self.directory, manifest),
                self.plan,
                self.settings,
                own,
                self.progress,
            )

    def _run(self, source: LayerSource, layers: range, watch: Stopwatch) -> ActivationStore:
        return store_activations(
            source, layers, self._inputs, len(self.samples), self.plan, self.settings, watch, self.progress
        )

    def _inputs(self, start: int, stop: int) -> NDArray[Any]:
        if self._stored is not None:
            return self._stored.rows(start, stop)
        return self.samples.batch(np.arange(start, stop))[0]

    def close(self) -> None:
        """Give back what was stored; the next score runs the frozen layers again."""
        if self._stored:
            self._stored.close()
            self._stored = None


def score_received(
    directory: Path,
    source: LayerSource,
    samples: TrainingSamples,
    plan: ForwardPlan,
    settings: RuntimeSettings,
    watch: Stopwatch,
    progress: Report,
) -> Score:
    """Score a version as it was received: all of its layers, a few at a time, within the memory of the plan.

    `directory` has the graph of a traced loss.
    """

    def inputs(start: int, stop: int) -> NDArray[Any]:
        return samples.batch(np.arange(start, stop))[0]

    own, plan = Stopwatch(watch.now), replace(plan, stored_as="float32")
    with watch.part("evaluation"):
        loss = BundleLoss(directory, source.manifest)
        return _score_layers(source, 0, inputs, samples, loss, plan, settings, own, progress)


def _score_layers(
    source: LayerSource,
    first: int,
    inputs: Inputs,
    samples: TrainingSamples,
    loss: BundleLoss,
    plan: ForwardPlan,
    settings: RuntimeSettings,
    watch: Stopwatch,
    progress: Report,
) -> Score:
    """Run all layers from the first on, a group at a time, and add up the scores of what comes out."""
    manifest, count = source.manifest, len(samples)
    last = None if manifest.loss_chunk is None else _last_boundary(manifest)
    layers = range(first, len(manifest.layers) if last is None else last.layer)
    stored = store_activations(source, layers, inputs, count, plan, settings, watch, progress) if layers else None
    read = stored.rows if stored is not None else inputs
    try:
        if last is not None:
            return _score_steps(source, last, read, samples, loss, settings)
        total = Score()
        for start in range(0, count, loss.rows):
            stop = min(start + loss.rows, count)
            total += loss.score(read(start, stop), samples.labels[start:stop])
        return total
    finally:
        if stored is not None:
            stored.close()


def _last_boundary(manifest: Manifest) -> Boundary:
    """The boundary that trains least."""
    return max((b for b in manifest.boundaries if b.width is None), key=lambda boundary: boundary.layer)


def _score_steps(
    source: LayerSource,
    boundary: Boundary,
    read: Inputs,
    samples: TrainingSamples,
    loss: BundleLoss,
    settings: RuntimeSettings,
) -> Score:
    """Take the loss of every sample from the training step of a boundary; its gradients go nowhere."""
    directory, weights = source.fetch_step(boundary)
    step = open_step(directory, source.manifest, boundary, choose_engine(boundary), settings)
    step.parameters[:] = weights
    total = Score()
    for number in range(len(samples)):
        labels = samples.labels[number : number + 1]
        counted = loss.counted(labels)
        total += Score(counted * step.run(read(number, number + 1), labels), 0, counted)
    return total
