"""The synthetic model of `embrace bench server`: random weights, graphs that are never run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

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

LAYERS = 8
SEED = 1


def vectors(parameters: int) -> tuple[Vector, Vector]:
    """(weights, update); the same everywhere."""
    chance = np.random.default_rng(SEED)
    weights = chance.standard_normal(parameters, np.float32)
    return weights, 0.01 * chance.standard_normal(parameters, np.float32)


def write_bundle(directory: Path, weights: Vector) -> Manifest:
    """Write a bundle of as many parameters in a few dense layers; its graphs are placeholders."""
    directory.mkdir(parents=True)
    one = TensorSpec("float32", (1,))

    def graph(name: str) -> FileRef:
        (directory / name).write_text(f"{name}: never run")
        return file_ref(directory, name)

    edges = np.linspace(0, weights.size, min(LAYERS, weights.size) + 1).astype(int)
    layers = tuple(
        Layer(f"dense{k}", one, one, _parameters(k, int(size)), 1, int(size), 0, graph(f"dense{k}.onnx"))
        for k, size in enumerate(np.diff(edges))
    )
    boundary = Boundary("dense0", 0, None, len(layers), graph("train.onnx"), ())
    missing = FileRef(WEIGHTS_NAME, "0" * 64, 0)
    manifest = Manifest(
        1,
        "bench",
        Source("onnx", "none"),
        17,
        Loss("mse"),
        one,
        one,
        one,
        None,
        1,
        False,
        layers,
        (boundary,),
        {"strong": "dense0"},
        missing,
    )
    write_weights(directory / WEIGHTS_NAME, manifest.space, weights)
    manifest = replace(manifest, weights=file_ref(directory, WEIGHTS_NAME))
    (directory / MANIFEST_NAME).write_text(dumps(manifest))
    return manifest


def _parameters(layer: int, size: int) -> tuple[Parameter, ...]:
    """A weight and a bias."""
    bias = size // 100
    shapes = {"weight": (size - bias,), "bias": (bias,)} if bias else {"weight": (size,)}
    return tuple(Parameter(f"dense{layer}.{name}", "weight", shape) for name, shape in shapes.items())
