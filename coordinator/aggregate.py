"""The server's step: a new version of the weights from the old one and the mean of the updates, block by block."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from coordinator.store.files import publish
from federation.accumulate import Accumulator
from federation.space import ParameterSpace
from federation.weights import header, map_weights

BLOCK = 1 << 18  # elements


def write_version(old: Path, new: Path, space: ParameterSpace, total: Accumulator, rate: float) -> None:
    """x ← x + rate · mean, computed in double precision. What nobody trained is copied bit by bit.

    Memory does not grow with the model: old and new are files, and only a block of each is in use.
    """
    draft = new.with_suffix(".draft")
    new.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(old, draft)
    before = map_weights(old, space)
    start = len(header(space))
    moved = np.empty(BLOCK)
    with draft.open("r+b") as file:
        for index in range(len(space.layers)):
            if not total.weight(index):
                continue
            layer = space.layer(index)
            for first in range(layer.start, layer.stop, BLOCK):
                at = slice(first, min(first + BLOCK, layer.stop))
                mean = total.mean(at, moved[: at.stop - at.start])
                mean *= rate
                mean += before[at]
                file.seek(start + 4 * at.start)
                file.write(mean.astype("<f4").data)
    publish(draft, new)
