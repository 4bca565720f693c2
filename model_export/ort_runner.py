"""One training step of onnxruntime-training, through its own Python interface; for verification and benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from federation.errors import MissingPackage
from model_export.errors import ExportError

TRAINING_MODEL, EVAL_MODEL, OPTIMIZER_MODEL, CHECKPOINT = (
    "training_model.onnx",
    "eval_model.onnx",
    "optimizer_model.onnx",
    "checkpoint",
)
LABELS_INPUT, SEED_INPUT = "labels", "seed"
_GRADIENT_BUFFER = "_grad.accumulation.buffer"


def training_module(name: str) -> Any:
    """A module of onnxruntime.training, without running that package's own file, which would load all of torch."""
    try:
        spec = importlib.util.find_spec("onnxruntime.training")
    except ModuleNotFoundError:  # not even onnxruntime
        spec = None
    if spec is None:
        raise MissingPackage("onnxruntime-training-cpu", "ort-training")
    sys.modules.setdefault("onnxruntime.training", importlib.util.module_from_spec(spec))
    return importlib.import_module(f"onnxruntime.training.{name}")


class ArtifactStep:
    """Loss and gradients of the artifacts in a directory. Nothing is updated but batch-norm statistics."""

    def __init__(self, directory: Path, *, threads: int = 1) -> None:
        api = training_module("api")
        from onnxruntime import SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._state = api.CheckpointState.load_checkpoint(str(directory / CHECKPOINT))
        self._module = api.Module(str(directory / TRAINING_MODEL), self._state, session_options=options)
        self._inputs = self._module.input_names()
        graph = onnx.load(directory / TRAINING_MODEL).graph
        shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in graph.input}
        self._trained = [name for name in shapes if name + _GRADIENT_BUFFER in shapes]
        # Trained parameters and statistics, in the order of the package's own flat buffer.
        own = {*self._inputs, "lazy_reset_grad", *(name + _GRADIENT_BUFFER for name in self._trained)}
        self._shapes = {name: shape for name, shape in shapes.items() if name not in own}

    def loss_and_gradients(
        self,
        parameters: Mapping[str, np.ndarray],
        statistics: Mapping[str, np.ndarray],
        x: np.ndarray,
        labels: np.ndarray,
        seed: int = 0,
    ) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Loss, the gradient of each trained parameter, and each statistic's new value, from the values given."""
        self._load({**parameters, **statistics})
        loss = self.step(x, labels, seed)
        known = self._state.parameters
        gradients = {name: np.array(known[name].grad) for name in self._trained}
        return loss, gradients, {n: np.array(known[n].data) for n in self._shapes if n not in gradients}

    def step(self, x: np.ndarray, labels: np.ndarray, seed: int = 0) -> float:
        """One forward and backward pass; the gradients are those of this step alone. This is what is timed."""
        given = {LABELS_INPUT: labels, SEED_INPUT: np.array(seed, np.int64)}
        loss = self._module(*(given.get(name, x) for name in self._inputs))
        self._module.lazy_reset_grad()
        return float(loss)

    def _load(self, values: Mapping[str, np.ndarray]) -> None:
        """Set all parameters at once: the only way that also works with a nominal checkpoint."""
        from onnxruntime import OrtValue

        for name, shape in self._shapes.items():
            if values[name].shape != shape:
                raise ExportError(f"parameter {name!r} has shape {values[name].shape}, the artifacts say {shape}")
        flat = np.concatenate([np.ravel(values[name]) for name in self._shapes]).astype(np.float32, copy=False)
        self._module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(flat)._ortvalue, trainable_only=False)
