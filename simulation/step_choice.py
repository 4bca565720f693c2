"""Choose what computes a training step of a simulation: PyTorch, or the graph that devices run.

Behind frozen layers maps are small and channels many, and the graphs' matrix products are quicker than PyTorch's
convolutions. Processor time of a step, PyTorch and graph, the best of ten in turns, batch 32, one thread:

    ResNet20        moderate 59.0  51.6   weak 28.1  20.2 ms    the whole model 102.5  108.5
    ResNet8         moderate 20.5  19.2   weak  9.2   6.6                        37.5   41.3
    FEMNIST's CNN   moderate 13.7  10.8   weak  0.43  0.25                       43.6   41.0
    MobileNetV2     moderate 80.9  83.1   weak 30.2  25.7                       166.0  221.4

So boundaries behind the first layer of a convolutional network get the graph, but for convolutions by groups, as
MobileNetV2's. The bundle alone decides it, never a trial: a result is the same on any processor, but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import NodeProto

from federation.manifest import Boundary, Layer, Manifest


def suits_portable(directory: Path, manifest: Manifest, boundary: Boundary) -> bool:
    """Say whether the graph of a boundary is quicker than PyTorch."""
    if boundary.layer == 0 or boundary.train is None or boundary.head is not None:
        return False
    convolutions = [node for node in _nodes(directory, manifest.layers) if node.op_type == "Conv"]
    return bool(convolutions) and not any(_groups(node) > 1 for node in convolutions)


def _nodes(directory: Path, layers: Iterable[Layer]) -> list[NodeProto]:
    models = [onnx.load(str(directory / layer.forward.name), load_external_data=False) for layer in layers]
    return [node for model in models for node in model.graph.node]


def _groups(node: NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
