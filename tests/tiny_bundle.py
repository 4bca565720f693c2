"""Small models for tests that run no graph: manifests in memory, and bundles on disk with placeholders for graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_runtime.bundle_files import file_ref, write_weights
from federation.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Boundary,
    FileRef,
    Layer,
    Loss,
    Manifest,
    Source,
    TensorSpec,
    dumps,
)
from federation.space import Parameter, Vector

SPEC = TensorSpec("float32", (1,))
FILE = FileRef("file", "0" * 64, 1)


def weight(name: str, *shape: int) -> Parameter:
    return Parameter(name, "weight", shape)


def statistic(name: str, *shape: int) -> Parameter:
    return Parameter(name, "statistic", shape)


def layer(name: str, *parameters: Parameter, activations: int = 1, macs: int = 1, **more: Any) -> Layer:
    """Make a layer that turns one number into one number; `more` are other fields."""
    fields = {"input": SPEC, "output": SPEC, "dropouts": 0, "forward": FILE, **more}
    return Layer(name, parameters=parameters, activations=activations, macs=macs, **fields)


def boundary(name: str, at: int, activations: int = 1, **more: Any) -> Boundary:
    """Make a boundary that the portable engine can train; `more` are other fields."""
    fields = {"last_steps": None, "train": FILE, "ort_training": (), **more}
    return Boundary(name, at, activations=activations, **fields)


def manifest(
    layers: Sequence[Layer], boundaries: Sequence[Boundary] = (), tiers: Mapping[str, str] | None = None, **more: Any
) -> Manifest:
    """Make a manifest of these layers; `more` are other fields."""
    fields: dict[str, Any] = {
        "version": 1,
        "name": "tiny",
        "source": Source("zoo", "tiny"),
        "opset": 18,
        "loss": Loss("mse"),
        "input": layers[0].input,
        "labels": SPEC,
        "output": layers[-1].output,
        "vocabulary": None,
        "batch": 2,
        "uses_seed": False,
        "weights": FILE,
        **more,
    }
    return Manifest(layers=tuple(layers), boundaries=tuple(boundaries), tiers=dict(tiers or {}), **fields)


def write_bundle(directory: Path, made: Manifest, weights: Vector, note: str = "") -> Manifest:
    """Write manifest, weights, and placeholders LAYER.onnx and train.BOUNDARY.onnx, which end in `note`."""
    directory.mkdir(parents=True)

    def graph(name: str) -> FileRef:
        (directory / name).write_text(f"graph {name}{note}")
        return file_ref(directory, name)

    write_weights(directory / WEIGHTS_NAME, made.space, weights)
    made = replace(
        made,
        layers=tuple(replace(one, forward=graph(f"{one.name}.onnx")) for one in made.layers),
        boundaries=tuple(replace(one, train=graph(f"train.{one.name}.onnx")) for one in made.boundaries),
        weights=file_ref(directory, WEIGHTS_NAME),
    )
    (directory / MANIFEST_NAME).write_text(dumps(made))
    return made
