"""Training on one device alone: rounds over the local data, a checkpoint after each, scores before and after."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.budget import Allowance
from edge_runtime.bundle_files import map_weights
from edge_runtime.data import Samples, check_trainable
from edge_runtime.data.input_adapter import chunks
from edge_runtime.evaluate import Evaluator
from edge_runtime.layers import BundleSource, TrainedSource
from edge_runtime.memory import PeakMeter, current_memory
from edge_runtime.state_file import load_state, save_state
from edge_runtime.timing import Stopwatch
from edge_runtime.trainer import Received, Trainer
from federation.errors import EmptyData, InputError
from federation.manifest import MANIFEST_NAME, Boundary, Manifest
from federation.messages import Task, encode_task
from federation.metrics import Score
from federation.schedule import Schedule
from federation.space import Vector

# What happens now, and how many of how many steps of it are done.
Progress = Callable[[str, int, int], None]
_FINGERPRINTED = 16  # inputs that tell one data set from another


@dataclass(frozen=True)
class Settled:
    """What a run does; a checkpoint continues only a run with the same."""

    task: Task  # of round 0; later rounds differ in their number and rate
    schedule: Schedule
    allow_single_class: bool = False


@dataclass
class History:
    """Everything a run has to tell."""

    before: Score | None = None
    after: Score | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    resumed_at: int = 0


class _OwnSource(BundleSource):
    """The bundle's frozen layers; a head, and layers that borrow trained weights, with what was trained so far."""

    def __init__(self, directory: Path, manifest: Manifest, boundary: Boundary, place: Path | None) -> None:
        super().__init__(directory, manifest)
        self._boundary = boundary
        self._place = place
        self._weights: Vector | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._trained: TrainedSource | None = None
        trained = {p.name for layer in manifest.layers[boundary.layer :] for p in layer.parameters}
        frozen = enumerate(manifest.layers[: boundary.layer])
        self.borrowing = [number for number, layer in frozen if trained.intersection(layer.borrowed or ())]

    def begin(self, number: int, weights: Vector) -> None:
        """Begin a round: what trained weights gave in the one before is not valid for it."""
        if self._boundary.head is not None or self.borrowing:
            self.close()
            self._weights, self.version = weights, f"{self.lineage}/{number}"

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        if layer in self.borrowing:
            return self._own().fetch(layer, measuring=measuring)
        return super().fetch(layer, measuring=measuring)

    def fetch_head(self, boundary: Boundary) -> Path:
        return self._own().fetch_head(boundary)

    def _own(self) -> TrainedSource:
        """Write the trained weights of the round, and those of the layers that borrow them."""
        if self._trained is None:
            assert self._weights is not None
            if self._place is not None:
                self._place.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="embrace-", dir=self._place, ignore_cleanup_errors=True)
            folder, first = Path(self._folder.name), self._boundary.layer
            self._trained = TrainedSource(self.directory, self.manifest, first, self._weights, folder)
            self._trained.add(self.borrowing)
        return self._trained

    def close(self) -> None:
        """Remove the weights of the round; a session may have read them where they lay."""
        self._trained = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def fine_tune(
    directory: Path,
    manifest: Manifest,
    train: Samples,
    held_out: Samples | None,
    settled: Settled,
    allowance: Allowance,
    *,
    num_rounds: int,
    checkpoint: Path,
    progress: Progress = lambda what, done, total: None,
    on_round: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> tuple[Vector, History]:
    """Train round after round; return the trained suffix. A kill loses at most the round it interrupts."""
    check_trainable(train, settled.allow_single_class)
    if held_out is not None and len(held_out) == 0:
        raise EmptyData(f"{held_out.name}: nothing is held out to evaluate with; use more data or --holdout 0")
    layer = allowance.boundary.layer
    if allowance.boundary.narrow is not None:
        raise InputError(f"{allowance.boundary.name!r} has a part of the channels, which is for jobs; use another")
    source = _OwnSource(directory, manifest, allowance.boundary, allowance.plan.folder)
    original = map_weights(directory / manifest.weights.name, manifest.space)[manifest.space.suffix(layer)]
    key = _key(directory, settled, allowance, train, held_out)
    vectors, history = _resume(checkpoint, key, original)
    trial, idle = allowance.trial, current_memory()
    trainer = Trainer(
        directory,
        source,
        train,
        engine=allowance.engine,
        settings=allowance.settings,
        plan=allowance.plan,
        forward_share=trial.forward_share if trial else None,
        allowed=allowance.budget,
        progress=progress,
    )
    evaluator = None
    if held_out is not None:
        evaluator = Evaluator(
            directory, source, layer, held_out, settings=allowance.settings, plan=allowance.plan, progress=progress
        )
    try:
        if evaluator and history.before is None:
            source.begin(0, original)
            history.before = evaluator.score(original)
        for number in range(len(history.rounds), num_rounds):
            watch = Stopwatch()
            progress("round", number, num_rounds)
            task = replace(settled.task, round=number, rate=settled.schedule.at(number))
            source.begin(number, vectors["parameters"])
            brought = {name: vector for name, vector in vectors.items() if name != "parameters"}
            before = sum(entry["steps"] for entry in history.rounds)
            outcome = trainer.run(task, Received(vectors["parameters"], brought, steps_before=before), watch)
            kept = {"parameters": outcome.parameters, **outcome.local.state()}
            memory = outcome.report.memory
            if evaluator:
                if allowance.tight:
                    trainer.release_session()
                if source.borrowing:
                    source.begin(number + 1, outcome.parameters)
                    evaluator.close()
                with PeakMeter(idle) as meter:
                    history.after = evaluator.score(outcome.parameters, watch)
                memory = _larger(memory, meter.report())
            with watch.part("state"):
                entry = {**asdict(outcome.report), "memory": memory, "evaluation": _encode(history.after)}
                history.rounds.append(entry)
                save_state(checkpoint, kept, {"key": key, "history": json.dumps(_history(history))})
                vectors, _ = load_state(checkpoint)  # mapped: the next round starts from what was kept
            entry["seconds"] = asdict(watch.timings(trainer.forward_share))
            on_round(entry)
            del outcome, kept  # or this round's momentum would be held beside the next one's
    finally:
        trainer.close()
        source.close()
        if evaluator:
            evaluator.close()
    return np.array(vectors["parameters"]), history


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(value, other.get(name, 0)) for name, value in one.items()}


def kept_boundary(checkpoint: Path) -> str | None:
    """Read the boundary that a checkpoint was trained from, if there is one: free memory differs from day to day."""
    if not checkpoint.exists():
        return None
    _, about = load_state(checkpoint)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return str(json.loads(about["key"])["boundary"])
    return None


def _key(directory: Path, settled: Settled, allowance: Allowance, train: Samples, held_out: Samples | None) -> str:
    """Write as JSON what has to be the same for a checkpoint to be continued."""
    task = encode_task(settled.task)
    bundle = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
    place = {"boundary": allowance.boundary.name, "engine": allowance.engine}
    data = {"data": _fingerprint(train), "held-out data": _fingerprint(held_out) if held_out is not None else None}
    return json.dumps({"bundle": bundle, **task, **place, **data, **asdict(settled.schedule)}, sort_keys=True)


def _fingerprint(samples: Samples) -> str:
    """Tell data sets apart by all labels and a few inputs, without reading the whole of them."""
    numbers = np.unique(np.linspace(0, len(samples) - 1, _FINGERPRINTED).astype(np.int64))
    digest = hashlib.sha256()
    for _, labels in chunks(samples.labels):
        digest.update(np.ascontiguousarray(labels).data)
    for number in numbers:
        digest.update(samples.batch(number[None])[0].tobytes())
    return digest.hexdigest()


def _resume(checkpoint: Path, key: str, original: Vector) -> tuple[dict[str, Vector], History]:
    """Load the state to go on from: the checkpoint's, or the bundle's own weights."""
    if not checkpoint.exists():
        return {"parameters": original}, History()
    vectors, about = load_state(checkpoint)
    try:
        found, wanted = json.loads(about["key"]), json.loads(key)
        told = json.loads(about["history"])
        history = History(_decode(told["before"]), _decode(told["after"]), told["rounds"], len(told["rounds"]))
        differing = sorted(name for name in wanted if found.get(name) != wanted[name])
        fits = vectors["parameters"].shape == original.shape
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{checkpoint} is no checkpoint of this program; remove it or use --fresh") from None
    if differing or not fits:
        raise InputError(
            f"{checkpoint} belongs to a run with another {', '.join(differing) or 'size'}; "
            "repeat that run's options to continue it, or begin anew with --fresh"
        )
    return vectors, history


def _history(history: History) -> dict[str, Any]:
    return {"before": _encode(history.before), "after": _encode(history.after), "rounds": history.rounds}


def _encode(score: Score | None) -> dict[str, Any] | None:
    return asdict(score) if score else None


def _decode(told: dict[str, Any] | None) -> Score | None:
    return Score(**told) if told else None
