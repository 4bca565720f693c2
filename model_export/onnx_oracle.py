"""The reference for bundles made from ONNX files: onnxruntime itself.

It runs the file for the layers' outputs. Gradients come from onnxruntime-training, where it is installed and can
differentiate the model; where not, verify.py falls back to slopes of the loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from federation.errors import MissingPackage
from federation.manifest import Boundary, Manifest
from model_export.bundle import load_graph
from model_export.errors import ExportError
from model_export.normalise import VALUE_PREFIX, make_batch_dynamic, to_supported_opset
from model_export.oracle import StepResult
from model_export.ort_artifacts import ArtifactStep, unsupported, write_artifacts
from model_export.ort_runner import training_module
from model_export.shapes import run_everything
from model_export.source import ModelSource
from model_export.training import ort_forward_graph


class OnnxOracle:
    """Knows every layer's output, and gradients as far as onnxruntime-training has them."""

    def __init__(self, source: ModelSource, manifest: Manifest) -> None:
        self._manifest = manifest
        self._model = to_supported_opset(source.capture().model)
        make_batch_dynamic(self._model)
        graph, layers = load_graph(source)
        self._graph = graph
        self._layers = layers
        self._steps: dict[int, ArtifactStep | None] = {}
        if [layer.name for layer in self._layers] != [layer.name for layer in manifest.layers]:
            raise ExportError("the ONNX file has other layers than the bundle: it changed since the export")

    def layer_outputs(self, x: np.ndarray, found: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        values = self._run(x)
        return [values.get(layer.output.removeprefix(VALUE_PREFIX)) for layer in self._layers]

    def _run(self, x: np.ndarray) -> dict[str, np.ndarray]:
        name = self._graph.input.removeprefix(VALUE_PREFIX)
        return {name: x} | run_everything(self._model, {name: x})

    @cached_property
    def _has_training(self) -> bool:
        try:
            training_module("api")
        except MissingPackage:
            return False
        return True

    def step(
        self, boundary: Boundary, x: np.ndarray, labels: np.ndarray, seed: int, vector: np.ndarray
    ) -> StepResult | None:
        if boundary.layer not in self._steps:
            self._steps[boundary.layer] = self._prepare(boundary)
        step = self._steps[boundary.layer]
        entering = self._run(x).get(self._layers[boundary.layer].input.removeprefix(VALUE_PREFIX))
        if step is None or boundary.last_steps or entering is None:
            return None
        values = self._manifest.space.views(vector)
        mine = [p for layer in self._layers[boundary.layer :] for p in layer.parameters]
        weights = {p.name: values[p.name] for p in mine if p.kind == "weight"}
        statistics = {p.name: values[p.name] for p in mine if p.kind == "statistic"}
        return StepResult(*step.loss_and_gradients(weights, statistics, entering, labels, seed))

    def precise_step(
        self, boundary: Boundary, x: np.ndarray, labels: np.ndarray, seed: int, vector: np.ndarray
    ) -> StepResult | None:
        return None

    def _prepare(self, boundary: Boundary) -> ArtifactStep | None:
        """The artifacts of a suffix, made from the file anew, not those of the bundle."""
        suffix, loss = self._layers[boundary.layer :], self._manifest.loss
        if not self._has_training:
            return None
        forward = ort_forward_graph(self._graph, suffix)
        parameters = [p for layer in suffix for p in layer.parameters]
        trained = [p.name for p in parameters if p.kind == "weight"]
        if unsupported(forward, loss, trained):
            return None
        with tempfile.TemporaryDirectory() as folder:
            statistics = [p.name for p in parameters if p.kind == "statistic"]
            write_artifacts(forward, trained, statistics, loss, Path(folder))
            return ArtifactStep(Path(folder))

    def calm(self, boundary: Boundary, vector: np.ndarray) -> np.ndarray:
        return vector
