"""Sizes that the process which hands out jobs has to know; without torch, which only the workers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from federation.manifest import Manifest
from simulation.pool import Layout


def layouts(
    manifest: Manifest, arrays: Mapping[str, NDArray[Any]], vectors: int, tracks: int
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """(what is shared, a slot) of fleet_work.py."""
    size = manifest.space.size
    shared = {name: Layout(array.shape, str(array.dtype)) for name, array in arrays.items()}
    return {"vectors": Layout((vectors, size)), **shared}, {"sums": Layout((tracks, size), "int64")}
