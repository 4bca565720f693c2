"""The portable engine: training graphs of standard operators on stock onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.session import RuntimeSettings, inference_session, training_session
from edge_runtime.engine.step import BoundStep, Wire, pointer
from federation.manifest import ROWS, BatchNorm
from federation.space import ParameterSpace


class LayerForward:
    """One frozen layer: its weights come from the file beside the graph."""

    def __init__(self, graph: Path, settings: RuntimeSettings | None = None) -> None:
        self._session = inference_session(graph, settings or RuntimeSettings())

    def __call__(self, batch: NDArray[Any]) -> NDArray[Any]:
        output: NDArray[Any] = self._session.run(["output"], {"input": batch})[0]
        return output

    def measure(
        self, batch: NDArray[Any], norms: Sequence[BatchNorm]
    ) -> tuple[NDArray[Any], dict[BatchNorm, tuple[NDArray[Any], NDArray[Any]]]]:
        """Return its output, and mean and variance of every row that enters a batch norm; the graph must measure."""
        names = [name + ROWS for norm in norms for name in (norm.mean, norm.variance)]
        output, *found = self._session.run(["output", *names], {"input": batch})
        return output, dict(zip(norms, zip(found[::2], found[1::2], strict=True), strict=True))


class TrainingStep(BoundStep):
    """A step from the graph `train.*.onnx` of a boundary."""

    engine = "portable"

    def __init__(
        self,
        graph: Path | bytes,
        space: ParameterSpace,
        first_layer: int,
        settings: RuntimeSettings | None = None,
        *,
        trace: Path | None = None,
    ) -> None:
        super().__init__(space, first_layer)
        inputs = [Wire(name, value) for name, value in self.values.items()]
        endings = {"weight": ".grad", "statistic": ".new"}
        outputs = [Wire(name + endings[self.kinds[name]], result) for name, result in self.results.items()]
        self._predictions: NDArray[np.float32] | None = None
        self.connect(training_session(graph, settings or RuntimeSettings(), trace=trace), inputs, outputs)

    def rebind(self) -> None:
        """Bind what is predicted to memory of its own: a block of the arena, kept from run to run, would divide it."""
        found = next((value for value in self.session.get_outputs() if value.name == "predictions"), None)
        batch = self._bound.get("input")
        if found is None or batch is None:
            return
        if all(isinstance(size, int) for size in found.shape[1:]):
            self._predictions = np.empty((len(batch), *found.shape[1:]), np.float32)
            self._binding.bind_output(*pointer(Wire("predictions", self._predictions)))
        else:  # the runtime allocates it; a bound output would keep its first size for ever
            self._binding.bind_output("predictions", "cpu")

    def predictions(self) -> NDArray[Any]:
        """Return what the last run predicted for its batch."""
        if self._predictions is not None:
            return self._predictions
        last: NDArray[Any] = self._binding.get_outputs()[-1].numpy()  # listed in the order of binding
        return last

    @staticmethod
    def is_backward(node: str) -> bool:
        """Whether a node of the trace belongs to the backward pass."""
        return node.startswith("backward/")
