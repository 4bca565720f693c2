"""A fleet in one process: the real server, device and wire code around a problem whose gradient is written out by hand.

It is what `embrace simulate` runs (simulation) but for the network: instead of PyTorch the closed form of
tests/oracles/problem.py gives the gradients, so that the difference from an oracle is the rounding of float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.device_state import KeptFiles
from edge_runtime.engine.ordered_dropout import draw_width
from edge_runtime.trainer import Outcome, Received, step_seed
from federation.accumulate import Accumulator
from federation.axes.cover import DeviceProfile
from federation.axes.local import LocalStep, Start, runs
from federation.coverage import Coverage, coverage
from federation.errors import NonFiniteLoss
from federation.job import plan_from
from federation.layout import MODEL
from federation.manifest import Boundary, Loss, Manifest, TensorSpec
from federation.messages import Report, Task
from federation.narrow import corners, take_corners
from federation.round_sums import RoundSums
from federation.space import Parameter, ParameterSpace, Vector
from simulation.devices import Devices, Done, Share
from simulation.server import Invited, SeatTask, SimulatedServer
from tests import tiny_bundle
from tests.oracles.model import Model, flat
from tests.oracles.problem import (
    CLASSES,
    FIRST,
    INPUTS,
    LAYERS,
    SECOND,
    Problem,
    make_model,
    make_problem,
    narrow_shapes,
)

PROBLEM = make_problem(batch=4)
START = make_model()
WIDTHS = (0.5, 0.25)  # of the narrow boundaries
TIERS = {"moderate": 0.5, "weak": 0.25}
SEEN = "second.seen"  # a running mean, where a test asks for statistics


def manifest(*, statistics: bool = False, widths: Sequence[float] = WIDTHS, joined: bool = False) -> Manifest:
    """The oracles' three layers as a bundle without graphs; `joined`: the first two are one piece of it."""
    sizes = (INPUTS, FIRST, SECOND, CLASSES)
    layers, names, starts = [], LAYERS[::2] if joined else LAYERS, (0, 2, 3) if joined else (0, 1, 2, 3)
    for name, shapes, (first, end) in zip(names, _shapes(1.0, statistics, joined), pairwise(starts)):
        parameters = [Parameter(name, _kind(name), shape) for name, shape in shapes.items()]
        entry, leaves = (TensorSpec("float32", (sizes[at],)) for at in (first, end))
        layers.append(
            tiny_bundle.layer(
                name, *parameters, activations=sum(sizes[first + 1 : end + 1]), input=entry, output=leaves
            )
        )
    boundaries = [
        tiny_bundle.boundary(name, at, sum(sizes[first + 1 :])) for at, (name, first) in enumerate(zip(names, starts))
    ]
    for width in widths:
        narrow = tuple(tuple(shapes.values()) for shapes in _shapes(width, statistics, joined))
        boundaries.append(tiny_bundle.boundary(f"first@{width:g}", 0, 9, width=width, narrow=narrow))
    return tiny_bundle.manifest(
        layers,
        boundaries,
        {"strong": "first", **({} if joined else {"moderate": "second"}), "weak": "head"},
        loss=Loss("cross_entropy"),
        labels=TensorSpec("int64", ()),
        batch=4,
    )


def _shapes(width: float, statistics: bool, joined: bool) -> list[dict[str, tuple[int, ...]]]:
    first, second, head = narrow_shapes(width)
    second |= {SEEN: second["second.bias"]} if statistics else {}
    return [{**first, **second}, head] if joined else [first, second, head]


def _kind(name: str) -> Any:
    return "statistic" if name == SEEN else "weight"


def _profile(told: str | int) -> DeviceProfile:
    return DeviceProfile(tier=told) if isinstance(told, str) else DeviceProfile(memory=told)


def model_of(space: ParameterSpace, vector: Vector) -> Model:
    """A flat vector as a model of the oracles; statistics are left out."""
    views = space.views(np.asarray(vector))
    weights = groupby((p.name for p in space if p.kind == "weight"), lambda name: name.partition(".")[0])
    return [{name: views[name].astype(np.float64) for name in layer} for _, layer in weights]


@dataclass(frozen=True)
class Round:
    """What one round left behind."""

    seats: list[SeatTask]
    reports: list[dict[str, Any]]
    vectors: dict[str, Vector]
    sums: RoundSums

    @property
    def drawn(self) -> list[int]:
        """The devices as an oracle wants them: as often as they were drawn."""
        return [int(seat.device) for seat in self.seats for _ in range(seat.count)]


@dataclass
class Fleet:
    """One run. `tiers` has a tier for every device, or its bytes of memory; without it all are strong."""

    job: Mapping[str, Any]
    folder: Path
    tiers: Mapping[int, str | int] = field(default_factory=dict)
    statistics: bool = False
    problem: Problem = PROBLEM
    most: int | None = None  # steps that the oracle counts for a round
    widths: Sequence[float] = WIDTHS
    joined: bool = False  # the first two layers are one piece of the bundle

    def __post_init__(self) -> None:
        self.manifest = manifest(statistics=self.statistics, widths=self.widths, joined=self.joined)
        self.space = self.manifest.space
        self.plan = plan_from({"bundle": "none", **self.job})
        profiles = {str(i): _profile(self.tiers.get(i, "strong")) for i in range(self.problem.devices)}
        self.server = SimulatedServer(self.plan, self.manifest, profiles, self._start())
        self.losing: set[int] = set()  # devices whose training diverges
        self.saved = 0  # the round that a checkpoint goes on with

    def _start(self) -> Vector:
        vector = np.zeros(self.space.size, np.float32)
        views = self.space.views(vector)
        for layer in START:
            for name, value in layer.items():
                views[name][...] = value
        return vector

    def model(self, vector: Vector | None = None) -> Model:
        return model_of(self.space, self.server.state.vectors[MODEL] if vector is None else vector)

    def kept(self, each: Round, device: int, name: str) -> Model:
        """What a device kept of a round, which must be its last."""
        task = next(seat.id for seat in each.seats if int(seat.device) == device)
        kept = KeptFiles(self.folder / "kept" / str(device)).load(task)
        assert kept is not None, f"device {device} keeps nothing of task {task}"
        return self.model(kept.vectors[name])

    def rounds(self, count: int | None = None, **how: Any) -> list[Round]:
        return [self.round(**how) for _ in range(self.plan.num_rounds if count is None else count)]

    def round(self, *, processes: int = 1, group: int = 2, backwards: bool = False) -> Round:
        """A round with the devices in groups, the groups dealt to so many processes, the sums merged."""
        server = self.server
        number, invited = server.state.number, server.invite()
        seats = invited.seats
        placed = seats[::-1] if backwards else seats
        groups = [list(placed[start : start + group]) for start in range(0, len(placed), group)]
        parts = [groups[first::processes] for first in range(processes)]
        draws, hands_on = invited.draws, server.engine.inherits(number + 1)
        sums, done = server.sums(invited), []
        for part in parts[::-1] if backwards else parts:
            share = Share(number, server.state.facts, draws, part, hands_on, saved=self.saved)
            done.append(self._devices().run(Share.decode(json.loads(json.dumps(share.encode())))))
            for name, total in done[-1].sums.totals.items():
                sums.merge(name, Accumulator.load(self.space, *total.dump()))
        return self._closed(invited, sums, done)

    def _devices(self) -> Devices:
        return Devices(self.plan, self.manifest, self.server.state.vectors, self.folder, self.train)

    def _closed(self, invited: Invited, sums: RoundSums, done: Sequence[Done]) -> Round:
        arrived = {slot for part in done for slot in part.arrived}
        self.server.close(invited, [seat for seat in invited.seats if seat.slot in arrived], sums)
        vectors = {name: np.array(vector) for name, vector in self.server.state.vectors.items()}
        return Round(invited.seats, [report for part in done for report in part.reports], vectors, sums)

    # --- the training of one device ----------------------------------------------------------------------------------

    def train(
        self,
        devices: Sequence[str],
        tasks: Sequence[Task],
        received: Sequence[Received],
        seen: object = None,
        age: int = 0,
    ) -> list[Outcome | NonFiniteLoss]:
        return [self._trained(int(device), *given) for device, *given in zip(devices, tasks, received, strict=True)]

    def _trained(self, device: int, task: Task, received: Received) -> Outcome | NonFiniteLoss:
        if device in self.losing:
            return NonFiniteLoss("the loss is nan")
        task = task.for_samples(self.problem.samples[device])
        covered = coverage(self.manifest, task.boundary)
        x = np.array(received.parameters)
        start = Start(x, task.steps, task.rate, received.origin, received.brought)
        space = covered.boundary.space(self.manifest)
        local = LocalStep(task.rules, start, *runs(space, covered.boundary.layer, covered.layers))
        first = task.round * (self.most or task.steps)
        for number in range(task.steps):
            local.step(self._gradients(device, task, covered, x, first + number, number), task.rate)
        report = Report(
            "done",
            task.boundary,
            "closed form",
            "fast",
            task.round,
            task.steps,
            task.batch,
            self.problem.samples[device],
            0.0,
            0.0,
        )
        return Outcome(x, local, report)

    def _gradients(self, device: int, task: Task, covered: Coverage, x: Vector, step: int, number: int) -> Vector:
        """Of everything that the graph works on; what a device does not train, `LocalStep` leaves alone."""
        if len(covered.ordered) < 2:
            return self._of_graph(device, covered.boundary, x, step)
        drawn = covered.ordered[draw_width(step_seed(task, number), len(covered.ordered))]
        wide, narrow = (boundary.space(self.manifest) for boundary in (covered.boundary, drawn))
        found = np.zeros_like(x)
        views, kept = wide.views(found), wide.views(x)
        for parameter in wide:
            if parameter.kind == "statistic":
                views[parameter.name][...] = kept[parameter.name]
        inner = narrow.views(self._of_graph(device, drawn, take_corners(wide, x, narrow), step))
        for name, place in corners(wide, found, narrow):
            place[...] = inner[name]
        return found

    def _of_graph(self, device: int, boundary: Boundary, x: Vector, step: int) -> Vector:
        space, layer = boundary.space(self.manifest), boundary.layer
        start = space.layer(layer).start
        everything = np.array(x)
        if start:  # the frozen layers are those of the round's version
            everything = np.concatenate([self.server.state.vectors[MODEL][:start], x])
        gradient = self.problem.gradient(device, model_of(space, everything), step)
        values = {name: value for part in gradient for name, value in part.items()}
        if self.statistics:
            values[SEEN] = 0.9 * space.views(everything)[SEEN] + 0.1 * (device + math.sin(step))
        found = np.concatenate([np.ravel(values[parameter.name]) for parameter in space])
        return found[start:].astype(np.float32)


def assert_close(found: Model, expected: Model, tolerance: float = 3e-6) -> None:
    """The same but for float32; magnitudes here are about 1."""
    np.testing.assert_allclose(flat(found), flat(expected), rtol=tolerance, atol=tolerance)
