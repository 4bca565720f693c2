"""Do the work of one process of a simulation: train its share of a round's devices, or score some test samples.

settings    {"bundle", "plan", "rules", "folder", "engine", "probe": samples on which local models are compared,
            "vectors": names, "devices": [[id, first, held, end], ...]}
            of a device's numbers those from `held` on are held out
shared      vectors [V, P], numbers [samples of all devices], inputs and labels of the training and the test data
job         {"work": a share of a round}  or  {"score": [start, stop], "version": of the model,
            "statistics": of batch norm, global or static}
slot        sums [tracks, P]; apart [steps, P], where the distance of local models is measured
answer      {"done": ..., "totals": {track: the rest of its sums}, "apart": the rest of its}  or  {"score": ...}
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edge_runtime.bundle_files import read_manifest
from edge_runtime.calibrate import batches_of, calibrated
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.engine import GradientStep
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import TrainedSource
from edge_runtime.trainer import Outcome, Received, Trainer
from federation.coverage import coverage
from federation.errors import NonFiniteLoss
from federation.job import plan_from
from federation.layout import MODEL
from federation.manifest import Boundary, Manifest
from federation.messages import Task
from federation.metrics import Score
from federation.space import Vector
from simulation.apart import Seen
from simulation.devices import Devices, Share
from simulation.own_rules import resolver
from simulation.pool import Arrays, Json, Work
from simulation.server import past
from simulation.shared_samples import SharedSamples

if TYPE_CHECKING:
    from simulation.layer_outputs import LayerOutputs


def build(settings: dict[str, Any], shared: Arrays) -> Work:
    """Return the work, with modules and data that stay from job to job."""
    return FleetWorker(settings, shared).work


class FleetEngine(Protocol):
    """Trains and scores simulated devices in one process."""

    def train(
        self, devices: Sequence[str], tasks: Sequence[Task], received: Sequence[Received], seen: Seen | None, age: int
    ) -> list[Outcome | NonFiniteLoss]:
        """Run some devices' tasks; `seen` gets their local models after every step.

        The frozen layers are those of the model as it was `age` rounds ago.
        """

    def open_step(self, boundary: Boundary) -> GradientStep:
        """Open a training step of the model."""

    def score(self, samples: SharedSamples, weights: Vector) -> Score:
        """Score weights of the whole model."""

    def one_thread(self) -> AbstractContextManager[None]:
        """Compute with a single thread meanwhile."""


@dataclass
class GlobalSource:
    """The global weights of a simulation: an engine that has them needs no files, only to know when they changed."""

    manifest: Manifest
    version: str = ""
    lineage: str = ""  # a simulation is one training

    def fetch_weights(self, layers: range) -> None:
        pass

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        raise AssertionError("the engine has the weights")

    def fetch_head(self, boundary: Boundary) -> Path:
        raise AssertionError("the engine has the weights")

    def fetch_step(self, boundary: Boundary) -> tuple[Path, Vector]:
        raise AssertionError("the engine has the weights")

    def release(self, layer: int) -> None:
        raise AssertionError("the engine has the weights")


class FleetWorker:
    """One process's model, data and devices."""

    def __init__(self, settings: dict[str, Any], shared: Arrays) -> None:
        """`settings["plan"]` is JSON, or in the process of the caller a plan itself."""
        self.shared = shared
        self.folder = Path(settings["folder"])
        self.probe = shared["test_inputs"][: settings["probe"]]
        self.bundle = Path(settings["bundle"])
        self.manifest = read_manifest(self.bundle)
        rows = shared["vectors"][:, : self.manifest.space.size]
        self.vectors = {name: rows[row] for row, name in enumerate(settings["vectors"])}
        self._places = {device: places for device, *places in settings["devices"]}
        self._engine: FleetEngine = _Portable(self) if settings["engine"] == "portable" else _Torch(self)
        self._resolve = resolver(settings["rules"])
        self._plan = plan_from(settings["plan"], self._resolve)
        self._devices = Devices(
            self._plan, self.manifest, self.vectors, self.folder, self._engine.train, self._score_held_out, self._look
        )
        self._calibrated: tuple[int, Vector] | None = None  # with the version it was computed from

    def work(self, job: Json, slot: Arrays) -> Json:
        """Do a job and fill the slot."""
        with self._engine.one_thread():
            if "score" in job:
                return {"score": asdict(self._score(job["score"], job["version"], job["statistics"]))}
            done = self._devices.run(Share.decode(job["work"], self._resolve))
        totals = {}
        for row, (name, total) in enumerate(done.sums.totals.items()):
            totals[name], slot["sums"][row] = total.dump()
        apart = done.apart.dump(slot["apart"]) if done.apart else None
        return {"done": done.encode(), "totals": totals, "apart": apart}

    @cached_property
    def _outputs(self) -> LayerOutputs:
        from simulation.layer_outputs import LayerOutputs

        return LayerOutputs(self.bundle, self.manifest, self.probe, self.folder)

    def _look(self, slot: int, weights: Vector) -> None:
        self._outputs.look(slot, weights)

    def samples(self, device: str) -> SharedSamples:
        """Return the training samples of a device."""
        first, held, _ = self._places[device]
        return self._samples(device, first, held)

    def _samples(self, device: str, first: int, end: int) -> SharedSamples:
        numbers = self.shared["numbers"][first:end]
        return SharedSamples(self.shared["inputs"], self.shared["labels"], numbers, device)

    def _score_held_out(self, device: str) -> dict[str, Any]:
        """Score the version of the round as the device would, on what it never trains on."""
        _, held, end = self._places[device]
        if held == end:
            return {}
        found = self._engine.score(self._samples(device, held, end), self.vectors[MODEL])
        return asdict(found) if math.isfinite(found.loss) else {}

    def _score(self, part: Sequence[int], version: int, statistics: str) -> Score:
        """Score the global weights on some of the test samples, with global or static statistics of batch norm."""
        inputs, labels = self.shared["test_inputs"], self.shared["test_labels"]
        samples = SharedSamples(inputs, labels, np.arange(*part), "the test data")
        return self._engine.score(
            samples, self._calibrated_weights(version) if statistics == "static" else self.vectors[MODEL]
        )

    def _calibrated_weights(self, version: int) -> Vector:
        weights: Vector = self.vectors[MODEL]
        if self._calibrated is None or self._calibrated[0] != version:
            step, inputs = self._engine.open_step(self.manifest.whole), self.shared["inputs"]
            everything = SharedSamples(inputs, self.shared["labels"], np.arange(len(inputs)), "the training data")
            self._calibrated = version, calibrated(step, self.manifest.space, weights, batches_of(everything))
        return self._calibrated[1]


class _Torch:
    """PyTorch, several small devices at once. Only this engine loads it."""

    def __init__(self, worker: FleetWorker) -> None:
        from simulation.heap import keep_freed_memory
        from simulation.kept_trainers import KeptTrainers
        from simulation.stacked_trainer import StackedTrainer
        from simulation.torch_engine import TorchEngine, aligned, one_thread

        def trainer(age: int) -> StackedTrainer:
            """Make the trainer of devices whose frozen layers are so many rounds old."""
            engine = TorchEngine(worker.bundle, worker.manifest, worker.vectors[past(age)])
            return StackedTrainer(engine, GlobalSource(worker.manifest), kept)

        def digest(number: int, age: int, stop: int) -> str:
            """Hash the first weights of the model as it was so many rounds before this one."""
            return sha256(worker.vectors[past(age)][:stop].data).hexdigest()

        keep_freed_memory()
        kept = KeptTrainers()
        self._worker = worker
        self._trainer = lru_cache(None)(trainer)
        self._digest = lru_cache(maxsize=16)(digest)
        self._engine = self._trainer(0).engine
        self._aligned = aligned
        self.one_thread = one_thread

    def train(
        self, devices: Sequence[str], tasks: Sequence[Task], received: Sequence[Received], seen: Seen | None, age: int
    ) -> list[Outcome | NonFiniteLoss]:
        trainer = self._trainer(age)
        trainer.source.version = self._version(tasks[0], age)
        return trainer.train(tasks, received, [self._worker.samples(device) for device in devices], seen)

    def _version(self, task: Task, age: int) -> str:
        """Name the frozen layers: by what they are where activations of an earlier round may still be theirs."""
        if task.refresh_every == 1:
            return str(task.round)
        space, boundary = self._worker.manifest.space, coverage(self._worker.manifest, task.boundary).boundary
        stop = space.suffix(boundary.layer).start if boundary.head is None else space.size  # heads are frozen, too
        return self._digest(task.round, age, stop)

    def open_step(self, boundary: Boundary) -> GradientStep:
        return self._engine.open_step(boundary)

    def score(self, samples: SharedSamples, weights: Vector) -> Score:
        if weights is self._worker.vectors[MODEL]:
            return self._engine.score(samples)
        own = self._aligned(weights).numpy()
        return type(self._engine)(self._worker.bundle, self._worker.manifest, own).score(samples)


class _Portable:
    """The graphs that devices run, on onnxruntime: exact device arithmetic, one device after the other."""

    def __init__(self, worker: FleetWorker) -> None:
        self._worker = worker
        self._version = -1, 0  # round, and how old its frozen layers are

    def train(
        self, devices: Sequence[str], tasks: Sequence[Task], received: Sequence[Received], seen: Seen | None, age: int
    ) -> list[Outcome | NonFiniteLoss]:
        each = enumerate(zip(devices, tasks, received, strict=True))
        return [self._one(*given, partial(seen, place) if seen else lambda model: None, age) for place, given in each]

    def _one(
        self, device: str, task: Task, received: Received, seen: Callable[[Vector], None], age: int
    ) -> Outcome | NonFiniteLoss:
        if (task.round, age) != self._version:
            if self.__dict__.pop("_layers", None) is not None:
                self._forget_layers()
            self._version = task.round, age
        samples, settings = self._worker.samples(device), RuntimeSettings(threads=1)
        trainer = Trainer(
            self._worker.bundle,
            self._layers,
            samples,
            settings=settings,
            measures_memory=False,
            stores_all=False,
            seen=seen,
        )
        try:
            return trainer.run(replace(task, refresh_every=1), received)  # the layers are those of the right round
        except NonFiniteLoss as error:
            return error

    @cached_property
    def _layers(self) -> TrainedSource:
        """The frozen layers of a version, in a folder of this process."""
        folder = Path(tempfile.mkdtemp(prefix="layers-", dir=self._worker.folder))
        self._forget_layers = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        weights = self._worker.vectors[past(self._version[1])]
        source = TrainedSource(self._worker.bundle, self._worker.manifest, 0, weights, folder)
        source.version = str(self._version)
        return source

    def open_step(self, boundary: Boundary) -> GradientStep:
        return open_step(self._worker.bundle, self._worker.manifest, boundary, "portable", RuntimeSettings(threads=1))

    def score(self, samples: SharedSamples, weights: Vector) -> Score:
        source, plan = GlobalSource(self._worker.manifest), ForwardPlan(folder=self._worker.folder)
        evaluator = Evaluator(self._worker.bundle, source, 0, samples, settings=RuntimeSettings(threads=1), plan=plan)
        return evaluator.score(weights)

    def one_thread(self) -> AbstractContextManager[None]:
        return nullcontext()
