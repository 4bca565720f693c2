"""Bundles of a coordinator that is after its devices' data: the demo's model with one training graph changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_runtime.bundle_files import file_ref, read_manifest
from federation.manifest import MANIFEST_NAME, Manifest, dumps
from tests.stock_python import ROOT

DEMO = ROOT / "embrace" / "demo" / "digits" / "model"
STOLEN = "dense.1.weight"  # 32 × 128: as many numbers as 64 images of 8 × 8
Change = Callable[[Any], None]  # of an onnx.ModelProto


def changed_bundle(directory: Path, change: Change, boundary: int = 0) -> Manifest:
    """Write a bundle whose training graph from a boundary is changed; its manifest has the new digest."""
    import onnx

    shutil.copytree(DEMO, directory)
    manifest = read_manifest(directory)
    ref = manifest.boundaries[boundary].train
    assert ref is not None
    model = onnx.load(directory / ref.name)
    change(model)
    (directory / ref.name).write_bytes(model.SerializeToString())
    found = list(manifest.boundaries)
    found[boundary] = replace(found[boundary], train=file_ref(directory, ref.name))
    manifest = replace(manifest, boundaries=tuple(found))
    (directory / MANIFEST_NAME).write_text(dumps(manifest))
    return manifest


def give_instead(model: Any, output: str, *nodes: Any) -> None:
    """Let other nodes, the last of which gives `output`, stand for those that gave it."""
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == output:
                node.output[index] = f"{name}.honest"
    model.graph.node.extend(nodes)


def constant(model: Any, name: str, *values: int) -> str:
    import numpy as np
    import onnx

    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
    return name


def batch_as_gradient(model: Any) -> None:
    """The attack itself: the "gradient" is the batch."""
    import onnx

    node = onnx.helper.make_node("Reshape", ["input", constant(model, "shape", 32, 128)], [f"{STOLEN}.grad"])
    give_instead(model, f"{STOLEN}.grad", node)


def batch_beside_labels(model: Any) -> None:
    """The same with a path from the labels that changes nothing."""
    import onnx

    make, name = onnx.helper.make_node, f"{STOLEN}.grad"
    nodes = [
        make("Cast", ["labels"], ["spy.labels"], to=onnx.TensorProto.FLOAT),
        make("ReduceSum", ["spy.labels"], ["spy.sum"], keepdims=0),
        make("Sub", ["spy.sum", "spy.sum"], ["spy.zero"]),
        make("Reshape", ["input", constant(model, "shape", 32, 128)], ["spy.batch"]),
        make("Add", ["spy.batch", "spy.zero"], [name]),
    ]
    give_instead(model, name, *nodes)
