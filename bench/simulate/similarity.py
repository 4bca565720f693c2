"""How alike local models see the same samples: SVCCA of every layer's outputs between the devices of a round.

Where devices keep parts of the model, a round's models are compared as they are after the synchronisation before it, as
EmbracingFL does; where everything is synchronised they would be one, and are compared after the local steps.

A worker decomposes the outputs of each model it has trained and leaves the directions in the run's folder; the main
process compares all pairs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from bench.simulate.torch_engine import connect_frozen, infer
from bench.simulate.torch_model import build_module, front_module
from bench.svcca import main_directions, most_similar
from federation.manifest import Manifest
from federation.space import Vector

FOLDER = "svcca"
SAMPLES = 64  # that all models see


class Similarity:
    """The worker's half."""

    def __init__(self, bundle: Path, manifest: Manifest, probe: NDArray[Any], folder: Path) -> None:
        self._manifest, self._probe, self._folder = manifest, probe[:SAMPLES], folder / FOLDER
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


def compare(folder: Path) -> dict[str, float]:
    """The main process's half: by layer the largest similarity of any two models."""
    models = [np.load(path) for path in sorted((folder / FOLDER).glob("*.npz"))]
    names = models[0].files if len(models) > 1 else []
    found = {name: most_similar([model[name] for model in models]) for name in names}
    for model in models:
        model.close()
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return found
