"""The time of one training step, forward and backward without an optimiser, from each boundary.

All engines run in one process, on the same data, with the same number of threads, taking turns (A B C, B C A, …), so
that whatever else the machine does meets all of them alike, and none always finds the caches as another left them.
Ratios are medians over rounds, each round compared with itself.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.ort_training import is_available
from edge_runtime.engine.portable import LayerForward
from edge_runtime.engine.session import RuntimeSettings
from federation.errors import InputError, MissingPackage, VerificationError
from federation.manifest import Boundary, Loss, Manifest
from model_export.bundle import Choices, export_bundle
from model_export.oracle import random_labels, seeded_dropout, short_memory, torch_loss
from model_export.source import ModelSource, load_source

WARM_UP = 3
SEED = 1
TOLERANCE = 1e-4  # before anything is timed, the losses have to agree

Progress = Callable[[str, int, int], None]
Step = Callable[[], float]  # one forward and backward pass; gives the loss


@dataclass
class Timing:
    """Milliseconds of each engine's steps, round by round."""

    boundary: str
    tiers: list[str]
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, engine: str) -> float:
        return statistics.median(self.rounds[engine])

    def minimum(self, engine: str) -> float:
        return min(self.rounds[engine])

    def ratio(self, engine: str, other: str) -> float | None:
        """How many times longer `engine` takes; None if one of them was not timed."""
        if engine not in self.rounds or other not in self.rounds:
            return None
        return statistics.median(a / b for a, b in zip(self.rounds[engine], self.rounds[other], strict=True))


@dataclass
class StepReport:
    """What was timed, how, and what could not be."""

    model: str
    batch: int
    threads: int
    versions: dict[str, str]
    timings: list[Timing]
    notes: list[str]


def bench_step(
    reference: str,
    *,
    batch: int = 32,
    threads: int = 1,
    boundaries: str = "tiers",
    rounds: int = 30,
    progress: Progress = lambda what, done, total: None,
) -> StepReport:
    """Export a model to a temporary directory and time its boundaries: NAME,… or 'tiers' or 'all'."""
    source = load_source(reference)
    notes: list[str] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "bundle"
            manifest = _export(source, directory, boundaries, notes, progress)
            chosen = _chosen(source, manifest, boundaries)
            case = _Case(source, manifest, directory, batch, threads)
            timings = []
            for number, (boundary, tiers) in enumerate(chosen):
                steps = _steps(case, boundary, notes)
                _check_losses(case, boundary, steps)
                timing = Timing(boundary.name, tiers, {name: [] for name in steps})
                for turn in range(-WARM_UP, rounds):
                    progress(boundary.name, number * rounds + max(turn, 0), len(chosen) * rounds)
                    for name, step in _rotated(list(steps.items()), turn):
                        started = time.perf_counter()
                        step()
                        if turn >= 0:
                            timing.rounds[name].append(1e3 * (time.perf_counter() - started))
                timings.append(timing)
    finally:
        torch.set_num_threads(before)
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    return StepReport(source.name, batch, threads, versions, timings, [*manifest.notes, *notes])


def _rotated(items: list[tuple[str, Step]], by: int) -> list[tuple[str, Step]]:
    """Rotate, so that another engine begins in every round."""
    start = by % len(items)
    return items[start:] + items[:start]


def _export(source: ModelSource, directory: Path, boundaries: str, notes: list[str], progress: Progress) -> Manifest:
    engines = ["portable"]
    if is_available():
        engines.append("ort-training")
    else:
        notes.append(f"ort-training: {MissingPackage('onnxruntime-training-cpu', 'ort-training')}")
    splits: Sequence[str] = () if boundaries == "all" else list(_splits(source, boundaries))
    return export_bundle(source, directory, Choices(splits=splits, engines=engines), progress)


def _splits(source: ModelSource, boundaries: str) -> dict[str, list[str]]:
    """Boundaries as `embrace export --split` takes them, with their tiers; '' is the whole model."""
    tiers: dict[str, list[str]] = {}
    for tier, place in source.tiers.items():
        tiers.setdefault(f"{place.boundary}@{place.last_steps}" if place.last_steps else place.boundary, []).append(
            tier
        )
    if boundaries in ("tiers", "all"):
        return tiers
    by_tier = {tier: split for split, names in tiers.items() for tier in names}
    wanted = [by_tier.get(name.strip(), name.strip()) for name in boundaries.split(",") if name.strip()]
    if not wanted:
        raise InputError("--boundaries: expected names separated by commas, 'tiers' or 'all'")
    return {name: tiers.get(name, []) for name in wanted if name != "strong"}


def _chosen(source: ModelSource, manifest: Manifest, boundaries: str) -> list[tuple[Boundary, list[str]]]:
    """The boundaries to time, input side first, each with its tiers."""
    tiers: dict[str, list[str]] = {manifest.boundaries[0].name: ["strong"]}
    splits = _splits(source, boundaries)
    for split, names in splits.items():
        tiers.setdefault(_find(manifest, split).name, []).extend(names)
    named = boundaries not in ("tiers", "all") and "strong" not in boundaries.split(",")
    wanted = {_find(manifest, split).name for split in splits} if named else set(tiers)
    return [(b, tiers.get(b.name, [])) for b in manifest.boundaries if boundaries == "all" or b.name in wanted]


def _find(manifest: Manifest, split: str) -> Boundary:
    """The boundary that a split became: a module's name stands for its first layer, or for the one it lies in."""
    name, _, steps = split.partition("@")
    fitting = [b for b in manifest.boundaries if b.last_steps == (int(steps) if steps else None)]
    plain = {boundary.name.partition("@")[0]: boundary for boundary in fitting}
    inside = (boundary for other, boundary in plain.items() if other.startswith(f"{name}."))
    around = (boundary for other, boundary in plain.items() if name.startswith(f"{other}."))
    return plain.get(name) or next(inside, None) or next(around, None) or manifest.boundary(split)


class _Case:
    """The data of a measurement: one random batch as it arrives at every layer."""

    def __init__(self, source: ModelSource, manifest: Manifest, directory: Path, batch: int, threads: int) -> None:
        self.manifest = manifest
        self.directory = directory
        self.settings = RuntimeSettings(threads)
        self.vector = np.array(map_weights(directory / manifest.weights.name, manifest.space))
        self.labels = random_labels(manifest, batch, SEED)
        self.entering = [source.sample(batch, SEED)]
        for layer in manifest.layers[:-1]:
            self.entering.append(LayerForward(directory / layer.forward.name, self.settings)(self.entering[-1]))
        self.source = source


def _steps(case: _Case, boundary: Boundary, notes: list[str]) -> dict[str, Step]:
    """Each engine that can train from this boundary."""
    steps: dict[str, Step] = {}
    x, labels = case.entering[boundary.layer], case.labels
    suffix = None
    if case.source.build is not None:  # a fresh module each time: a step moves its statistics
        suffix = suffix_module(case.source.module(), case.entering[0], x, boundary.layer)
    if suffix is not None:
        steps["torch"] = TimedTorchStep(suffix, case.manifest.loss, x, labels, boundary.last_steps)
    else:
        notes.append(f"torch: no part of the module starts at {boundary.name}, so PyTorch is not timed there")
    for engine in ("portable", "ort-training") if boundary.ort_training else ("portable",):
        step = open_step(case.directory, case.manifest, boundary, engine, case.settings)
        step.parameters[:] = case.vector[step.suffix]
        steps[engine] = partial(step.run, x, labels, SEED)
    return steps


class TimedTorchStep:
    """PyTorch eager on the trained part alone: its input is the stored activation and needs no gradient."""

    def __init__(
        self,
        suffix: nn.Module,
        loss: Loss,
        x: np.ndarray[Any, Any],
        labels: np.ndarray[Any, Any],
        last_steps: int | None,
    ) -> None:
        self.suffix = suffix.train()
        self.loss = loss
        self.last_steps = last_steps
        self.x = torch.from_numpy(x)
        self.labels = torch.from_numpy(labels)

    def __call__(self) -> float:
        self.suffix.zero_grad(set_to_none=True)
        with short_memory(self.last_steps):
            predictions = self.suffix(self.x)
        value = torch_loss(self.loss, predictions, self.labels)
        value.backward()
        return value.item()


def _check_losses(case: _Case, boundary: Boundary, steps: Mapping[str, Step]) -> None:
    """Check that all engines do the same work: same loss, with the same dropout masks."""
    skipped = sum(layer.dropouts for layer in case.manifest.layers[: boundary.layer])
    losses = {}
    for name, step in steps.items():
        with seeded_dropout(SEED, skip=skipped, count=skipped) if name == "torch" else nullcontext():
            losses[name] = step()
    expected = losses["portable"]
    for name, loss in losses.items():
        if not abs(loss - expected) <= TOLERANCE * max(abs(expected), 1.0):
            raise VerificationError(
                f"boundary {boundary.name}: {name} has the loss {loss:.6f}, portable {expected:.6f}; not timed"
            )


def suffix_module(
    module: nn.Module, x: np.ndarray[Any, Any], activation: np.ndarray[Any, Any], layer: int
) -> nn.Module | None:
    """The part of a module that turns a boundary's activation into predictions; None if no such part is a module.

    The module's children are taken as run one after the other, nested `Sequential`s opened; whether they are, and
    where the boundary lies among them, is decided by running them and looking at the values.
    """
    if layer == 0:
        return module
    pieces = _stages(module)
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            value, found, moving = torch.from_numpy(x), None, True
            for number, piece in enumerate(pieces):
                if found is not None and isinstance(piece, nn.Dropout):
                    moving = False  # does nothing here, but belongs to what follows it
                try:
                    value = piece(value)
                except (RuntimeError, TypeError, ValueError):  # the children do not run in this order
                    return None
                if moving and _same(value, activation):
                    found = number + 1  # the last one: reshaping in between changes nothing
            if found is None or not _same(value, module(torch.from_numpy(x)).numpy()):
                return None
    finally:
        module.train(training)
    return nn.Sequential(*pieces[found:])


def _stages(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += _stages(child) if isinstance(child, nn.Sequential) else [child]
    return found


def _same(value: Any, expected: np.ndarray[Any, Any]) -> bool:
    """Compare two samples: equal but for rounding and shape."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected.shape:
        return False
    return bool(np.abs(value.numpy() - expected).max() <= 1e-3 * max(float(np.abs(expected).max()), 1e-6))
