"""Layer sources: where frozen layers come from, one at a time.

A layer is a graph whose weights lie in `weights.safetensors` beside it, each at its own offset. So a source needs no
more than a directory in which that file has the bytes of the layers in use; the rest of it may be a hole.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from edge_runtime.bundle_files import map_weights
from edge_runtime.files import link_file
from federation.errors import BundleError
from federation.manifest import Boundary, FileRef, Layer, Manifest
from federation.space import Vector
from federation.weights import header


class LayerSource(Protocol):
    """Gives layers to run. What is fetched lies on disk; loading it is the caller's business."""

    manifest: Manifest
    lineage: str  # the training that the weights come from: of another one, nothing is of use however recent it is
    version: str  # of the weights: what was computed with one version is not valid for another

    def fetch_weights(self, layers: range) -> None:
        """Get the weights of consecutive layers at once, where they have to be fetched."""

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        """Return the path of a layer's graph, ready to load; block until everything it needs is there.

        `measuring`: of the graph that also measures what enters batch norms, if there is one.
        """

    def fetch_head(self, boundary: Boundary) -> Path:
        """Return the path of the graph of a boundary's head likewise; its weights are trained, so they stay."""

    def fetch_step(self, boundary: Boundary) -> tuple[Path, Vector]:
        """Return a directory with the training graphs of a boundary, and the weights from there on."""

    def release(self, layer: int) -> None:
        """Forget a layer that is not needed any more."""


def head_of(boundary: Boundary) -> Layer:
    """Return the head of a boundary that has one."""
    if boundary.head is None:
        raise ValueError(f"boundary {boundary.name!r} has no head")
    return boundary.head


class BundleSource:
    """Layers of a bundle directory, used where they lie."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.lineage = self.version = manifest.weights.sha256

    def fetch_weights(self, layers: range) -> None:
        pass

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        return self._checked(self.manifest.layers[layer].graph(measuring))

    def fetch_head(self, boundary: Boundary) -> Path:
        return self._checked(head_of(boundary).forward)

    def fetch_step(self, boundary: Boundary) -> tuple[Path, Vector]:
        weights = map_weights(self.directory / self.manifest.weights.name, self.manifest.space)
        return self.directory, weights[self.manifest.space.suffix(boundary.layer)]

    def _checked(self, graph: FileRef) -> Path:
        weights, frozen = self.manifest.weights, self.manifest.stored
        for file in (graph, weights, *([frozen] if frozen else [])):
            path = self.directory / file.name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise BundleError(f"{path} is missing or not {file.bytes} bytes long; export the bundle again")
        return self.directory / graph.name

    def release(self, layer: int) -> None:
        pass


class TrainedSource:
    """The layers of a bundle from one on, with other weights: what a device has just trained.

    Their graphs are copied beside a weights file that has only their bytes; in front of those it is a hole.
    """

    def __init__(self, directory: Path, manifest: Manifest, first_layer: int, weights: Vector, work: Path) -> None:
        self.manifest = manifest
        self.lineage = self.version = "trained"
        self._bundle = directory
        self._work = work
        self._first = manifest.space.suffix(first_layer).start
        self._trained = weights
        if manifest.stored is not None and not (work / manifest.stored.name).exists():
            link_file(directory / manifest.stored.name, work / manifest.stored.name)
        self._weights = work / manifest.weights.name
        with self._weights.open("wb") as file:
            self._write(file, self._first, weights)

    def add(self, layers: Sequence[int]) -> None:
        """Put weights of the bundle beside: of layers in front that borrow some of the trained ones."""
        whole = map_weights(self._bundle / self.manifest.weights.name, self.manifest.space)
        with self._weights.open("r+b") as file:
            for layer in layers:
                start, stop = (self.manifest.space.suffix(place).start for place in (layer, layer + 1))
                self._write(file, start, whole[start:stop])

    def _write(self, file: BinaryIO, start: int, weights: Vector) -> None:
        file.seek(len(header(self.manifest.space)) + 4 * start)
        file.write(np.ascontiguousarray(weights, "<f4").data)

    def fetch_weights(self, layers: range) -> None:
        pass

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        return Path(shutil.copy(self._bundle / self.manifest.layers[layer].graph(measuring).name, self._work))

    def fetch_head(self, boundary: Boundary) -> Path:
        return Path(shutil.copy(self._bundle / head_of(boundary).forward.name, self._work))

    def fetch_step(self, boundary: Boundary) -> tuple[Path, Vector]:
        return self._bundle, self._trained[self.manifest.space.suffix(boundary.layer).start - self._first :]

    def release(self, layer: int) -> None:
        for measuring in (False, True):
            (self._work / self.manifest.layers[layer].graph(measuring).name).unlink(missing_ok=True)
