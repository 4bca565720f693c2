"""The reference for bundles made from ONNX files.

onnxruntime runs the file for the layers' outputs. Gradients come from PyTorch, which runs the file's operators under
autograd, also in float64. For operators that it does not have they come from onnxruntime-training, where that is
installed and can differentiate the model; where not, verify.py falls back to slopes of the loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from onnx import NodeProto, numpy_helper

from federation.errors import MissingPackage
from federation.manifest import Boundary, Manifest
from model_export.autodiff.rules.dropout import reference_mask
from model_export.bundle import load_graph
from model_export.crossing import pack_arrays
from model_export.errors import ExportError
from model_export.layers import with_helpers
from model_export.normalise import VALUE_PREFIX, make_batch_dynamic, to_supported_opset
from model_export.onnx_torch import TorchRun
from model_export.oracle import StepResult, loss_function, torch_loss
from model_export.ort_artifacts import ArtifactStep, unsupported, write_artifacts
from model_export.ort_runner import training_module
from model_export.shapes import run_everything
from model_export.short_memory import Head, find_heads, short_memory
from model_export.source import ModelSource
from model_export.training import dropout_numbers, dropout_rates, ort_forward_graph


def _tensor(value: np.ndarray, real: torch.dtype) -> torch.Tensor:
    """A copy; real numbers in the given precision."""
    tensor = torch.from_numpy(np.array(value))
    return tensor.to(real) if tensor.is_floating_point() else tensor


class OnnxOracle:
    """Knows every layer's output, and gradients as far as PyTorch or onnxruntime-training has them."""

    def __init__(self, source: ModelSource, manifest: Manifest, frozen: Mapping[str, np.ndarray] | None = None) -> None:
        """`frozen` has the weights that no device trains, as the bundle stores them."""
        self._manifest = manifest
        self._function = loss_function(source, manifest.loss)
        self._model = to_supported_opset(source.capture().model)
        for item in self._model.graph.initializer:
            if frozen and item.name in frozen:
                item.CopyFrom(numpy_helper.from_array(frozen[item.name], item.name))
        make_batch_dynamic(self._model)
        graph, layers = load_graph(source)
        self._graph = graph
        self._layers = layers
        self._steps: dict[int, ArtifactStep | None] = {}
        if [layer.name for layer in self._layers] != [layer.name for layer in manifest.layers]:
            raise ExportError("the ONNX file has other layers than the bundle: it changed since the export")

    def layer_outputs(self, x: np.ndarray, found: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        values = self._run(x)
        return [self._row(values, layer.leaving, layer.output) for layer in self._layers]

    def _row(self, values: Mapping[str, np.ndarray], names: Sequence[str], row: str) -> np.ndarray | None:
        """What crosses a boundary, as devices have it."""
        found = [values.get(name.removeprefix(VALUE_PREFIX)) for name in names]
        known = [value for value in found if value is not None]
        if len(known) < len(found) or row in names:
            return found[0] if row in names else None
        return pack_arrays(known, [self._graph.shapes[name].index(None) for name in names])

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
        self,
        boundary: Boundary,
        x: np.ndarray,
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        entering: np.ndarray | None = None,
    ) -> StepResult | None:
        crossing = self._run(x)
        found = self._torch_step(boundary, crossing, labels, seed, vector, torch.float32)
        if found is not None:
            return found
        if boundary.layer not in self._steps:
            self._steps[boundary.layer] = self._prepare(boundary)
        step = self._steps[boundary.layer]
        first = self._layers[boundary.layer]
        row = self._row(crossing, first.entering, first.input)
        if step is None or boundary.last_steps or row is None:
            return None
        values = self._manifest.space.views(vector)
        mine = [p for layer in self._layers[boundary.layer :] for p in layer.parameters]
        weights = {p.name: values[p.name] for p in mine if p.kind == "weight"}
        statistics = {p.name: values[p.name] for p in mine if p.kind == "statistic"}
        return StepResult(*step.loss_and_gradients(weights, statistics, row, labels, seed))

    def precise_step(
        self,
        boundary: Boundary,
        x: np.ndarray,
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        entering: np.ndarray | None = None,
    ) -> StepResult | None:
        return self._torch_step(boundary, self._run(x), labels, seed, vector, torch.float64)

    def _torch_step(
        self,
        boundary: Boundary,
        known: Mapping[str, np.ndarray],
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        real: torch.dtype,
    ) -> StepResult | None:
        """A step by PyTorch's autograd; None if it lacks an operator of the file, or a value that crosses."""
        graph, suffix = self._graph, self._layers[boundary.layer :]
        own = {p.name: p for layer in suffix for p in layer.parameters}
        values = {
            name: _tensor(value, real) for name, value in self._manifest.space.views(vector).items() if name in own
        }
        weights = {name: value.requires_grad_() for name, value in values.items() if own[name].kind == "weight"}
        values |= {name: _tensor(value, real) for name, value in graph.constants.items()}
        for name, (slope, offset) in graph.batch_values.items():
            values[name] = torch.from_numpy(slope * len(labels) + offset)
        for name in suffix[0].entering:
            if name.removeprefix(VALUE_PREFIX) not in known:
                return None
            values[name] = _tensor(known[name.removeprefix(VALUE_PREFIX)], real)
        nodes = with_helpers(graph, [node for layer in suffix for node in layer.nodes])
        if boundary.head is not None and any(node.op_type == "BatchNormalization" for node in nodes):
            return None  # which has other statistics in the first steps
        run = TorchRun(values, real, self._masks(seed))
        try:
            with short_memory(boundary.last_steps, self._heads(boundary, nodes, values, real)):
                run.run(nodes)
        except NotImplementedError:
            return None
        loss = torch_loss(self._manifest.loss, run.values[graph.output], _tensor(labels, real), self._function)
        slopes = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        gradients = {name: slope.numpy() for name, slope in zip(weights, slopes, strict=True)}
        return StepResult(loss.item(), gradients, {name: v.detach().numpy() for name, v in run.statistics.items()})

    def _heads(
        self, boundary: Boundary, nodes: Sequence[NodeProto], values: Mapping[str, torch.Tensor], real: torch.dtype
    ) -> list[Head] | None:
        """What the first steps of recurrent layers give without dropout, if a device runs them beforehand."""
        if boundary.head is None or boundary.last_steps is None:
            return None
        run = TorchRun(dict(values), real, lambda name, x: x.new_ones(()))
        return find_heads(lambda _: run.run(nodes), torch.zeros(()), boundary.last_steps)

    def _masks(self, seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """What each dropout multiplies by, from a device's seed."""
        numbers = dropout_numbers(self._graph)
        rates = dropout_rates(self._graph)

        def mask(name: str, x: torch.Tensor) -> torch.Tensor:
            rate = rates[name]
            return (
                torch.from_numpy(reference_mask(seed, numbers[name], tuple(x.shape), rate)) if rate else x.new_ones(())
            )

        return mask

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
