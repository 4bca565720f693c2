"""The onnxruntime-training engine: the training graph that its own artifacts contain.

The package's Module copies every parameter and gradient to and fro in each step. Its `training_model.onnx` is an
ordinary graph for a runtime that has the training operators, so it is run with bound memory instead: gradients are
accumulated in place into buffers, which are slices of the flat gradient vector, and batch norm updates its statistics
in place.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from edge_runtime.engine.session import RuntimeSettings, training_session
from edge_runtime.engine.step import BoundStep, Wire
from federation.errors import MissingPackage
from federation.space import ParameterSpace

TRAINING_MODEL = "training_model.onnx"
GRADIENT_BUFFER = "_grad.accumulation.buffer"


def is_available() -> bool:
    """Whether this onnxruntime has the training operators."""
    return hasattr(ort.capi.onnxruntime_pybind11_state, "TrainingParameters") or hasattr(
        ort.capi.onnxruntime_pybind11_state, "CheckpointState"
    )


class OrtTrainingStep(BoundStep):
    """A step from the directory `ort_training/*` of a boundary."""

    engine = "ort-training"

    def __init__(
        self,
        directory: Path,
        space: ParameterSpace,
        first_layer: int,
        settings: RuntimeSettings | None = None,
        *,
        trace: Path | None = None,
    ) -> None:
        if not is_available():
            raise MissingPackage("onnxruntime-training-cpu", "ort-training")
        super().__init__(space, first_layer)
        session = training_session(directory / TRAINING_MODEL, settings or RuntimeSettings(), trace=trace)
        weights = [name for name, kind in self.kinds.items() if kind == "weight"]
        self._statistics = [(self.results[n], self.values[n]) for n, kind in self.kinds.items() if kind != "weight"]
        # Statistics are updated where they lie, so the session is given those in the gradient vector.
        inputs = [Wire(name, self.values[name] if name in weights else self.results[name]) for name in self.kinds]
        inputs += [Wire(name + GRADIENT_BUFFER, self.results[name]) for name in weights]
        inputs.append(Wire("lazy_reset_grad", np.ones(1, np.bool_)))
        self.connect(session, inputs, ())
        for output in session.get_outputs():
            if output.name != "loss":
                self._binding.bind_output(output.name, "cpu")  # flags that a buffer was written

    def prepare(self) -> None:
        for result, value in self._statistics:
            result[...] = value

    @staticmethod
    def is_backward(node: str) -> bool:
        """Whether a node of the trace belongs to the backward pass."""
        return "Grad" in node or "grad" in node
