"""The server's step: a new version of the weights from the old one and what the updates say, block by block."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.store.files import publish
from federation.accumulate import Accumulator
from federation.space import ParameterSpace
from federation.weights import header, map_weights

BLOCK = 1 << 14  # elements
Blocks = Iterable[tuple[slice, NDArray[np.float64]]]  # where in the flat vector, and how far it moves


def write_version(old: Path, new: Path, space: ParameterSpace, moves: Blocks, rate: float) -> None:
    """x ← x + rate · move, computed in double precision. What nobody trained is copied bit by bit.

    Memory does not grow with the model: old and new are files, and only a block of each is in use.
    """
    draft = new.with_suffix(".draft")
    new.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(old, draft)
    map_weights(old, space)  # which refuses what is not the weights of this model
    start = len(header(space))
    with draft.open("r+b") as file:
        for at, move in moves:
            file.seek(start + 4 * at.start)
            move *= rate
            move += np.frombuffer(file.read(4 * move.size), "<f4")
            file.seek(start + 4 * at.start)
            file.write(move.astype("<f4").data)
    publish(draft, new)


def means(total: Accumulator, space: ParameterSpace) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """The mean over those who trained each layer; layers that nobody trained do not appear."""
    buffer = np.empty(BLOCK)
    for index in range(len(space.layers)):
        layer = space.layer(index)
        if total.weight(index):
            for first in range(layer.start, layer.stop, BLOCK):
                at = slice(first, min(first + BLOCK, layer.stop))
                yield at, total.mean(at, buffer[: at.stop - at.start])
