"""Decompose what every layer of a local model gives: a worker's half of the comparison in svcca.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from federation.manifest import Manifest
from federation.space import Vector
from simulation.svcca import main_directions, save_directions
from simulation.torch_engine import aligned, connect_frozen, infer
from simulation.torch_model import build_module, front_module


class LayerOutputs:
    """Looks at the models of one process."""

    def __init__(self, bundle: Path, manifest: Manifest, probe: NDArray[Any], folder: Path) -> None:
        """`probe` are samples that all models see, `folder` is the run's."""
        self._manifest = manifest
        self._probe = probe
        self._folder = folder
        fronts = [front_module(bundle, manifest, end) for end in range(1, len(manifest.layers))]
        self._modules: list[nn.Module] = [*fronts, build_module(manifest)]

    def look(self, slot: int, weights: Vector) -> None:
        """Save the main directions of one model's layers."""
        found, own = {}, aligned(weights).numpy()
        for layer, module in zip(self._manifest.layers, self._modules, strict=True):
            outputs = infer(connect_frozen(module, self._manifest.space, own), self._probe)
            found[layer.name] = main_directions(outputs if outputs.ndim > 1 else outputs[:, None])
        save_directions(self._folder, slot, found)
