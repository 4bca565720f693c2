"""The reference for bundles made from ONNX files: the file itself, run by onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from federation.manifest import Boundary, Manifest
from model_export.bundle import load_graph
from model_export.errors import ExportError
from model_export.oracle import StepResult
from model_export.shapes import run_everything
from model_export.source import ModelSource


class OnnxOracle:
    """Knows every layer's output; has no gradients of its own."""

    def __init__(self, source: ModelSource, manifest: Manifest) -> None:
        self._model = source.capture().model
        graph, self._layers = load_graph(source)
        self._input = graph.input
        if [layer.name for layer in self._layers] != [layer.name for layer in manifest.layers]:
            raise ExportError("the ONNX file has other layers than the bundle: it changed since the export")

    def layer_outputs(self, x: np.ndarray, found: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        values = run_everything(self._model, {self._input: x})
        return [values.get(layer.output) for layer in self._layers]

    def step(
        self, boundary: Boundary, x: np.ndarray, labels: np.ndarray, seed: int, vector: np.ndarray
    ) -> StepResult | None:
        return None

    def calm(self, boundary: Boundary, vector: np.ndarray) -> np.ndarray:
        return vector
