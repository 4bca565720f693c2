"""Frozen layers of a simulation as one graph of onnxruntime, with the global weights as constants.

A device runs its frozen layers one after the other, because it has little memory. A simulation has more: the bundle's
graphs are joined to one, and convolutions do the batch norm, the addition and the ReLU behind them in the layout that
suits them. ResNet20's frozen layers at the weak boundary, 320 samples: 169 ms instead of PyTorch's 224.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto

from edge_runtime.engine.session import RuntimeSettings, inference_session
from federation.manifest import Layer
from federation.space import ParameterSpace, Vector

AT_ONCE = 32  # samples: what a layer gives stays in the cache


class FrozenGraph:
    """Computes what the last of some layers gives. The session is opened anew when their weights have changed."""

    def __init__(self, directory: Path, space: ParameterSpace, layers: Sequence[Layer], weights: Vector) -> None:
        """`layers` are the first ones; `weights` are the model's, read where they lie."""
        joined = join_layers(directory, layers)
        self._graph = joined.SerializeToString()
        self._names = [tensor.name for tensor in joined.graph.initializer if tensor.data_location == tensor.EXTERNAL]
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
                self._graph, RuntimeSettings(threads=1), {name: views[name] for name in self._names}
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
    nodes = join_layers(directory, layers).graph.node
    if any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute):
        return False
    return {"Conv", "BatchNormalization"} <= {node.op_type for node in nodes}


def join_layers(directory: Path, layers: Sequence[Layer]) -> ModelProto:
    """Join the bundle's graphs of consecutive layers; weights stay outside of it."""
    models = [onnx.load(str(directory / layer.forward.name), load_external_data=False) for layer in layers]
    joined = ModelProto()
    joined.CopyFrom(models[0])
    joined.graph.ClearField("node")
    joined.graph.ClearField("initializer")
    joined.graph.ClearField("value_info")
    joined.graph.output[0].CopyFrom(models[-1].graph.output[0])
    for number, model in enumerate(models):
        _add(joined.graph, model.graph, number, last=number == len(models) - 1)
    return joined


def _add(joined: GraphProto, graph: GraphProto, number: int, last: bool) -> None:
    """Copy a layer's nodes; every name of its own is told from those of other layers."""
    names = {tensor.name: tensor.name for tensor in graph.initializer if tensor.data_location == tensor.EXTERNAL}
    names |= {"": "", "input": f"{number}/output" if number else "input"}
    names |= {"output": "output" if last else f"{number + 1}/output"}
    for tensor in graph.initializer:
        made = joined.initializer.add()
        made.CopyFrom(tensor)
        made.name = names.setdefault(tensor.name, f"{number}/{tensor.name}")
    for node in graph.node:
        _rename(joined.node.add(), node, names, number)


def _rename(made: NodeProto, node: NodeProto, names: dict[str, str], number: int) -> None:
    made.CopyFrom(node)
    made.name = f"{number}/{node.name}"
    for side, given in ((made.input, node.input), (made.output, node.output)):
        side[:] = [names.setdefault(name, f"{number}/{name}") for name in given]
