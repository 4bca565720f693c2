"""SVCCA: how alike two layers represent the same samples (Raghu et al., NeurIPS 2017), as EmbracingFL measures it.

Of each matrix of activations, samples × neurons and centred, the four left singular vectors with the largest singular
values are kept; the similarity is the mean of the canonical correlations between the two sets. It is 1 if both span
the same space, whatever the neurons' order, scale or rotation. Singular vectors are orthonormal, so the correlations
are the cosines of the angles between the two spaces: the singular values of U₁ᵀU₂.

In a simulation all local models of a round are compared on the same samples. Where devices keep parts of the model,
they are compared as they are after the synchronisation before the round, as EmbracingFL does; where everything is
synchronised they would be one, and are compared after the local steps. A worker decomposes the outputs of each model it
trains (layer_outputs.py) and leaves the directions in the run's folder; the process that drives the run compares them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array
from federation.errors import InputError

Floats = NDArray[np.float64]
DIRECTIONS = 4
FOLDER = "svcca"  # in a run's folder
_NOTHING = 1e-10  # of the largest singular value: a direction that is only rounding


def as_matrix(activations: Array) -> Floats:
    """Reshape to samples × neurons: a channel is a neuron, and every place of an image or step of a text a sample."""
    if activations.ndim == 4:  # samples, channels, height, width
        return np.asarray(np.moveaxis(activations, 1, -1).reshape(-1, activations.shape[1]), np.float64)
    if activations.ndim == 3:  # samples, steps, features
        return np.asarray(activations.reshape(-1, activations.shape[2]), np.float64)
    if activations.ndim != 2:
        raise InputError(f"expected activations with 2, 3 or 4 axes, got {activations.shape}")
    return np.asarray(activations, np.float64)


def main_directions(activations: Array, count: int = DIRECTIONS) -> Floats:
    """Return the top left singular vectors of the centred matrix, samples × `count`; fewer if its rank is lower."""
    matrix = as_matrix(activations)
    if count < 1 or len(matrix) < 2:
        raise InputError(f"expected at least 1 direction of at least 2 samples, got {count} of {len(matrix)}")
    if not np.isfinite(matrix).all():
        raise InputError("expected finite activations")
    left, values, _ = np.linalg.svd(matrix - matrix.mean(0), full_matrices=False)
    # Relative to the values before centring, too: what is constant but for rounding has no direction.
    size = max(float(values[0]), float(np.linalg.norm(matrix)))
    rank = int((values > _NOTHING * size).sum())
    return np.ascontiguousarray(left[:, : min(count, rank)])


def canonical_correlations(first: Floats, second: Floats) -> Floats:
    """Correlate two sets of orthonormal vectors over the same samples; the largest comes first."""
    return np.clip(np.linalg.svd(first.T @ second, compute_uv=False), 0.0, 1.0)


def svcca(first: Array, second: Array, count: int = DIRECTIONS) -> float:
    """Compare two layers' activations on the same samples, from 0 to 1.

    A layer that gives the same for every sample has no directions: it is like another such layer (1), else like none.
    """
    return _mean(main_directions(first, count), main_directions(second, count))


def svcca_of_batches(first: Sequence[Array], second: Sequence[Array], count: int = DIRECTIONS) -> float:
    """Average over batches, each decomposed on its own: the decomposition of all samples at once needs much memory."""
    if not first or len(first) != len(second):
        raise InputError(f"expected equally many batches of both, got {len(first)} and {len(second)}")
    return float(np.mean([svcca(left, right, count) for left, right in zip(first, second)]))


def pairwise(directions: Sequence[Floats]) -> Floats:
    """Compare all devices, devices × devices.

    `directions` are `main_directions` of each device's layer, so that each is decomposed once.
    """
    similar = np.eye(len(directions))
    for row, first in enumerate(directions):
        for column, second in enumerate(directions[:row]):
            similar[row, column] = similar[column, row] = _mean(first, second)
    return similar


def most_similar(directions: Sequence[Floats]) -> float:
    """Return the largest similarity of any two devices, which the paper's figures show."""
    if len(directions) < 2:
        raise InputError(f"expected at least two devices, got {len(directions)}")
    return float(pairwise(directions)[np.tril_indices(len(directions), -1)].max())


def save_directions(run: Path, slot: int, found: Mapping[str, Floats]) -> None:
    """Leave the directions of one model's layers in a run's folder."""
    (run / FOLDER).mkdir(exist_ok=True)
    with (run / FOLDER / f"{slot}.npz").open("wb") as file:
        np.savez(file, **dict[str, Any](found))


def compare_saved(run: Path) -> dict[str, float]:
    """Return by layer the largest similarity of any two models whose directions were saved, and remove them."""
    models = [np.load(path) for path in sorted((run / FOLDER).glob("*.npz"))]
    names = models[0].files if len(models) > 1 else []
    found = {name: most_similar([model[name] for model in models]) for name in names}
    for model in models:
        model.close()
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    return found


def _mean(first: Floats, second: Floats) -> float:
    if len(first) != len(second):
        raise InputError(f"expected activations of the same samples, got {len(first)} and {len(second)}")
    if not first.shape[1] or not second.shape[1]:
        return float(first.shape[1] == second.shape[1])
    return float(canonical_correlations(first, second).mean())
