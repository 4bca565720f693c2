"""Sizes that the process which hands out jobs has to know; without torch, which only the workers need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from bench.simulate.pool import Layout
from federation.manifest import Manifest

T = TypeVar("T")
GROUP = 16  # devices that are handed out together; small models are trained so, whatever the number of processes


def layouts(
    manifest: Manifest, inputs: NDArray[Any], labels: NDArray[Any], devices: int
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """(what is shared, a slot) of worker.py for a data set and a number of devices."""
    size = manifest.space.size
    shared = {
        "global": Layout((size,)),
        "inputs": Layout(inputs.shape, str(inputs.dtype)),
        "labels": Layout(labels.shape, str(labels.dtype)),
        "starts": Layout((devices + 1,), "int64"),
    }
    return shared, {"updates": Layout((GROUP, size))}


def in_groups(cohort: Sequence[T], size: int = GROUP) -> list[list[T]]:
    """Consecutive devices of a cohort: the same groups whatever the number of processes."""
    return [list(cohort[start : start + size]) for start in range(0, len(cohort), size)]
