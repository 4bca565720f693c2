"""Train devices of a simulation, several at once where that is quicker.

A step of a small model is mostly overhead: of Python, of PyTorch, of a dozen small kernels. Devices that do the same
(boundary, steps, batch, rules) on different data share it. A device gets what it gets alone but for rounding: on some
processors a product of a stack and a product alone differ in their last bits. So what is stacked must not depend on the
processor or on the number of processes. assignment.py decides it by the cohort's order; here only what PyTorch cannot
stack is sorted out, which its version and the model decide.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from edge_runtime.data import Augmentation, TrainingSamples
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import LayerSource
from edge_runtime.trainer import Outcome, Received, Trainer, batches
from federation.axes.local import LocalStep, Start, runs
from federation.coverage import Coverage, coverage
from federation.errors import NonFiniteLoss, OutOfMemory
from federation.manifest import Boundary
from federation.messages import Report, Task
from federation.space import Vector
from model_export.inputs import sample_of
from model_export.oracle import random_labels
from simulation.apart import Seen
from simulation.assignment import LEAST_STACKED, may_stack
from simulation.fused_step import FusedStep
from simulation.kept_trainers import KeptTrainers
from simulation.shared_samples import SharedSamples
from simulation.stacked_step import StackedStep, prepare_stack
from simulation.torch_engine import TorchEngine, aligned

TRIED = 2  # devices, and samples of each, that a stack is tried with
NO_RULE = ".*batching rule"  # PyTorch's warning: it takes the devices of a stack one after the other
MOST_ROUNDS = 2  # that a device needs to see all of its samples, where it computes the activations of all at once


def _ignore(parameters: Vector) -> None:
    """Look at no step."""


def _keeps(task: Task, count: int) -> bool:
    """Say whether a device that has `count` samples computes the activations of all of them, and keeps these.

    The task alone decides, not whether they are there: a pass over other samples may round otherwise.
    """
    return task.refresh_every > 1 and count <= MOST_ROUNDS * task.steps * task.batch


def _of_rows(seen: Seen, places: Sequence[int]) -> Seen:
    return lambda row, parameters: seen(places[row], parameters)


@dataclass(frozen=True)
class StackedResult:
    """What a local step leaves behind, in memory of its own."""

    x: Vector
    rates: float
    steps: int
    _update: Vector
    _state: dict[str, Vector]

    def update(self, out: Vector | None = None) -> Vector:
        """Return the update, which was computed before: it needs no memory."""
        return self._update

    def state(self) -> dict[str, Vector]:
        return self._state


class StackedTrainer:
    """Trains the devices of one worker process."""

    def __init__(self, engine: TorchEngine, source: LayerSource, kept: KeptTrainers) -> None:
        """`source` says which version the weights of the engine's frozen layers are."""
        self.engine = engine
        self.source = source
        self.kept = kept
        self.manifest = engine.manifest
        self._modules: dict[str, nn.Module | None] = {}  # by boundary; None: PyTorch cannot stack it

    def train(
        self,
        tasks: Sequence[Task],
        received: Sequence[Received],
        samples: Sequence[TrainingSamples],
        seen: Seen | None = None,
    ) -> list[Outcome | NonFiniteLoss]:
        """Run each device's task; return what it gives, in memory of its own, or why it diverged.

        Those that bring the same vectors and do the same are stacked, if they are enough. `seen` gets a device's place
        and its local model after every step.
        """
        tasks = [task.for_samples(len(data)) for task, data in zip(tasks, samples, strict=True)]
        groups: dict[Hashable, list[int]] = {}
        for place, (task, start, data) in enumerate(zip(tasks, received, samples, strict=True)):
            groups.setdefault(self._kind(task, start, data), []).append(place)
        found: list[Outcome | NonFiniteLoss] = [NonFiniteLoss("not trained")] * len(tasks)
        for places in groups.values():
            covered = coverage(self.manifest, tasks[places[0]].boundary)
            module = self._stackable(covered, tasks[places[0]]) if len(places) >= LEAST_STACKED else None
            if module is None:
                outcomes = [self._alone(tasks[p], received[p], samples[p], seen and partial(seen, p)) for p in places]
            else:
                members = [(tasks[p], received[p], samples[p]) for p in places]
                outcomes = _Stack(self, covered, module, members).run(seen and _of_rows(seen, places))
            for place, outcome in zip(places, outcomes, strict=True):
                found[place] = outcome
        return found

    def _kind(self, task: Task, start: Received, samples: TrainingSamples) -> Hashable:
        """Name the kind of a device: those of the same kind can be stacked."""
        brought = tuple(sorted(start.brought))
        batch = min(task.batch, len(samples))
        augmented = task.crop, task.flip
        work = task.steps, batch, task.rate, task.rules, task.clip_norm, start.steps_before
        return task.boundary, *work, task.activations, augmented, brought

    def _alone(
        self, task: Task, start: Received, samples: TrainingSamples, seen: Callable[[Vector], None] | None
    ) -> Outcome | NonFiniteLoss:
        keeps = isinstance(samples, SharedSamples) and _keeps(task, len(samples))
        kept = self.kept.take(samples.name) if isinstance(samples, SharedSamples) else None
        trainer = self._again(kept) if kept and keeps else self._new(task, samples, stores_all=keeps)
        trainer.seen = seen or _ignore
        try:
            # The engine's weights are those of the round in which the device computed its activations.
            outcome = trainer.run(replace(task, refresh_every=1), start)
        except NonFiniteLoss as error:
            return error
        finally:
            trainer.seen = _ignore
            if keeps and isinstance(samples, SharedSamples):
                self.kept.put(samples.name, trainer)
        local = outcome.local
        moved = StackedResult(local.x.copy(), local.rates, local.steps, local.update(), local.state())
        return Outcome(moved.x, moved, outcome.report, outcome.measured)  # type: ignore[arg-type]

    def _again(self, trainer: Trainer) -> Trainer:
        """Let a trainer of an earlier round compute with the weights of this one."""
        trainer.engine, trainer.source = self.engine, self.source
        return trainer

    def _new(self, task: Task, samples: TrainingSamples, *, stores_all: bool) -> Trainer:
        return Trainer(
            self.engine.directory,
            self.source,
            samples,
            engine=self.engine,
            measures_memory=False,
            stores_all=stores_all,
            local_step=FusedStep,
            plan=ForwardPlan(batch=self.engine.forward_batch(coverage(self.manifest, task.boundary).boundary)),
        )

    def _stackable(self, covered: Coverage, task: Task) -> nn.Module | None:
        """Return the module for a stack of devices, if it pays and PyTorch can do it."""
        boundary = covered.boundary
        if not may_stack(self.manifest, task):
            return None
        if boundary.name not in self._modules:
            module = prepare_stack(self.engine.trained_part(boundary))
            self._modules[boundary.name] = module if self._can_stack(module, boundary) else None
        return self._modules[boundary.name]

    def _can_stack(self, module: nn.Module, boundary: Boundary) -> bool:
        """Try a step: some operators have no rule for stacks, or only a slow one, which PyTorch warns about."""
        manifest, rows = self.manifest, TRIED * TRIED
        x = sample_of(manifest, rows, 1)
        labels = random_labels(manifest, rows, 1).astype(manifest.labels.dtype)
        data = (part.reshape(TRIED, TRIED, *part.shape[1:]) for part in (self.entered(boundary, x), labels))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a processor lacks is no reason
                warnings.filterwarnings("error", NO_RULE)
                StackedStep(module, manifest, boundary, TRIED).run(*data)
        except OutOfMemory:
            raise
        except Exception:  # whatever it is that stacks cannot do, devices are trained one by one
            return False
        return True

    def entered(self, boundary: Boundary, inputs: NDArray[Any]) -> NDArray[Any]:
        """Compute what enters the boundary's layer."""
        return self.engine.entering(boundary, inputs) if self.manifest.frozen(boundary) else inputs


class _Stack:
    """Trains one stack of devices."""

    def __init__(
        self,
        trainer: StackedTrainer,
        covered: Coverage,
        module: nn.Module,
        members: Sequence[tuple[Task, Received, TrainingSamples]],
    ) -> None:
        received = [start for _, start, _ in members]
        self.trainer = trainer
        self.boundary = covered.boundary
        self.tasks = [task for task, _, _ in members]
        self.samples = [data for _, _, data in members]
        self.task = self.tasks[0]
        self.batch = min(self.task.batch, len(self.samples[0]))
        self.step = StackedStep(module, trainer.manifest, self.boundary, len(members))
        self.began = time.perf_counter()
        self.step.parameters[:] = self.step.stack([start.parameters for start in received])
        start = Start(
            self.step.parameters,
            self.task.steps,
            self.task.rate,
            self.step.stack([r.origin for r in received]),
            {name: self.step.stack([r.brought[name] for r in received]) for name in received[0].brought},
            received[0].steps_before,
        )
        own = runs(self.boundary.space(trainer.manifest), self.boundary.layer, covered.layers)
        self.local = LocalStep(self.task.rules, start, *map(self.step.stretched, own))
        self.name = trainer.manifest.tiers.get(self.task.boundary, self.task.boundary)

    def run(self, seen: Seen | None = None) -> list[Outcome | NonFiniteLoss]:
        read = self._reader()
        losses = np.empty((self.task.steps, len(self.tasks)), np.float64)
        for number in range(self.task.steps):
            losses[number] = self.step.run(*read(number))
            if self.task.clip_norm is not None:
                self.step.clip(self.task.clip_norm)
            self.local.step(self.step.gradients, self.task.rate)
            if seen is not None:
                for row in range(len(self.tasks)):
                    seen(row, self.step.row(self.local.x, row))
        update, state = self.local.update(), self.local.state()
        seconds = (time.perf_counter() - self.began) / len(self.tasks)
        return [self._outcome(row, losses[:, row], update, state, seconds) for row in range(len(self.tasks))]

    def _outcome(
        self, row: int, losses: NDArray[np.float64], update: Vector, state: dict[str, Vector], seconds: float
    ) -> Outcome | NonFiniteLoss:
        task, x = self.tasks[row], self.step.row(self.local.x, row)
        bad = np.flatnonzero(~np.isfinite(losses))
        with np.errstate(over="ignore", invalid="ignore"):
            finite = bool(np.isfinite(np.dot(x, x)))
        if bad.size or not finite:
            where = f"the loss is {losses[bad[0]]} at step {bad[0] + 1}" if bad.size else "parameters are not finite"
            return NonFiniteLoss(f"{where} of round {task.round} with the rate {task.rate:g}; use a smaller rate")
        report = Report(
            status="done",
            boundary=self.name,
            engine=self.trainer.engine.name,
            profile="fast",
            round=task.round,
            steps=task.steps,
            batch=self.batch,
            samples=len(self.samples[row]),
            loss=math.fsum(losses) / len(losses),
            last_loss=float(losses[-1]),
            seconds={"wall": seconds, "together": len(self.tasks)},
        )
        own = {name: self.step.row(vector, row) for name, vector in state.items()}
        return Outcome(x, StackedResult(x, self.local.rates, self.local.steps, self.step.row(update, row), own), report)  # type: ignore[arg-type]

    def _reader(self) -> Callable[[int], tuple[NDArray[Any], NDArray[Any]]]:
        """Return a function that reads the inputs of the boundary's layer and the labels of a step, by its number."""
        orders = [
            list(batches(len(data), self.batch, task)) for task, data in zip(self.tasks, self.samples, strict=True)
        ]
        augmentation = Augmentation(self.task.crop, self.task.flip)
        owners = [data for data in self.samples if isinstance(data, SharedSamples)]
        shared = len(owners) == len(self.samples) and all(data.inputs is owners[0].inputs for data in owners)
        if shared and not augmentation:
            first = owners[0]
            each = [[data.numbers[indices] for _, indices in order] for data, order in zip(owners, orders)]
            numbers = np.stack([np.stack(rows) for rows in each], axis=1)  # step, device, sample
            x = aligned(np.empty((numbers[0].size, *first.inputs.shape[1:]), first.inputs.dtype)).numpy()
            y = np.empty((numbers[0].size, *first.all_labels.shape[1:]), first.all_labels.dtype)

            def gather(number: int) -> tuple[NDArray[Any], NDArray[Any]]:
                chosen = numbers[number].reshape(-1)
                np.take(first.inputs, chosen, axis=0, out=x, mode="clip")  # any other mode makes a copy first
                np.take(first.all_labels, chosen, axis=0, out=y, mode="clip")
                return self._entered(x), self._stacked(y)

            return gather

        def read(number: int) -> tuple[NDArray[Any], NDArray[Any]]:
            found = []
            for task, data, order in zip(self.tasks, self.samples, orders, strict=True):
                epoch, indices = order[number]
                inputs, labels = data.batch(indices)
                found.append((augmentation.apply(inputs, indices, task.seed, epoch), labels))
            inputs, labels = (np.concatenate(part) for part in zip(*found, strict=True))
            return self._entered(inputs), self._stacked(labels)

        return read

    def _entered(self, inputs: NDArray[Any]) -> NDArray[Any]:
        return self._stacked(self.trainer.entered(self.boundary, inputs))

    def _stacked(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows.reshape(len(self.tasks), self.batch, *rows.shape[1:])
