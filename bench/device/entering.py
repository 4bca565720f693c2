"""One random batch as it arrives at every layer and at every boundary of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge_runtime.engine.portable import LayerForward
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.measure import random_inputs
from federation.manifest import Boundary, Layer, Manifest


class Entering:
    """Runs the frozen layers once."""

    def __init__(self, directory: Path, manifest: Manifest, batch: int, settings: RuntimeSettings) -> None:
        self._directory = directory
        self._settings = settings
        self.layers = [random_inputs(manifest.input, batch, manifest.vocabulary)]  # what enters each of them
        for layer in manifest.layers[:-1]:
            self.layers.append(self._run(layer, self.layers[-1]))

    def __call__(self, boundary: Boundary) -> NDArray[Any]:
        """Return what enters the training graph of a boundary."""
        x = self.layers[boundary.layer]
        return self._run(boundary.head, x) if boundary.head else x

    def _run(self, layer: Layer, x: NDArray[Any]) -> NDArray[Any]:
        return LayerForward(self._directory / layer.forward.name, self._settings)(x)
