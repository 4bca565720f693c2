"""Frozen layers of a simulation as one graph of onnxruntime, with the global weights as constants.

A device joins as many of its frozen layers as its memory allows. A simulation joins all of them, and keeps the session
as long as the weights stay: convolutions do the batch norm, the addition and the ReLU behind them in the layout that
suits them. ResNet20's frozen layers at the weak boundary, 320 samples: 169 ms instead of PyTorch's 224.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_runtime.engine.session import RuntimeSettings, inference_session
from edge_runtime.join_layers import join_layers
from edge_runtime.onnx_file import read_model
from federation.manifest import Layer
from federation.space import ParameterSpace, Vector

AT_ONCE = 32  # samples: what a layer gives stays in the cache


class FrozenGraph:
    """Computes what the last of some layers gives. The session is opened anew when their weights have changed."""

    def __init__(self, directory: Path, space: ParameterSpace, layers: Sequence[Layer], weights: Vector) -> None:
        """`layers` are the first ones; `weights` are the model's, read where they lie."""
        graphs = [(directory / layer.forward.name).read_bytes() for layer in layers]
        self._graph = join_layers(graphs)
        outside = [tensor.name for tensor in read_model(self._graph).graph.tensors if tensor.external is not None]
        self._names = {name: name.partition("/")[2] for name in outside}  # without the number of the layer
        self._space = space
        self._weights = weights[: space.layer(len(layers) - 1).stop]
        self._used: Vector = np.empty(0, np.float32)
        self._session: ort.InferenceSession | None = None

    def __call__(self, batch: NDArray[Any]) -> NDArray[Any]:
        session = self._open()
        parts = [
            session.run(["output"], {"input": np.ascontiguousarray(batch[start : start + AT_ONCE])})[0]
            for start in range(0, len(batch), AT_ONCE)
        ]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _open(self) -> ort.InferenceSession:
        if self._session is None or not np.array_equal(self._used, self._weights):
            self._used = np.array(self._weights)
            views = self._space.views(self._used)
            self._session = inference_session(
                self._graph, RuntimeSettings(threads=1), {name: views[own] for name, own in self._names.items()}
            )
        return self._session


def suits_graph(directory: Path, layers: Sequence[Layer]) -> bool:
    """Say whether layers that only infer are quicker as a graph: those with convolutions and batch norm are.

    The model alone decides it, so that a result is the same wherever it is computed. FEMNIST's network, which has no
    batch norm, gains a twentieth and loses it when a graph is opened. Layers that need more than their own weights
    (shared ones, a file of stored ones) are left to PyTorch.
    """
    if not layers or any(layer.borrowed or layer.stored for layer in layers):
        return False
    graphs = [read_model((directory / layer.forward.name).read_bytes()).graph for layer in layers]
    nodes = [node for graph in graphs for node in graph.nodes]
    return not any(node.graphs for node in nodes) and {"Conv", "BatchNormalization"} <= {n.operator for n in nodes}
