"""What is measured: a bundle as it lies there, or a model that is exported to a temporary directory first.

PyTorch is loaded only for the latter: a device measures bundles with what a device has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from edge_runtime.bundle_files import read_manifest
from edge_runtime.device_bench import ALL, places
from edge_runtime.engine.choose import EngineName, choose_engine
from edge_runtime.engine.ort_training import is_available
from federation.benchmark import tiers_of
from federation.errors import InputError, MissingPackage
from federation.manifest import MANIFEST_NAME, Boundary, Manifest

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """A bundle and the engines that can train it here."""

    directory: Path
    manifest: Manifest
    engines: tuple[EngineName, ...]

    def places(self, boundaries: str) -> list[tuple[Boundary, list[str]]]:
        """Boundaries to measure, input side first, each with its tiers: NAME,… or 'tiers' or 'all'."""
        return [(b, list(tiers_of(self.manifest, b.name))) for b in places(self.manifest, boundaries)]

    def engines_at(self, boundary: Boundary) -> list[EngineName]:
        """Those that have a graph for this boundary."""
        return [engine for engine in self.engines if has_graph(boundary, engine)]


def has_graph(boundary: Boundary, engine: EngineName) -> bool:
    return bool(boundary.train if engine == "portable" else boundary.ort_training)


def is_bundle(reference: str) -> bool:
    """Tell whether a reference is a directory with a bundle, or is written like a path to one."""
    path = Path(reference)
    return (path / MANIFEST_NAME).is_file() or (path.is_dir() and os.sep in reference)


def open_subject(
    reference: str,
    engine: str,
    folder: Path,
    *,
    boundaries: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> Subject:
    """The bundle that a reference names, or one exported to `folder`: all boundaries, or only the whole model."""
    engines = _wanted(engine)
    if is_bundle(reference):
        manifest = read_manifest(Path(reference))
        return Subject(Path(reference), manifest, _served(manifest, engines, engine))
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    source = load_source(reference)
    directory = folder / source.name
    choices = Choices(tiers=None if boundaries else {}, engines=engines)
    manifest = export_bundle(source, directory, choices, progress)
    return Subject(directory, manifest, _served(manifest, engines, engine))


def _wanted(engine: str) -> tuple[EngineName, ...]:
    known: Sequence[EngineName] = get_args(EngineName)
    if engine == ALL:
        return tuple(name for name in known if name == "portable" or is_available())
    for name in known:
        if name == engine:
            if name == "ort-training" and not is_available():
                raise MissingPackage("onnxruntime-training-cpu", "ort-training")
            return (name,)
    raise InputError(f"no engine is called {engine!r}: expected {', '.join(known)} or {ALL}")


def _served(manifest: Manifest, engines: Sequence[EngineName], asked: str) -> tuple[EngineName, ...]:
    """Engines with a graph somewhere in the bundle; one that was asked for by name must have it."""
    if asked != ALL:
        choose_engine(manifest.boundaries[0], asked)
    return tuple(e for e in engines if any(has_graph(boundary, e) for boundary in manifest.boundaries))
