"""The portable engine: training graphs of standard operators on stock onnxruntime.

Parameters and gradients are two flat vectors; the session reads and writes them in place, so that a step is one run
of the session and a local rule is arithmetic on vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from federation.errors import BundleError
from federation.space import ParameterSpace, Vector

PROVIDERS = ["CPUExecutionProvider"]


def open_session(model: Path | bytes, *, threads: int = 1) -> ort.InferenceSession:
    """A session that behaves when several agents share a machine: few threads, none of them spinning."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # one block planned ahead for all values: ResNet20 130 MiB without, 228 with
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(source, options, providers=PROVIDERS)
    except Exception as error:  # onnxruntime raises several unrelated types
        what = model.name if isinstance(model, Path) else "a graph"
        raise BundleError(f"onnxruntime {ort.__version__} cannot load {what}: {str(error).splitlines()[0]}") from None


class LayerForward:
    """One frozen layer: its weights come from the file beside the graph."""

    def __init__(self, graph: Path, *, threads: int = 1) -> None:
        self._session = open_session(graph, threads=threads)

    def __call__(self, batch: NDArray[Any]) -> NDArray[Any]:
        output: NDArray[Any] = self._session.run(["output"], {"input": batch})[0]
        return output


class TrainingStep:
    """Loss and gradients of everything from one layer to the output.

    `parameters` and `gradients` are flat vectors over that suffix of the space. Where the space has a statistic,
    `gradients` holds its new value after a run.
    """

    def __init__(self, graph: Path | bytes, space: ParameterSpace, first_layer: int, *, threads: int = 1) -> None:
        suffix = space.suffix(first_layer)
        self.parameters: Vector = np.zeros(suffix.stop - suffix.start, np.float32)
        self.gradients: Vector = np.zeros_like(self.parameters)
        self.session = open_session(graph, threads=threads)
        self.uses_seed = any(value.name == "seed" for value in self.session.get_inputs())
        self._binding = self.session.io_binding()
        kinds = {p.name: p.kind for p in space}
        values = space.views(self.parameters, start=suffix.start)
        results = space.views(self.gradients, start=suffix.start)
        for name, value in values.items():
            self._binding.bind_input(name, "cpu", 0, np.float32, value.shape, value.ctypes.data)
            result, ending = results[name], ".grad" if kinds[name] == "weight" else ".new"
            self._binding.bind_output(name + ending, "cpu", 0, np.float32, result.shape, result.ctypes.data)
        self._loss = np.zeros((), np.float32)
        self._binding.bind_output("loss", "cpu", 0, np.float32, (), self._loss.ctypes.data)
        self._binding.bind_output("predictions", "cpu")  # its size follows the batch: onnxruntime allocates it

    def run(self, batch: NDArray[Any], labels: NDArray[Any], seed: int = 0) -> float:
        """One forward and backward pass; gradients and new statistics are in `gradients` afterwards."""
        self._binding.bind_cpu_input("input", np.ascontiguousarray(batch))
        self._binding.bind_cpu_input("labels", np.ascontiguousarray(labels))
        if self.uses_seed:
            self._binding.bind_cpu_input("seed", np.array(seed, np.int64))
        self.session.run_with_iobinding(self._binding)
        return float(self._loss)

    def predictions(self) -> NDArray[Any]:
        """What the last run predicted for its batch."""
        last: NDArray[Any] = self._binding.get_outputs()[-1].numpy()  # listed in the order of binding
        return last
