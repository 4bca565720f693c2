"""The server's state in a simulation. What is computed from it is the RoundEngine's, as in the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from federation.algorithm import Facts
from federation.axes.cover import DeviceProfile
from federation.cohort import Cohort, Member, Seat
from federation.coverage import coverage
from federation.engine import RoundEngine
from federation.errors import EmbraceError, InputError
from federation.exchange import Inherit
from federation.job import Plan
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.messages import Task
from federation.round_sums import RoundSums
from federation.space import Vector
from simulation.pace import play

BEFORE = "before"  # the model of the version before, for algorithms that look at the server's last move


def past(age: int) -> str:
    """Name the vector of the model as it was so many rounds ago; 0 is the model."""
    return f"{MODEL}-{age}" if age else MODEL


@dataclass(frozen=True)
class SeatTask:
    """A seat of a round, and the task of its device."""

    id: str
    seat: Seat
    task: Task
    age: int = 0  # rounds ago the device has computed the activations that it trains on

    @property
    def slot(self) -> int:
        return self.seat.number

    @property
    def device(self) -> str:
        return self.seat.member.device

    @property
    def count(self) -> int:
        return self.seat.count


@dataclass
class ServerState:
    """Everything that goes on from one round to the next; saved as it is."""

    vectors: dict[str, Vector]  # the model, the model before, the server's state
    facts: Facts
    number: int = 0  # of the round that comes
    last: dict[str, tuple[int, str]] = field(default_factory=dict)  # device -> its last round and task
    previous: list[tuple[str, str, int]] = field(default_factory=list)  # device, boundary and count of every slot
    arrived: dict[int, str] = field(default_factory=dict)  # slot -> task, in the last round
    stored: dict[str, tuple[int, int]] = field(default_factory=dict)  # device -> round and layer of its activations
    wanted: int = 0  # draws that made the last round complete
    seconds: dict[str, float] = field(default_factory=dict)  # device -> what its tasks took, smoothed


@dataclass(frozen=True)
class Invited:
    """The cohort of a round: all devices that are asked, and those whose updates count."""

    seats: list[SeatTask]
    counted: list[SeatTask]
    seconds: float | None = None  # until the round closed; None: no device has a pace
    took: dict[str, float] = field(default_factory=dict)  # device -> seconds of its task

    @property
    def draws(self) -> int:
        """How many times updates can count at most."""
        return sum(seat.count for seat in self.seats)


Seconds = Callable[[SeatTask, int], float]  # of a task in a round


class SimulatedServer:
    """Draws cohorts and closes rounds: every device is there. Without `seconds` none is late."""

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        profiles: dict[str, DeviceProfile],
        weights: Vector,
        seconds: Seconds | None = None,
    ) -> None:
        if plan.serve.combine != "mean":
            raise InputError("serve.combine: a simulation sums updates as they come; expected 'mean'")
        self.engine = RoundEngine(plan, manifest)
        self.profiles = profiles
        self.seconds = seconds
        self._ages = min(plan.local.refresh_every, plan.num_rounds)  # rounds for which activations are good
        vectors = {MODEL: np.array(weights), **self.engine.first_vectors()}
        if self.engine.algorithm.fuses:
            vectors[BEFORE] = np.array(weights)
        for age in range(1, self._ages):
            vectors[past(age)] = np.array(weights)
        self.state = ServerState(vectors, self.engine.first_facts)

    def invite(self) -> Invited:
        """Draw the cohort of the next round, say what each device does, and who of them comes in time."""
        engine, state, number = self.engine, self.state, self.state.number
        drawn = engine.assign(number, self.profiles, self._previous(), seconds=state.seconds)
        if not drawn.seats:
            why = f": {drawn.unfit[0][1]}" if drawn.unfit else ""
            raise InputError(f"round {number} cannot begin; {drawn.missing} more devices are needed{why}")
        found = []
        for seat in drawn.seats if self.seconds else drawn.seats[: drawn.wanted]:
            last = state.last.get(seat.member.device) if engine.keeps_state else None
            task = engine.task(seat, number, state.facts, last=last, inherit=self._inherit(seat.number))
            age = self._age(seat.member.device, self._layer(task), task.good_since)
            found.append(SeatTask(f"simulated-{number}-{seat.number}-1", seat, task, age))
        self.state = replace(state, wanted=drawn.wanted)
        if self.seconds is None:
            return Invited(found, found)
        took = {seat.slot: self.seconds(seat, number) for seat in found}
        played = play(number, engine.plan.seed, engine.plan.participation, drawn, took)
        counted = [seat for seat in found if seat.slot in played.counted]
        return Invited(found, counted, played.seconds, {seat.device: took[seat.slot] for seat in counted})

    def _age(self, device: str, layer: int, since: int) -> int:
        """Say how old the activations are that a device has of a layer; 0: it has none that are good."""
        number, stored = self.state.stored.get(device, (0, -1))
        age = self.state.number - number
        return age if stored == layer and age < self._ages and number >= since else 0

    def _layer(self, task: Task) -> int:
        manifest = self.engine.manifest
        return len(manifest.frozen(coverage(manifest, task.boundary).boundary))

    def _previous(self) -> Cohort | None:
        if not self.state.previous:
            return None
        seats = tuple(
            Seat(number, Member(device, boundary, 1), count)
            for number, (device, boundary, count) in enumerate(self.state.previous)
        )
        wanted = min(self.state.wanted or len(seats), sum(seat.count for seat in seats))
        return Cohort(seats, wanted, self.engine.plan.participation.quorum_of(wanted))

    def _inherit(self, slot: int) -> Inherit | None:
        theirs = self.state.arrived.get(slot)
        if theirs is None or not self.engine.inherits(self.state.number):
            return None
        return Inherit(theirs, self.state.previous[slot][1])

    def sums(self, invited: Invited) -> RoundSums:
        """Begin the sums of the round."""
        return self.engine.sums(self.state.number, self.state.facts, invited.draws)

    def close(self, invited: Invited, arrived: Sequence[SeatTask], sums: RoundSums) -> None:
        """Make the server's step, and go on to the next round."""
        state, vectors = self.state, self.state.vectors
        if not arrived:
            raise EmbraceError(f"no device finished round {state.number}; use a smaller rate")
        last = {**state.last, **{seat.device: (state.number, seat.id) for seat in arrived}}
        if BEFORE in vectors:
            vectors[BEFORE][:] = vectors[MODEL]
        for age in reversed(range(1, self._ages)):
            vectors[past(age)][:] = vectors[past(age - 1)]
        frozen = [(seat, self._layer(seat.task)) for seat in invited.counted if not seat.age]
        stored = {seat.device: (state.number, layer) for seat, layer in frozen if layer}
        for name, at, values in self.engine.changes(sums, vectors, len(last)):
            vectors[name][at] = values  # a block is read before it is written, and never again
        self.state = replace(
            state,
            facts=self.engine.next_facts(sums),
            number=state.number + 1,
            last=last,
            previous=[(seat.device, seat.task.boundary, seat.count) for seat in invited.seats],
            arrived={seat.slot: seat.id for seat in arrived},
            stored={**state.stored, **stored} if self._ages > 1 else {},
            seconds={**state.seconds, **{device: self._smoothed(device, s) for device, s in invited.took.items()}},
        )

    def _smoothed(self, device: str, seconds: float) -> float:
        return (self.state.seconds.get(device, seconds) + seconds) / 2
