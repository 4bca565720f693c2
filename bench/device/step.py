"""The time of one training step, forward and backward without an optimiser, from each boundary.

All engines run in one process, on the same data, with the same number of threads, taking turns (A B C, B C A, …), so
that whatever else the machine does meets all of them alike, and none always finds the caches as another left them.
Ratios are medians over rounds, each round compared with itself. One thread is timed by the processor time that it
took, which other programs on the machine lengthen least; several by the clock.

A bundle is timed as it is, and needs no PyTorch; any other model is exported first.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import onnxruntime

from bench.device.entering import Entering
from bench.device.peers.process import PACKAGES, PeerStep
from edge_runtime.bundle_files import check_bundle, map_weights, read_manifest
from edge_runtime.engine.choose import EngineName, open_step
from edge_runtime.engine.ort_training import is_available
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.measure import random_labels_of
from federation.errors import EmbraceError, InputError, VerificationError
from federation.manifest import Boundary, Manifest
from federation.narrow import take_corners

if TYPE_CHECKING:
    from bench.device.torch_step import TorchReference

OURS = "portable"
TORCH = ("channels-last", "compile")  # beside PyTorch eager
PEERS = (*TORCH, *PACKAGES)
WARM_UP = 3
SEED = 1
TOLERANCE = 1e-4  # before anything is timed, the losses have to agree

Progress = Callable[[str, int, int], None]
Step = Callable[[], float]  # one forward and backward pass; gives the loss
Timed = Callable[[], float]  # the same; gives milliseconds


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

    @property
    def peers(self) -> list[str]:
        """Engines that ours is compared with."""
        return [engine for engine in self.rounds if engine != OURS] if OURS in self.rounds else []

    @property
    def worst(self) -> float:
        """How many times longer than ours the fastest peer takes; infinite without one."""
        ratios = [self.ratio(peer, OURS) for peer in self.peers]
        return min((ratio for ratio in ratios if ratio is not None), default=math.inf)

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
    peers: Sequence[str] = TORCH[:1],
    progress: Progress = lambda what, done, total: None,
) -> StepReport:
    """Time boundaries (NAME,… or 'tiers' or 'all') of a bundle's directory, or of a model that is exported first."""
    notes: list[str] = []
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise InputError(f"--peers: expected {', '.join(PEERS)} or none, got {', '.join(unknown)}")
    with ExitStack() as stack:
        directory = Path(reference)
        if directory.is_dir():
            manifest = read_manifest(directory)
            check_bundle(directory, manifest)
            chosen = _chosen(manifest, boundaries)
        else:
            from bench.device.torch_step import export_for_steps

            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
            manifest, chosen = export_for_steps(reference, directory, boundaries, notes, progress)
        module = _torch_reference(directory, manifest, notes)
        if module is not None:
            from bench.device.torch_step import COMPILED, can_compile, torch_threads

            if COMPILED in peers and not can_compile():
                peers = [name for name in peers if name != COMPILED]
                notes.append("compile: torch.compile needs a C++ compiler (g++), so it is not timed")
            stack.enter_context(torch_threads(threads))
        case = _Case(manifest, directory, batch, threads, module, peers)
        timings = []
        for number, (boundary, tiers) in enumerate(chosen):
            with ExitStack() as processes:
                steps = case.steps(boundary, notes, processes)
                timing = Timing(boundary.name, tiers, {name: [] for name in steps})
                for turn in range(-WARM_UP, rounds):
                    progress(boundary.name, number * rounds + max(turn, 0), len(chosen) * rounds)
                    for name, step in _rotated(list(steps.items()), turn):
                        try:
                            milliseconds = step()
                        except EmbraceError as error:
                            if name not in PACKAGES:
                                raise
                            del steps[name], timing.rounds[name]
                            notes.append(case.left_out(name, error, boundary, f", batch {batch}"))
                            continue
                        if turn >= 0:
                            timing.rounds[name].append(milliseconds)
                timings.append(timing)
    versions = {} if module is None else {"torch": module.version}
    versions["onnxruntime"] = onnxruntime.__version__
    return StepReport(manifest.name, batch, threads, versions, timings, [*manifest.notes, *notes])


def _timed(step: Step, threads: int) -> float:
    clock = time.process_time if threads == 1 else time.perf_counter
    started = clock()
    step()
    return 1e3 * (clock() - started)


def _rotated(items: list[tuple[str, Timed]], by: int) -> list[tuple[str, Timed]]:
    """Rotate, so that another engine begins in every round."""
    start = by % len(items)
    return items[start:] + items[:start]


def _chosen(manifest: Manifest, boundaries: str) -> list[tuple[Boundary, list[str]]]:
    """Find the boundaries of a bundle to time, input side first, each with its tiers."""
    wanted = {boundary.name for boundary in manifest.boundaries}
    if boundaries == "tiers":
        wanted = set(manifest.tiers.values())
    elif boundaries != "all":
        wanted = {manifest.boundary(name.strip()).name for name in boundaries.split(",") if name.strip()}
    if not wanted:
        raise InputError("--boundaries: expected names separated by commas, 'tiers' or 'all'")
    return [
        (boundary, [tier for tier, name in manifest.tiers.items() if name == boundary.name])
        for boundary in manifest.boundaries
        if boundary.name in wanted
    ]


def _torch_reference(directory: Path, manifest: Manifest, notes: list[str]) -> TorchReference | None:
    """Build the bundle's source again to compare with, where that is possible."""
    if find_spec("torch") is None:
        notes.append("torch: not installed, so PyTorch is not timed")
        return None
    from bench.device.torch_step import TorchReference

    try:
        return TorchReference(directory, manifest)
    except EmbraceError as error:
        notes.append(f"torch: {error}; so PyTorch is not timed")
        return None


class _Case:
    """The data of a measurement: one random batch as it arrives at every layer, and every engine's step on it."""

    def __init__(
        self,
        manifest: Manifest,
        directory: Path,
        batch: int,
        threads: int,
        module: TorchReference | None,
        peers: Sequence[str],
    ) -> None:
        self.manifest = manifest
        self.directory = directory
        self.module = module
        self.peers = peers
        self.settings = RuntimeSettings(threads)
        self.vector = np.array(map_weights(directory / manifest.weights.name, manifest.space))
        self.labels = random_labels_of(manifest, batch)
        self.entering = Entering(directory, manifest, batch, self.settings)

    def steps(self, boundary: Boundary, notes: list[str], processes: ExitStack) -> dict[str, Timed]:
        """Open each engine that can train from this boundary, and check that all do the same work: the same loss."""
        steps: dict[str, Step] = {}
        losses: dict[str, float] = {}
        x = self.entering(boundary)
        if self.module is not None:
            found = self.module.steps(boundary, self.entering, self.labels, SEED, self.peers, notes)
            for name, (own, loss) in found.items():
                steps[name] = own
                losses[name] = loss
            if not found:
                notes.append(f"torch: no part of the module starts at {boundary.name}, so PyTorch is not timed there")
        for engine in self._engines(boundary, notes):
            step = open_step(self.directory, self.manifest, boundary, engine, self.settings)
            vector = self.vector
            if boundary.narrow is not None:
                vector = take_corners(self.manifest.space, vector, boundary.space(self.manifest))
            step.parameters[:] = vector[step.suffix]
            steps[engine] = partial(step.run, x, self.labels, SEED)
            losses[engine] = steps[engine]()
        if not losses.keys() & set(get_args(EngineName)):
            raise InputError(f"boundary {boundary.name}: no engine that is installed here can train from it")
        timed: dict[str, Timed] = {name: partial(_timed, step, self.settings.threads) for name, step in steps.items()}
        for name in (name for name in self.peers if name in PACKAGES):
            try:
                peer = PeerStep(name, self.directory, self.manifest, boundary, self.settings.threads)
                processes.callback(peer.close)
                losses[name] = peer.start(x, self.labels)
                timed[name] = peer
            except EmbraceError as error:
                notes.append(self.left_out(name, error, boundary))
        _check_losses(boundary, losses)
        return timed

    def left_out(self, name: str, error: EmbraceError, boundary: Boundary, case: str = "") -> str:
        """Write the note about a peer that could not be timed."""
        return f"{name}: {error}; so it is not timed at {boundary.name} of {self.manifest.name}{case}"

    def _engines(self, boundary: Boundary, notes: list[str]) -> list[EngineName]:
        found: list[EngineName] = ["portable"] if boundary.train else []
        if boundary.ort_training and is_available():
            found.append("ort-training")
        elif boundary.ort_training:
            notes.append(f"ort-training: not installed, so it is not timed at {boundary.name}")
        return found


def _check_losses(boundary: Boundary, losses: dict[str, float]) -> None:
    first, expected = next((name, loss) for name, loss in losses.items() if name in get_args(EngineName))
    for name, loss in losses.items():
        if not abs(loss - expected) <= TOLERANCE * max(abs(expected), 1.0):
            raise VerificationError(
                f"boundary {boundary.name}: {name} has the loss {loss:.6f}, {first} {expected:.6f}; not timed"
            )
