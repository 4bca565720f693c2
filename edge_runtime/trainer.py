"""The one local training loop, for every algorithm: gradient, chained local rule, in-place update of a flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.activations import ActivationStore
from edge_runtime.bundle_loss import BundleLoss
from edge_runtime.data import Augmentation, TrainingSamples, shuffled
from edge_runtime.data.prng import sample_bits
from edge_runtime.engine.choose import EngineName
from edge_runtime.engine.engine import Engine, GradientStep, OnnxEngine
from edge_runtime.engine.ordered_dropout import open_coverage
from edge_runtime.engine.session import RuntimeSettings, give_back_memory
from edge_runtime.forward import ForwardPlan
from edge_runtime.forward import Report as Progress
from edge_runtime.frozen_statistics import FrozenStatistics
from edge_runtime.layers import LayerSource
from edge_runtime.memory import PeakMeter, current_memory
from edge_runtime.timing import Stopwatch
from federation.axes.local import LocalStep, Start, clip, runs
from federation.axes.local.rule import check_like
from federation.coverage import Coverage, coverage
from federation.errors import NonFiniteLoss, OutOfMemory
from federation.manifest import Boundary, Layer
from federation.messages import Report, Task
from federation.space import Vector

_DROPOUT = 1 << 32  # a draw of its own: not one of the augmentation's
_EPOCHS = 1 << 24  # more than a task has
Seen = Callable[[Vector], None]  # of a local model, in memory that changes with the next step


@dataclass(frozen=True)
class Received:
    """Vectors that come with a task, over the suffix that is trained. They may be mapped files, and stay unchanged."""

    parameters: Vector
    brought: Mapping[str, Vector] = field(default_factory=dict)  # by name: what the local rules start from
    reference: Vector | None = None  # what an update is the difference from; None: the parameters
    steps_before: int = 0  # that the device has taken with what it brings

    @property
    def origin(self) -> Vector:
        return self.parameters if self.reference is None else self.reference


@dataclass(frozen=True)
class Outcome:
    """What training gave. The vectors are the trainer's own and change with its next task."""

    parameters: Vector
    local: LocalStep  # knows the update to report and the buffers to keep
    report: Report
    measured: Vector = field(default_factory=lambda: np.zeros(0, np.float32))  # changes of statistics that it measured


@dataclass(frozen=True)
class _Stored:
    """Activations and what they were computed from."""

    rows: ActivationStore
    numbers: NDArray[np.int64]  # of the samples, ascending
    frozen: tuple[Layer, ...]  # what they went through
    stored_as: str
    lineage: str
    version: str
    round: int
    seed: int
    augmentation: Augmentation
    statistics: FrozenStatistics | None  # of what passed


class MeanGradient:
    """The gradient of a batch whose samples go through the graph a few at a time.

    Statistics follow the parts of the batch one after the other, as PyTorch's do.
    """

    def __init__(self, step: GradientStep, statistics: Sequence[slice]) -> None:
        self._step = step
        self._statistics = tuple(statistics)
        self._mean: Vector = np.zeros_like(step.gradients)

    def add(self, share: float, *, last: bool) -> None:
        """Add the gradients of the last run; the last of a batch puts the mean in their place and begins anew."""
        gradients = self._step.gradients
        new = [gradients[run].copy() for run in self._statistics]
        np.multiply(gradients, share, out=gradients)
        np.add(self._mean, gradients, out=self._mean)
        if last:
            gradients[:] = self._mean
            self._mean.fill(0.0)
        for run, values in zip(self._statistics, new, strict=True):
            (gradients if last else self._step.parameters)[run] = values


@dataclass(frozen=True)
class _BatchMemory:
    """Where the samples of a step go, again and again."""

    x: NDArray[Any]
    labels: NDArray[Any]
    mean: MeanGradient | None  # where a batch goes through in parts


class Trainer:
    """Trains one device's data, task after task; keeps activations and the session where the next task can use them."""

    def __init__(
        self,
        directory: Path,
        source: LayerSource,
        samples: TrainingSamples,
        *,
        engine: EngineName | Engine = "portable",
        settings: RuntimeSettings | None = None,
        plan: ForwardPlan | None = None,
        forward_share: float | None = None,
        measures_memory: bool = True,
        allowed: int | None = None,
        stores_all: bool = True,
        local_step: type[LocalStep] = LocalStep,
        progress: Progress = lambda what, done, total: None,
        seen: Seen = lambda parameters: None,
    ) -> None:
        """`directory` has the training graphs; `forward_share` divides the time of a step (engine/trace.py).

        `allowed` is the budget of the whole process, for reports; `seen` gets the local model after every step.

        `stores_all = False` runs only those samples through the frozen layers that a round's steps take, unless
        activations are kept for several rounds: for devices whose frozen layers are others in the next round.

        Measuring memory costs a thread that looks every millisecond: much, where many devices share a process.
        """
        self.directory = directory
        self.source = source
        self.samples = samples
        self.manifest = source.manifest
        self.engine = engine
        self.settings = settings or RuntimeSettings()
        self.plan = plan or ForwardPlan()
        self.measures_memory = measures_memory
        self.allowed = allowed
        self.stores_all = stores_all
        self.local_step = local_step
        self.forward_share = forward_share
        self.progress = progress
        self.seen = seen
        self._step: tuple[tuple[str, ...], GradientStep] | None = None
        self._stored: _Stored | None = None
        self._loss = BundleLoss(directory, self.manifest)
        self._idle = current_memory()

    def run(self, task: Task, received: Received, watch: Stopwatch | None = None) -> Outcome:
        """Run a task. A failure leaves nothing behind but this trainer's own buffers."""
        task = task.for_samples(len(self.samples))
        covered = coverage(self.manifest, task.boundary)
        boundary = covered.boundary
        watch = watch or Stopwatch()
        meter = PeakMeter(self._idle)
        try:
            with watch.part("load"), meter if self.measures_memory else nullcontext():
                self._prepare(task, covered, watch)
                with watch.part("training"):
                    local, losses = self._train(task, covered, received, watch)
        except (MemoryError, OutOfMemory) as error:
            self.close()
            problem = str(error) or "not enough memory"
            raise OutOfMemory(f"training from {boundary.name!r}: {problem}; {self._advice(boundary)}") from None
        stored = self.stored_bytes if self.manifest.frozen(boundary) else 0
        report = Report(
            status="done",
            boundary=self.manifest.tiers.get(task.boundary, task.boundary),
            engine=self._engine().name,
            profile=self.settings.profile,
            round=task.round,
            steps=task.steps,
            batch=self._batch(task),
            samples=len(self.samples),
            loss=math.fsum(losses) / len(losses),
            last_loss=losses[-1],
            seconds=asdict(watch.timings(self.forward_share)),
            memory=meter.report(self.allowed),
            bytes={"stored_activations": stored},
            activations_age=task.round - self._stored.round if self._stored and stored else 0,
        )
        return Outcome(local.x, local, report, self._measured(task))

    def _measured(self, task: Task) -> Vector:
        """What to report of statistics in frozen layers; training moves them with every part of a batch."""
        found = self._stored.statistics if self._stored else None
        if found is None or not coverage(self.manifest, task.boundary).measures:
            return np.zeros(0, np.float32)
        batch = self._batch(task)
        return found.update(task.steps * math.ceil(batch / min(batch, task.at_once)))

    @property
    def stored_bytes(self) -> int:
        """What the stored activations take."""
        return self._stored.rows.nbytes if self._stored else 0

    @property
    def spare(self) -> Vector | None:
        """A vector as long as the parameters that nothing needs until the next task: that of the gradients."""
        return None if self._step is None else self._step[1].gradients

    def release_session(self) -> None:
        """Give back the session's memory; the next task opens it again."""
        if self._step is not None:
            self._step = None
            give_back_memory()

    def close(self) -> None:
        """Give back the session and the stored activations."""
        self.release_session()
        if self._stored:
            self._stored.rows.close()
        self._stored = None

    def _engine(self) -> Engine:
        """Make the engine anew: an agent gives its trainer another source for every task."""
        if isinstance(self.engine, str):
            return OnnxEngine(self.directory, self.source, self.engine, self.settings)
        return self.engine

    def _advice(self, boundary: Boundary) -> str:
        if boundary.width is None:
            smaller = [b.name for b in self.manifest.boundaries if b.layer > boundary.layer]
        else:
            smaller = [b.name for b in self.manifest.boundaries if b.width is not None and b.width < boundary.width]
        return f"{smaller[0]!r} is the next smaller boundary" if smaller else "use a smaller batch"

    def _batch(self, task: Task) -> int:
        return min(task.batch, len(self.samples))

    def _prepare(self, task: Task, covered: Coverage, watch: Stopwatch) -> None:
        """Store fresh activations first, open the session afterwards: with little memory both do not fit at once."""
        boundary, graphs = covered.boundary, tuple(graph.name for graph in covered.graphs)
        if self.manifest.frozen(boundary) and not self._still_good(task, covered):
            if self._stored:
                self._stored.rows.close()
                self._stored = None
            if self.settings.profile == "low_memory":
                self.release_session()
            self._stored = self._store(task, covered, watch)
            if self.settings.profile == "low_memory":
                give_back_memory()  # of the frozen layers
        if self._step is None or self._step[0] != graphs:
            self.release_session()  # the old one goes before the new one comes
            self._step = graphs, open_coverage(self._engine(), self.manifest, covered)

    def _still_good(self, task: Task, covered: Coverage) -> bool:
        stored, frozen = self._stored, self.manifest.frozen(covered.boundary)
        if stored is None or (stored.frozen, stored.stored_as) != (frozen, task.activations):
            return False
        if covered.measures and stored.statistics is None:
            return False
        augmentation = Augmentation(task.crop, task.flip)
        if stored.augmentation != augmentation:
            return False
        first = max(task.good_since, task.round + 1 - task.refresh_every)
        recent = task.refresh_every > 1 and first <= stored.round <= task.round
        if len(stored.numbers) < len(self.samples) and not np.isin(self._wanted(task), stored.numbers).all():
            return False
        if recent and stored.lineage == self.source.lineage:  # rounds of another job count other weights
            return True
        # The same layers on the same data give the same.
        same_data = not augmentation or (stored.seed, stored.round) == (task.seed, task.round)
        return same_data and stored.version == self.source.version

    def _wanted(self, task: Task) -> NDArray[np.int64]:
        """Number the samples that activations are stored of, ascending."""
        count = len(self.samples)
        if self.stores_all or task.refresh_every > 1 or coverage(self.manifest, task.boundary).measures:
            return np.arange(count)
        return np.unique(np.concatenate([indices for _, indices in batches(count, self._batch(task), task)]))

    def _store(self, task: Task, covered: Coverage, watch: Stopwatch) -> _Stored:
        boundary, augmentation, wanted = covered.boundary, Augmentation(task.crop, task.flip), self._wanted(task)
        statistics = FrozenStatistics(self.manifest, covered) if covered.measures else None

        def inputs(start: int, stop: int) -> NDArray[Any]:
            numbers = wanted[start:stop]
            x, _ = self.samples.batch(numbers)
            return augmentation.apply(x, numbers, task.seed, task.round * _EPOCHS) if augmentation else x

        plan = replace(self.plan, stored_as=task.activations)
        rows = self._engine().store(boundary, inputs, len(wanted), plan, watch, self.progress, statistics)
        return _Stored(
            rows,
            wanted,
            self.manifest.frozen(boundary),
            task.activations,
            self.source.lineage,
            self.source.version,
            task.round,
            task.seed,
            augmentation,
            statistics,
        )

    def _train(
        self, task: Task, covered: Coverage, received: Received, watch: Stopwatch
    ) -> tuple[LocalStep, list[float]]:
        assert self._step is not None
        step, boundary = self._step[1], covered.boundary
        check_like("parameters", received.parameters, step.parameters)
        with watch.part("optimiser"):
            step.parameters[:] = received.parameters
            origin, brought = received.origin, received.brought
            start = Start(step.parameters, task.steps, task.rate, origin, brought, received.steps_before)
            weights, statistics = runs(boundary.space(self.manifest), boundary.layer, covered.layers)
            local = self.local_step(task.rules, start, weights, statistics)
        replace(task, batch=self._batch(task)).check_parts(self.manifest, boundary)
        memory = self._memory(task, boundary, step, statistics, watch)
        order = batches(len(self.samples), self._batch(task), task)
        losses: list[float] = []
        for number in range(task.steps):
            self.progress("train", number, task.steps)
            loss = self._gradient(task, boundary, step, memory, number, *next(order), watch)
            if not math.isfinite(loss):
                raise NonFiniteLoss(
                    f"the loss is {loss} at step {number + 1} of round {task.round} with the rate {task.rate:g}; "
                    "use a smaller rate, or look for extreme values in the data"
                )
            losses.append(loss)
            with watch.part("optimiser"):
                if task.clip_norm is not None:
                    clip(step.gradients, weights, task.clip_norm)
                local.step(step.gradients, task.rate)
            self.seen(local.x)
        with watch.part("optimiser"), np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(np.dot(local.x, local.x)):
                raise NonFiniteLoss(f"parameters are not finite after round {task.round}; use a smaller rate")
        return local, losses

    def _memory(
        self, task: Task, boundary: Boundary, step: GradientStep, statistics: Sequence[slice], watch: Stopwatch
    ) -> _BatchMemory:
        entry, labels, batch = self.manifest.entry(boundary), self.samples.labels, self._batch(task)
        at_once = min(batch, task.at_once)
        with watch.part("activation_io"):
            return _BatchMemory(
                np.empty((at_once, *entry.shape), entry.dtype),
                np.empty((at_once, *labels.shape[1:]), labels.dtype),
                MeanGradient(step, statistics) if at_once < batch else None,
            )

    def _gradient(
        self,
        task: Task,
        boundary: Boundary,
        step: GradientStep,
        memory: _BatchMemory,
        number: int,
        epoch: int,
        indices: NDArray[np.int64],
        watch: Stopwatch,
    ) -> float:
        """Leave the gradient of a batch in the step's vector, whether its samples go through at once or in parts."""
        parts = [indices[first : first + len(memory.x)] for first in range(0, len(indices), len(memory.x))]
        loss, shares = 0.0, self._shares(parts)
        for place, part in enumerate(parts):
            x, labels, share = memory.x[: len(part)], memory.labels[: len(part)], shares[place]
            with watch.part("activation_io"):
                self._read(part, epoch, task, boundary, x, labels)
            loss += share * step.run(x, labels, step_seed(task, number * len(parts) + place))
            if memory.mean is not None:
                with watch.part("optimiser"):
                    memory.mean.add(share, last=place == len(parts) - 1)
        return loss

    def _shares(self, parts: Sequence[NDArray[np.int64]]) -> list[float]:
        """Find how much each part of a batch counts in its loss."""
        if len(parts) == 1:
            return [1.0]
        return self._loss.shares([self._loss.counted(self.samples.labels[part]) for part in parts])

    def _read(
        self,
        indices: NDArray[np.int64],
        epoch: int,
        task: Task,
        boundary: Boundary,
        x: NDArray[Any],
        labels: NDArray[Any],
    ) -> None:
        """Read one batch into the memory that the session is bound to."""
        if self.manifest.frozen(boundary):
            assert self._stored is not None
            self._stored.rows.read(np.searchsorted(self._stored.numbers, indices), x)
            labels[...] = self.samples.labels[indices]
            return
        inputs, labels[...] = self.samples.batch(indices)
        augmentation = Augmentation(task.crop, task.flip)
        x[...] = augmentation.apply(inputs, indices, task.seed, epoch) if augmentation else inputs


def batches(count: int, batch: int, task: Task) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (epoch, samples) of each step: epoch after epoch in a new order, full batches only."""
    done = 0
    for number in range(task.steps):
        epoch = task.round * _EPOCHS + number // max(1, count // batch)
        if done >= count // batch or number == 0:
            order, done = shuffled(count, task.seed, epoch), 0
        yield epoch, order[done * batch : (done + 1) * batch]
        done += 1


def step_seed(task: Task, number: int) -> int:
    """Derive the seed of a step's dropout masks: the same for every engine."""
    bits = sample_bits(task.seed, task.round, np.array([number], np.int64), _DROPOUT)
    return int(bits[0] >> np.uint64(33))
