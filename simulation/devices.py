"""Simulated devices at work in one process: several tasks of a round, with the code that devices run.

What a device keeps lies in files of the run's folder, under the names of tasks, so that any process can go on with any
device. Updates are checked and folded by the coordinator's own code: the same bits come of it. What it would read from
the wire it gets as it lies in memory; only the header, which says what is known here, is not written and read again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edge_runtime.device_state import KeptFiles
from edge_runtime.participant import Begun, Contribution, begin, finish
from edge_runtime.state_file import load_state, save_state
from edge_runtime.trainer import Outcome, Received
from federation.algorithm import Facts
from federation.cohort import Seat
from federation.coverage import coverage
from federation.decode import Resolve, decode, encode
from federation.device_task import Part
from federation.engine import RoundEngine
from federation.errors import NonFiniteLoss
from federation.exchange import Inherit, update_regions
from federation.job import Plan
from federation.layout import MODEL, Layout
from federation.manifest import Manifest
from federation.messages import Task
from federation.region import Region, of_layers
from federation.round_sums import RoundSums
from federation.rounds import encode_seat
from federation.space import Vector
from federation.traffic import Traffic, traffic_of
from federation.wire import CheckedUpdate, WireError, check_data
from simulation.apart import Seen, StepSums
from simulation.server import BEFORE, SeatTask

KEPT = "kept"  # in a run's folder: what devices keep, a folder for each
HANDED_ON = "handed-on"  # ... and local models that another device goes on with


class TrainGroup(Protocol):
    """Trains some devices, together or one by one."""

    def __call__(
        self, devices: Sequence[str], tasks: Sequence[Task], received: Sequence[Received], seen: Seen | None, age: int
    ) -> list[Outcome | NonFiniteLoss]: ...


@dataclass(frozen=True)
class Share:
    """A share of a round for one process."""

    number: int
    facts: Facts
    draws: int
    groups: list[list[SeatTask]]
    hands_on: bool = False  # the next round goes on with these local models
    compares: bool = False  # these local models are compared with each other
    apart: bool = False  # and their distance is measured after every step
    saved: int = 0  # the round with which the run would go on, if it ended now

    def files(self, keeps: bool) -> list[str]:
        """List what its devices go on with, below the run's folder; `keeps` says whether devices keep anything."""
        seats = [seat for group in self.groups for seat in group]
        inherited = (seat.task.exchange.inherit for seat in seats)
        handed_on = [f"{HANDED_ON}/{inherit.task}" for inherit in inherited if inherit is not None]
        return [*(f"{KEPT}/{seat.device}" for seat in seats if keeps), *handed_on]

    def encode(self) -> dict[str, Any]:
        """For JSON. A task that is the one before but for its seed is not written again."""
        tasks: list[Task] = []
        groups = []
        for group in self.groups:
            seats = []
            for seat in group:
                plain = replace(seat.task, seed=0)
                tasks += [] if tasks and tasks[-1] == plain else [plain]
                place = {"id": seat.id, "seat": encode_seat(seat.seat), "age": seat.age}
                seats.append({**place, "task": [len(tasks) - 1, seat.task.seed]})
            groups.append(seats)
        written = [encode(task, own_rules=True) for task in tasks]
        return {**vars(self), "facts": asdict(self.facts), "tasks": written, "groups": groups}

    @classmethod
    def decode(cls, data: dict[str, Any], resolve: Resolve | None = None) -> Share:
        """Read what `encode` made; `resolve` finds rules of the user's own."""
        rest = {**data, "facts": decode(Facts, data["facts"], "facts")}
        tasks = [decode(Task, told, "task", defaults=True, resolve=resolve) for told in rest.pop("tasks")]

        def seat(told: dict[str, Any]) -> SeatTask:
            number, seed = told["task"]
            own = decode(Seat, told["seat"], "seat")
            return SeatTask(told["id"], own, replace(tasks[number], seed=seed), told["age"])

        return cls(**{**rest, "groups": [list(map(seat, group)) for group in data["groups"]]})


@dataclass
class Done:
    """What came of it."""

    sums: RoundSums
    arrived: list[int] = field(default_factory=list)  # slots
    reports: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    apart: StepSums | None = None

    def encode(self) -> dict[str, Any]:
        """For JSON; the sums go another way."""
        told = {"arrived": self.arrived, "reports": self.reports, "failures": self.failures}
        return {**told, "traffic": asdict(self.traffic)}


class Devices:
    """The devices of one process."""

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        vectors: dict[str, Vector],
        folder: Path,
        train: TrainGroup,
        score: Callable[[str], dict[str, Any]] = lambda device: {},
        look: Callable[[int, Vector], None] = lambda slot, weights: None,
    ) -> None:
        """`vectors` are the server's, read where they lie; `score` scores them on what a device holds out.

        `look` sees whole local models that are to be compared.
        """
        self.manifest = manifest
        self.vectors = vectors
        self.folder = folder
        self.train = train
        self.score = score
        self.look = look
        self.engine = RoundEngine(plan, manifest)

    def run(self, work: Share) -> Done:
        """All tasks of a share, folded."""
        done = Done(self.engine.sums(work.number, work.facts, work.draws))
        if work.apart:
            done.apart = StepSums(self.engine.plan, self.manifest.space, work.draws)
        for group in _of_one_age(work.groups):
            servers = [_Vectors(self.vectors, self._handed_on, seat.task) for seat in group]
            begun = [
                begin(seat.task, self.manifest, server, self._kept(seat.device))
                for seat, server in zip(group, servers, strict=True)
            ]
            for seat, start in zip(group, begun, strict=True):
                if work.compares and seat.task.exchange.keeps_model:
                    self._look(seat, start, start.received.parameters)  # its own parts, and those just averaged
            paths: list[list[Vector]] = [[] for _ in group]  # of each device, its model after every step
            outcomes = self.train(
                [seat.device for seat in group],
                [seat.task for seat in group],
                [start.received for start in begun],
                _recorder(paths) if work.apart else None,
                group[0].age,
            )
            for seat, server, start, outcome, path in zip(group, servers, begun, outcomes, paths, strict=True):
                if isinstance(outcome, NonFiniteLoss):
                    done.failures.append(f"{seat.device}: {outcome}")
                elif self._finish(work, seat, server, start, outcome, done) and done.apart and self._whole(start):
                    done.apart.add(path, self.vectors[MODEL])
        return done

    def _finish(
        self, work: Share, seat: SeatTask, server: _Vectors, start: Begun, outcome: Outcome, done: Done
    ) -> bool:
        """Fold what a device sends, and say whether it was accepted."""
        contribution = finish(start, outcome)
        try:
            update, body = self._checked(contribution, seat, work)
        except WireError as error:  # a coordinator refuses it, and goes on without this device
            done.failures.append(f"{seat.device}: {error}")
            return False
        if work.compares and not seat.task.exchange.keeps_model:
            self._look(seat, start, outcome.parameters)  # what began as one model for all
        if self.engine.keeps_state:
            self._keep(work, seat, contribution)
        if work.hands_on:
            self._hand_on(seat, contribution)
        frozen = of_layers(self.manifest.space, range(coverage(self.manifest, seat.task.boundary).boundary.layer))
        sent = self._by_layer(region for region, _ in contribution.tracks.values())
        fetched = [] if seat.age else [frozen]
        own = traffic_of(sent, self._by_layer([*fetched, *server.received]))
        moved = {"downloaded": own.bytes_down, "uploaded": own.bytes_up}
        evaluation = self.score(seat.device) if seat.task.evaluate else {}
        told = replace(outcome.report, lost_state=start.device.lost, activations_age=seat.age)
        told = replace(told, bytes=moved, evaluation=evaluation)
        report = dict(vars(told))
        done.traffic += own
        done.sums.fold(update, body, self.engine.weight(int(report["samples"])), seat.count, report)
        done.arrived.append(seat.slot)
        done.reports.append(report)
        return True

    def _checked(self, contribution: Contribution, seat: SeatTask, work: Share) -> tuple[CheckedUpdate, io.BytesIO]:
        """What the coordinator would find in an update, and the data of its body."""
        expected = self.engine.layout(seat.task.boundary, work.number, work.facts)
        own = {name: region for name, (region, _) in contribution.tracks.items()}
        if own != expected.tracks:
            raise WireError(f"{seat.task.boundary}: the update has other parts of the model than the round asks for")
        layout = expected if list(own) == list(expected.tracks) else Layout(own)
        data = b"".join(np.ascontiguousarray(vector, "<f4").data for _, vector in contribution.tracks.values())
        return check_data(layout, self.engine.limits, data), io.BytesIO(data)

    def _keep(self, work: Share, seat: SeatTask, contribution: Contribution) -> None:
        """For the device's next round, and for a run that goes on from the last checkpoint."""
        kept = self._kept(seat.device)
        kept.save(seat.id, seat.task.boundary, contribution)
        before = [task for task in kept.tasks() if _round_of(task) < work.saved]
        kept.acknowledged(seat.id, but=max(before, key=_round_of, default=None))

    def _look(self, seat: SeatTask, start: Begun, weights: Vector) -> None:
        if self._whole(start):
            self.look(seat.slot, weights)

    def _whole(self, start: Begun) -> bool:
        return start.device.graph.size == self.manifest.space.size

    def _by_layer(self, regions: Iterable[Region]) -> dict[str, int]:
        """Elements of every layer, of all regions together."""
        found = dict.fromkeys((layer.name for layer in self.manifest.layers), 0)
        for region in regions:
            for name, pieces in zip(found, region.layers, strict=True):
                found[name] += sum(piece.size for piece in pieces)
        return found

    def _kept(self, device: str) -> KeptFiles:
        return KeptFiles(self.folder / KEPT / device, durable=False)

    def _hand_on(self, seat: SeatTask, contribution: Contribution) -> None:
        """Keep a local model for the device that has this place next."""
        model = {MODEL: contribution.tracks[MODEL][1]}
        save_state(self.folder / HANDED_ON / seat.id, model, {}, durable=False)

    def _handed_on(self, inherit: Inherit) -> tuple[Region, Vector]:
        vectors, _ = load_state(self.folder / HANDED_ON / inherit.task)
        return update_regions(self.manifest, coverage(self.manifest, inherit.boundary), ())[MODEL], vectors[MODEL]


def _of_one_age(groups: Iterable[list[SeatTask]]) -> Iterator[list[SeatTask]]:
    """Divide groups whose devices train on activations of different rounds."""
    for group in groups:
        for age in sorted({seat.age for seat in group}):
            yield [seat for seat in group if seat.age == age]


def _recorder(paths: Sequence[list[Vector]]) -> Seen:
    return lambda place, model: paths[place].append(np.array(model))


class _Vectors:
    """The server, as a device sees it, when it is in the same memory; counts what would have travelled."""

    def __init__(
        self, vectors: dict[str, Vector], handed_on: Callable[[Inherit], tuple[Region, Vector]], task: Task
    ) -> None:
        self._vectors = vectors
        self._handed_on = handed_on
        self._task = task
        self.received: list[Region] = []

    def model(self, part: Part) -> Vector:
        return self._gathered(MODEL, part.region)

    def before(self, part: Part) -> Vector:
        return self._gathered(BEFORE, part.region)

    def state(self, name: str, part: Part) -> Vector:
        return self._gathered(name, part.region)

    def inherited(self) -> tuple[Region, Vector]:
        assert self._task.exchange.inherit is not None
        region, vector = self._handed_on(self._task.exchange.inherit)
        self.received.append(region)
        return region, vector

    def _gathered(self, name: str, region: Region) -> Vector:
        self.received.append(region)
        return region.gather(self._vectors[name])


def forget_handed_on(folder: Path, besides: Collection[int]) -> None:
    """Remove the local models of all rounds but some."""
    for old in (folder / HANDED_ON).glob("*"):
        if _round_of(old.name) not in besides:
            old.unlink(missing_ok=True)


def _round_of(task: str) -> int:
    return int(task.split("-")[1])
