"""PyTorch beside the engines of devices, eager, channels-last and compiled: the trained part of a module, alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.device.entering import Entering
from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.ort_training import is_available
from federation.errors import InputError, MissingPackage
from federation.manifest import Boundary, Loss, Manifest
from model_export.bundle import Choices, Progress, export_bundle
from model_export.oracle import seeded_dropout, torch_loss
from model_export.short_memory import HeadLayout, short_memory
from model_export.source import ModelSource, load_source
from model_export.verify import rebuild_source

EAGER, CHANNELS_LAST, COMPILED = "torch", "channels-last", "compile"  # kinds of PyTorch


def can_compile() -> bool:
    """Tell whether torch.compile has the C++ compiler that it needs."""
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))


class TimedTorchStep:
    """The trained part alone: its input is the stored activation and needs no gradient."""

    def __init__(
        self,
        suffix: nn.Module,
        loss: Loss,
        x: np.ndarray[Any, Any],
        labels: np.ndarray[Any, Any],
        boundary: Boundary,
    ) -> None:
        self.suffix = suffix.train()
        self.loss = loss
        self.last_steps = boundary.last_steps
        self.layout = HeadLayout(suffix, boundary) if boundary.head else None
        self.x = torch.from_numpy(x)
        self.labels = torch.from_numpy(labels)
        self.compute: Callable[[torch.Tensor], torch.Tensor] = self._compute

    def __call__(self) -> float:
        self.suffix.zero_grad(set_to_none=True)
        x, heads = self.layout.unpack(self.x) if self.layout else (self.x, None)
        with short_memory(self.last_steps, heads):
            value = self.compute(x)
        value.backward()
        return value.item()

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch_loss(self.loss, self.suffix(x), self.labels)

    def hold_channels_last(self) -> None:
        """Hold images and kernels as [N, height, width, channels], which PyTorch's convolutions prefer."""
        self.suffix.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.x = self.x.contiguous(memory_format=torch.channels_last)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Drop nothing meanwhile: a compiled step draws masks that no other engine can draw."""
        dropouts = [module for module in self.suffix.modules() if isinstance(module, nn.Dropout)]
        rates = [module.p for module in dropouts]
        try:
            for module in dropouts:
                module.p = 0.0
            yield
        finally:
            for module, rate in zip(dropouts, rates, strict=True):
                module.p = rate


class TorchReference:
    """The module that a bundle was made from, with the bundle's weights."""

    version = str(torch.__version__)

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._source = rebuild_source(manifest)
        if self._source.build is None:
            raise InputError("the source is an ONNX file, which has no PyTorch module")
        vector = np.array(map_weights(directory / manifest.weights.name, manifest.space))
        self._values = manifest.space.views(vector)

    def step(self, boundary: Boundary, entering: Entering, labels: np.ndarray[Any, Any]) -> TimedTorchStep | None:
        """Return a boundary's step, of a fresh module: a step moves its statistics. None: no module starts there."""
        if boundary.narrow is not None:
            return None
        module = self._source.module()
        state = module.state_dict()
        for name, value in self._values.items():
            state[name].copy_(torch.from_numpy(value))
        part = suffix_module(module, entering.layers[0], entering.layers[boundary.layer], boundary.layer)
        return None if part is None else TimedTorchStep(part, self.manifest.loss, entering(boundary), labels, boundary)

    def steps(
        self,
        boundary: Boundary,
        entering: Entering,
        labels: np.ndarray[Any, Any],
        seed: int,
        kinds: Sequence[str],
        notes: list[str],
    ) -> dict[str, tuple[TimedTorchStep, float]]:
        """Return the steps that can be timed, eager first, each with the loss that the other engines should have."""
        eager = self.step(boundary, entering, labels)
        if eager is None:
            return {}
        found = {EAGER: (eager, self.loss(eager, boundary, seed))}
        if CHANNELS_LAST in kinds and eager.x.ndim == 4:
            other = self._again(boundary, entering, labels)
            other.hold_channels_last()
            found[CHANNELS_LAST] = other, self.loss(other, boundary, seed)
        if COMPILED in kinds:
            other = self._again(boundary, entering, labels)
            try:
                found[COMPILED] = other, found[EAGER][1] + _compile(other)
            except RuntimeError as error:  # whatever the compiler does not understand
                notes.append(f"compile: {str(error).strip().splitlines()[0]}; so it is not timed at {boundary.name}")
        return found

    def _again(self, boundary: Boundary, entering: Entering, labels: np.ndarray[Any, Any]) -> TimedTorchStep:
        step = self.step(boundary, entering, labels)
        assert step is not None  # there was one before
        return step

    def loss(self, step: TimedTorchStep, boundary: Boundary, seed: int) -> float:
        """Compute the loss with the dropout masks of the other engines."""
        skipped = sum(layer.dropouts for layer in self.manifest.layers[: boundary.layer])
        with seeded_dropout(seed, skip=skipped, count=skipped):
            return step()


def _compile(step: TimedTorchStep) -> float:
    """Let torch.compile write a step, which takes long; return how much that changes its loss without dropout."""
    torch._dynamo.reset()
    with step.without_dropout():
        eager = step()
        step.compute = torch.compile(step.compute)
        compiled = step()
    step()  # compiles again, with dropout
    return compiled - eager


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let PyTorch compute with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


# --- a model that is no bundle yet -----------------------------------------------------------------------------------


def export_for_steps(
    reference: str, directory: Path, boundaries: str, notes: list[str], progress: Progress
) -> tuple[Manifest, list[tuple[Boundary, list[str]]]]:
    """Export the boundaries that are to be timed; return them, input side first, each with its tiers."""
    source = load_source(reference)
    engines = ["portable"]
    if is_available():
        engines.append("ort-training")
    else:
        notes.append(f"ort-training: {MissingPackage('onnxruntime-training-cpu', 'ort-training')}")
    splits = () if boundaries == "all" else list(_splits(source, boundaries))
    manifest = export_bundle(source, directory, Choices(splits=splits, engines=engines), progress)
    return manifest, _chosen(source, manifest, boundaries)


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
