"""How alike local models see the same samples: SVCCA of every layer's outputs between the devices of a round.

Where devices keep parts of the model, a round's models are compared as they are after the synchronisation before it, as
EmbracingFL does; where everything is synchronised they would be one, and are compared after the local steps.

A worker decomposes the outputs of each model it has trained and leaves the directions in the run's folder (outputs.py);
the main process compares all pairs, here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from simulation.svcca import most_similar

FOLDER = "svcca"


def compare(folder: Path) -> dict[str, float]:
    """By layer the largest similarity of any two models."""
    models = [np.load(path) for path in sorted((folder / FOLDER).glob("*.npz"))]
    names = models[0].files if len(models) > 1 else []
    found = {name: most_similar([model[name] for model in models]) for name in names}
    for model in models:
        model.close()
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return found
