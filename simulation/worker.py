"""What a worker process of a simulation does: trains its share of a round's devices, or scores some test samples.

settings    {"bundle", "plan", "folder", "engine", "vectors": names, "devices": [[id, first, end], ...]}
shared      vectors [V, P], numbers [samples of all devices], inputs and labels of the training and the test data
job         {"work": a share of a round}  or  {"score": [start, stop]}
slot        sums [tracks, P]
answer      {"done": ..., "totals": {track: the rest of its sums}}  or  {"score": ...}
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from edge_runtime.bundle_files import read_manifest
from edge_runtime.calibrate import batches_of, calibrated
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.engine import GradientStep
from edge_runtime.engine.session import Settings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import TrainedSource
from edge_runtime.trainer import Outcome, Received, Trainer
from federation.errors import NonFiniteLoss
from federation.job import plan_from
from federation.layout import MODEL
from federation.manifest import Boundary
from federation.messages import Task
from federation.metrics import Score
from federation.space import Vector
from simulation.devices import Devices, Share
from simulation.layer_outputs import Outputs
from simulation.pool import Arrays, Job, Work
from simulation.shared_samples import ReadySamples
from simulation.stacked_trainer import GroupTrainer
from simulation.torch_engine import GlobalSource, TorchEngine


def build(settings: Job, shared: Arrays) -> Work:
    """The work, with modules and data that stay from job to job."""
    torch.set_num_threads(1)
    return _Worker(settings, shared).work


class _Worker:
    def __init__(self, settings: Job, shared: Arrays) -> None:
        self.settings = settings
        self.shared = shared
        self.folder = Path(settings["folder"])
        self.bundle = Path(settings["bundle"])
        self.manifest = read_manifest(self.bundle)
        self.vectors = {name: shared["vectors"][row] for row, name in enumerate(settings["vectors"])}
        self._places = {device: (first, end) for device, first, end in settings["devices"]}
        self._engine = _Portable(self) if settings["engine"] == "portable" else _Torch(self)
        self._plan = plan_from(settings["plan"])
        self._devices = Devices(self._plan, self.manifest, self.vectors, self.folder, self._engine.train, self._look)

    def work(self, job: Job, slot: Arrays) -> Job:
        if "score" in job:
            return {"score": asdict(self._score(*job["score"]))}
        done = self._devices.run(Share.decode(job["work"]))
        totals = {}
        for row, (name, total) in enumerate(done.sums.totals.items()):
            totals[name], slot["sums"][row] = total.dump()
        return {"done": done.encode(), "totals": totals}

    @cached_property
    def _outputs(self) -> Outputs:
        return Outputs(self.bundle, self.manifest, self.shared["test_inputs"], self.folder)

    def _look(self, slot: int, weights: Vector) -> None:
        self._outputs.look(slot, weights)

    def samples(self, device: str) -> ReadySamples:
        first, end = self._places[device]
        numbers = self.shared["numbers"][first:end]
        return ReadySamples(self.shared["inputs"], self.shared["labels"], numbers, device)

    def _score(self, start: int, stop: int) -> Score:
        """Of some of the test samples, with the global weights."""
        inputs, labels = self.shared["test_inputs"], self.shared["test_labels"]
        weights = self.vectors[MODEL]
        if self._plan.evaluate.statistics == "static":
            step = self._engine.open_step(self.manifest.whole)
            weights = calibrated(step, self.manifest.space, weights, batches_of(self._of_all_devices()))  # type: ignore[arg-type]
        return self._engine.score(ReadySamples(inputs, labels, np.arange(start, stop), "the test data"), weights)

    def _of_all_devices(self) -> ReadySamples:
        inputs = self.shared["inputs"]
        return ReadySamples(inputs, self.shared["labels"], np.arange(len(inputs)), "the training data")


class _Torch:
    """PyTorch, several small devices at once."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._source = GlobalSource(worker.manifest)
        self._engine = TorchEngine(worker.bundle, worker.manifest, worker.vectors[MODEL])
        self._trainer = GroupTrainer(self._engine, self._source)

    def train(
        self, devices: Sequence[str], tasks: Sequence[Task], received: Sequence[Received]
    ) -> list[Outcome | NonFiniteLoss]:
        self._source.version = str(tasks[0].round)
        return self._trainer.train_group(tasks, received, [self._worker.samples(device) for device in devices])

    def open_step(self, boundary: Boundary) -> GradientStep:
        return self._engine.open_step(boundary)

    def score(self, samples: ReadySamples, weights: Vector) -> Score:
        same = weights is self._worker.vectors[MODEL]
        engine = self._engine if same else TorchEngine(self._worker.bundle, self._worker.manifest, weights)
        return engine.score(samples)  # type: ignore[arg-type]


class _Portable:
    """The graphs that devices run, on onnxruntime: exact device arithmetic, one device after the other."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._version = -1

    def train(
        self, devices: Sequence[str], tasks: Sequence[Task], received: Sequence[Received]
    ) -> list[Outcome | NonFiniteLoss]:
        return [self._one(*given) for given in zip(devices, tasks, received, strict=True)]

    def _one(self, device: str, task: Task, received: Received) -> Outcome | NonFiniteLoss:
        if task.round != self._version:
            if self.__dict__.pop("_layers", None) is not None:
                self._forget_layers()
            self._version = task.round
        trainer = Trainer(
            self._worker.bundle,
            self._layers,
            self._worker.samples(device),  # type: ignore[arg-type]
            settings=Settings(threads=1),
            measures_memory=False,
        )
        try:
            return trainer.run(task, received)
        except NonFiniteLoss as error:
            return error

    @cached_property
    def _layers(self) -> TrainedSource:
        """The frozen layers of a version, in a folder of this process."""
        folder = Path(tempfile.mkdtemp(prefix="layers-", dir=self._worker.folder))
        self._forget_layers = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        weights = self._worker.vectors[MODEL]
        source = TrainedSource(self._worker.bundle, self._worker.manifest, 0, weights, folder)
        source.version = str(self._version)
        return source

    def open_step(self, boundary: Boundary) -> GradientStep:
        return open_step(self._worker.bundle, self._worker.manifest, boundary, "portable", Settings(threads=1))

    def score(self, samples: ReadySamples, weights: Vector) -> Score:
        evaluator = Evaluator(
            self._worker.bundle,
            GlobalSource(self._worker.manifest),
            0,
            samples,  # type: ignore[arg-type]
            settings=Settings(threads=1),
            plan=ForwardPlan(folder=self._worker.folder),
        )
        return evaluator.score(weights)
