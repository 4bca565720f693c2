"""What the trainer needs of an engine, and the one that devices have.

The trainer asks for two things: a step that gives gradients from a boundary on, and the frozen layers' activations. So
another engine (PyTorch, for simulations) can stand behind the same loop.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_runtime.activations import ActivationStore
from edge_runtime.engine.choose import EngineName, Step, open_step
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.forward import ForwardPlan, Inputs, store_activations
from edge_runtime.forward import Report as Progress
from edge_runtime.frozen_statistics import FrozenStatistics
from edge_runtime.layers import LayerSource
from edge_runtime.timing import Stopwatch
from federation.manifest import Boundary
from federation.space import Vector


class GradientStep(Protocol):
    """A training step of one boundary; engine/step.py says what lies in the two vectors."""

    parameters: Vector
    gradients: Vector

    def run(self, batch: NDArray[Any], labels: NDArray[Any], seed: int = 0) -> float:
        """Compute the loss of a batch; leave gradients and new statistics in `gradients`."""


class Engine(Protocol):
    """Opens steps and runs frozen layers of one model."""

    @property
    def name(self) -> str:
        """For reports."""

    def open_step(self, boundary: Boundary) -> GradientStep:
        """Open the training step of a boundary."""

    def store(
        self,
        boundary: Boundary,
        inputs: Inputs,
        count: int,
        plan: ForwardPlan,
        watch: Stopwatch,
        progress: Progress,
        statistics: FrozenStatistics | None = None,
    ) -> ActivationStore:
        """Run `count` samples through all that is frozen at a boundary and store what enters the training step.

        `statistics` get what enters batch norms on the way.
        """


class OnnxEngine:
    """The graphs of a bundle on onnxruntime: what a device runs."""

    def __init__(self, directory: Path, source: LayerSource, name: EngineName, settings: RuntimeSettings) -> None:
        """Take training graphs from `directory`, the frozen layers from `source`."""
        self.directory = directory
        self.source = source
        self.settings = settings
        self.name: EngineName = name

    def open_step(self, boundary: Boundary) -> Step:
        return open_step(self.directory, self.source.manifest, boundary, self.name, self.settings)

    def store(
        self,
        boundary: Boundary,
        inputs: Inputs,
        count: int,
        plan: ForwardPlan,
        watch: Stopwatch,
        progress: Progress,
        statistics: FrozenStatistics | None = None,
    ) -> ActivationStore:
        layers, settings = range(boundary.layer), self.settings
        plan = replace(plan, computed_in=settings.frozen)
        return store_activations(
            self.source, layers, inputs, count, plan, settings, watch, progress, boundary, statistics
        )
