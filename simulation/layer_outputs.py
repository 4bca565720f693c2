"""The worker's half of similarity.py: the main directions of what every layer of a local model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from federation.manifest import Manifest
from federation.space import Vector
from simulation.similarity import FOLDER
from simulation.svcca import main_directions
from simulation.torch_engine import connect_frozen, infer
from simulation.torch_model import build_module, front_module

SAMPLES = 64  # that all models see


class Outputs:
    """Of the models of one process."""

    def __init__(self, bundle: Path, manifest: Manifest, probe: NDArray[Any], folder: Path) -> None:
        self._manifest = manifest
        self._probe = probe[:SAMPLES]
        self._folder = folder / FOLDER
        ends = range(1, len(manifest.layers))
        fronts = [front_module(bundle, manifest, end) for end in ends]
        self._modules: list[nn.Module] = [*fronts, build_module(manifest)]

    def look(self, slot: int, weights: Vector) -> None:
        """Keep what there is to compare of one model."""
        found = {}
        for layer, module in zip(self._manifest.layers, self._modules, strict=True):
            outputs = infer(connect_frozen(module, self._manifest.space, weights), self._probe)
            found[layer.name] = main_directions(outputs if outputs.ndim > 1 else outputs[:, None])
        self._folder.mkdir(exist_ok=True)
        np.savez(self._folder / f"{slot}.npz", **found)
