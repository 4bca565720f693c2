"""Which engine trains from a boundary."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from edge_runtime.engine.ort_training import OrtTrainingStep, is_available
from edge_runtime.engine.portable import TrainingStep
from edge_runtime.engine.session import RuntimeSettings
from federation.errors import InputError, MissingPackage
from federation.manifest import Boundary, Manifest

EngineName = Literal["portable", "ort-training"]
Step = TrainingStep | OrtTrainingStep


def check_engine(wanted: str) -> None:
    if wanted not in ("auto", *get_args(EngineName)):
        raise InputError(f"no engine is called {wanted!r}: expected auto, portable or ort-training")


def engines_of(wanted: str) -> tuple[str, ...]:
    """List the engines that this device has, or the one that is asked for."""
    if wanted != "auto":
        return (wanted,)
    return ("portable", "ort-training") if is_available() else ("portable",)


def choose_engine(boundary: Boundary, wanted: str = "auto") -> EngineName:
    """Choose the engine asked for, or the portable one where the bundle has its graph, else onnxruntime-training."""
    check_engine(wanted)
    if boundary.train and wanted in ("auto", "portable"):
        return "portable"
    if boundary.ort_training and wanted in ("auto", "ort-training"):
        if not is_available():
            raise MissingPackage("onnxruntime-training-cpu", "ort-training")
        return "ort-training"
    known = [name for name, has in (("portable", boundary.train), ("ort-training", boundary.ort_training)) if has]
    raise InputError(
        f"boundary {boundary.name!r} has no graph for the engine {wanted!r}, only for {', '.join(known) or 'none'}; "
        f"export the bundle again with --engine"
    )


def open_step(
    directory: Path,
    manifest: Manifest,
    boundary: Boundary,
    engine: EngineName = "portable",
    settings: RuntimeSettings | None = None,
    *,
    trace: Path | None = None,
) -> Step:
    """Open the training step of a boundary of a bundle directory."""
    space = boundary.space(manifest)
    if engine == "ort-training":
        artifacts = directory / Path(boundary.ort_training[0].name).parent
        return OrtTrainingStep(artifacts, space, boundary.layer, settings, trace=trace)
    if boundary.train is None:
        raise InputError(f"boundary {boundary.name!r} has no graph for the portable engine")
    return TrainingStep(directory / boundary.train.name, space, boundary.layer, settings, trace=trace)
