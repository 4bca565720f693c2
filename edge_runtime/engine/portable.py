"""The portable engine: training graphs of standard operators on stock onnxruntime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
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

    def outputs(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return everything that the graph gives."""
        found: list[NDArray[Any]] = self._session.run(None, {"input": batch})
        return found


def open_beside(
    kind: Callable[[Path, RuntimeSettings], LayerForward],
    pieces: Iterable[bytes],
    folder: Path,
    settings: RuntimeSettings,
) -> LayerForward:
    """Open a graph that was made here: while it is opened it lies beside its weights, or OSError says why not."""
    handle, name = tempfile.mkstemp(".onnx", dir=folder)
    try:
        with open(handle, "wb") as file:
            file.writelines(pieces)
        del pieces  # they may be large: before the runtime reads them again
        return kind(Path(name), settings)
    finally:
        Path(name).unlink()


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
        self._has_run = False
        self.connect(training_session(graph, settings or RuntimeSettings(), trace=trace), inputs, outputs)
        self._outputs = {value.name for value in self.session.get_outputs()}
        self.rebind()

    def rebind(self) -> None:
        # Its size follows the batch: onnxruntime allocates it, and would keep the first size for ever.
        self._predictions = None
        self._has_run = False
        if "predictions" in self._outputs:
            self._binding.bind_output("predictions", "cpu")

    def prepare(self) -> None:
        """Bind what is predicted to memory of its own, once its size is known.

        A block of the arena, kept from run to run, would divide it: 0.65 MiB more for ResNet20's weak tier.
        """
        if self._has_run and self._predictions is None and "predictions" in self._outputs:
            self._predictions = np.empty(self._binding.get_outputs()[-1].shape(), np.float32)
            self._binding.bind_output(*pointer(Wire("predictions", self._predictions)))
        self._has_run = True

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
