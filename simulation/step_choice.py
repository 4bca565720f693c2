"""Choose what computes a training step of a simulation: PyTorch, the graph that devices run, or both.

Behind frozen layers maps are small and channels many, and the graphs' matrix products are quicker than PyTorch's
convolutions. Processor time of a step, PyTorch and graph, the best of ten in turns, batch 32, one thread:

    ResNet20        moderate 59.0  51.6   weak 28.1  20.2 ms    the whole model 102.5  108.5
    ResNet8         moderate 20.5  19.2   weak  9.2   6.6                        37.5   41.3
    FEMNIST's CNN   moderate 13.7  10.8   weak  0.43  0.25                       43.6   41.0
    MobileNetV2     moderate 80.9  83.1   weak 30.2  25.7                       166.0  221.4

So boundaries behind the first layer of a convolutional network get the graph, but for convolutions by groups, as
MobileNetV2's. Where training begins with the first layer, PyTorch computes the wide maps near the input, and a graph
the layers behind them. The bundle alone decides it, never a trial: a result is the same on any processor, but for
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto

from federation.manifest import Boundary, Layer, Manifest

# Convolutions that a graph computes quicker also behind layers that PyTorch trains. A graph of ResNet20's layers of 64
# channels saves a twentieth of a step, with the last one of 32 before them less.
LEAST_CHANNELS, LARGEST_MAP = 64, 16 * 16


def suits_portable(directory: Path, manifest: Manifest, boundary: Boundary) -> bool:
    """Say whether the graph of a boundary is quicker than PyTorch."""
    if boundary.layer == 0 or boundary.train is None or boundary.head is not None:
        return False
    return _has_dense_convolutions(directory, manifest.layers)


def find_tail(directory: Path, manifest: Manifest, boundary: Boundary) -> int | None:
    """Find the layer from which a graph is quicker, where PyTorch trains those in front of it; None: there is none."""
    if not boundary.whole or manifest.uses_seed or not _has_dense_convolutions(directory, manifest.layers):
        return None
    first = len(manifest.layers)
    while first > 0 and _suits_tail(directory, manifest.layers[first - 1]):
        first -= 1
    return first if first > 0 and _convolutions(directory, manifest.layers[first:]) else None


def _suits_tail(directory: Path, layer: Layer) -> bool:
    """Say whether maps are small and channels many; layers that need more than their own weights are PyTorch's."""
    if layer.borrowed or layer.stored or layer.packed:
        return False
    small = len(layer.input.shape) < 3 or math.prod(layer.input.shape[1:]) <= LARGEST_MAP
    return small and all(features >= LEAST_CHANNELS for features in _convolutions(directory, [layer]))


def _has_dense_convolutions(directory: Path, layers: Iterable[Layer]) -> bool:
    """Say whether there are convolutions, and none by groups."""
    convolutions = [node for graph in _graphs(directory, layers) for node in graph.node if node.op_type == "Conv"]
    return bool(convolutions) and not any(_groups(node) > 1 for node in convolutions)


def _convolutions(directory: Path, layers: Iterable[Layer]) -> list[int]:
    """List how many channels each convolution gives."""
    return [
        sizes[node.input[1]]
        for graph in _graphs(directory, layers)
        for sizes in [{tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}]
        for node in graph.node
        if node.op_type == "Conv"
    ]


def _graphs(directory: Path, layers: Iterable[Layer]) -> list[GraphProto]:
    return [onnx.load(str(directory / layer.forward.name), load_external_data=False).graph for layer in layers]


def _groups(node: NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
