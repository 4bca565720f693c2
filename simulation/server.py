"""The server of a simulation: cohorts, tasks, sums and the server's step as the coordinator does them, without HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from federation import cohort
from federation.algorithm import Facts
from federation.axes.cover import DeviceProfile
from federation.axes.serve import RoundFacts
from federation.axes.sync import FedLama, Rotating, first_facts
from federation.errors import EmbraceError, InputError
from federation.exchange import Inherit
from federation.identity import task_seed
from federation.job import Plan
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.messages import Task
from federation.round_sums import RoundSums
from federation.server_step import mean_moves, spread
from federation.space import Vector

BEFORE = "before"  # the model of the version before, for algorithms that look at the server's last move


@dataclass(frozen=True)
class Seat:
    """A device's place in a round, and its task."""

    slot: int
    device: str
    count: int
    id: str
    task: Task


@dataclass
class ServerState:
    """Everything that goes on from one round to the next; saved as it is."""

    vectors: dict[str, Vector]  # the model, the model before, the server's state
    facts: Facts
    number: int = 0  # of the round that comes
    last: dict[str, tuple[int, str]] = field(default_factory=dict)  # device -> its last round and task
    previous: list[tuple[str, str, int]] = field(default_factory=list)  # device, boundary and count of every slot
    arrived: dict[int, str] = field(default_factory=dict)  # slot -> task, in the last round


class SimulatedServer:
    """Draws cohorts and closes rounds."""

    def __init__(self, plan: Plan, manifest: Manifest, profiles: dict[str, DeviceProfile], weights: Vector) -> None:
        if plan.serve.combine != "mean":
            raise InputError("serve.combine: a simulation sums updates as they come; expected 'mean'")
        self.plan = plan
        self.manifest = manifest
        self.profiles = profiles
        self.space = manifest.space
        algorithm = plan.choices
        vectors = {MODEL: np.array(weights), **algorithm.first_vectors(self.space.size)}
        if algorithm.fuses:
            vectors[BEFORE] = np.array(weights)
        self.state = ServerState(vectors, Facts(first_facts(algorithm.sync, self.space)))

    def seats(self) -> list[Seat]:
        """The cohort of the next round and what each of them is to do; everybody is there and nobody is late."""
        plan, number, state = self.plan, self.state.number, self.state
        previous = self._previous()
        drawn = cohort.assign(
            plan.seed,
            number,
            self.profiles,
            self.profiles,
            plan.participation,
            plan.cover,
            self.manifest,
            plan.local.batch,
            previous,
        )
        if not drawn.seats:
            why = f": {drawn.unfit[0][1]}" if drawn.unfit else ""
            raise InputError(f"round {number} cannot begin; {drawn.missing} more devices are needed{why}")
        seats = []
        for place in drawn.seats[: drawn.wanted]:
            device, boundary = place.member.device, place.member.boundary
            exchange = plan.choices.exchange(
                plan.when(number),
                state.facts,
                steps=plan.local.steps,
                window_from=plan.window_from(number),
                last=state.last.get(device) if plan.choices.keeps_state else None,
                inherit=self._inherit(place.number),
            )
            task = plan.local.task(boundary, number, task_seed(plan.seed, device), exchange)
            seats.append(Seat(place.number, device, place.count, f"simulated-{number}-{place.number}-1", task))
        return seats

    def _previous(self) -> cohort.Cohort | None:
        if not self.state.previous:
            return None
        seats = tuple(
            cohort.Seat(number, cohort.Member(device, boundary, 1), count)
            for number, (device, boundary, count) in enumerate(self.state.previous)
        )
        draws = sum(seat.count for seat in seats)
        return cohort.Cohort(seats, draws, self.plan.participation.quorum_of(draws))

    def hands_on(self, number: int) -> bool:
        """Whether a round begins with the local models of the round before."""
        sync = self.plan.choices.sync
        local = isinstance(sync, Rotating) and sync.redistribute == "local"
        return local and number > 0 and self.plan.when(number - 1).ends_window

    def _inherit(self, slot: int) -> Inherit | None:
        theirs = self.state.arrived.get(slot)
        if theirs is None or not self.hands_on(self.state.number):
            return None
        return Inherit(theirs, self.state.previous[slot][1])

    def sums(self, seats: Sequence[Seat]) -> RoundSums:
        """Empty sums of the round."""
        draws = sum(seat.count for seat in seats)
        return RoundSums(self.plan, self.manifest, self.state.facts, self.state.number, draws)

    def close(self, seats: Sequence[Seat], arrived: Sequence[Seat], sums: RoundSums) -> None:
        """The server's step."""
        if not arrived:
            raise EmbraceError(f"no device finished round {self.state.number}; use a smaller rate")
        plan, state, algorithm = self.plan, self.state, self.plan.choices
        number, vectors = state.number, state.vectors
        last = {**state.last, **{seat.device: (number, seat.id) for seat in arrived}}
        rate = plan.local.schedule.at(number)
        facts = algorithm.after(plan.when(number), state.facts, sums.totals, self.space, rate, plan.local.steps)
        if algorithm.fuses:
            vectors[BEFORE][:] = vectors[MODEL]
        changes = algorithm.changes(
            sums.totals,
            mean_moves(sums.totals[MODEL], self.space),
            self.space,
            vectors,
            RoundFacts(rate),
            plan.serve.devices or len(last),
        )
        for name, at, values in changes:  # a block is read before it is written, and never again
            vectors[name][at] = values
        self.state = replace(
            state,
            facts=facts,
            number=number + 1,
            last=last,
            previous=[(seat.device, seat.task.boundary, seat.count) for seat in seats],
            arrived={seat.slot: seat.id for seat in arrived},
        )

    def by_layer(self, sums: RoundSums) -> dict[str, dict[str, float]]:
        """Of a round that was closed: how far local models were apart, and the steps between synchronisations."""
        names, sync = [layer.name for layer in self.manifest.layers], self.state.facts.sync
        found: dict[str, dict[str, float]] = {}
        apart = {name: spread(sums.totals[MODEL], self.space, index) for index, name in enumerate(names)}
        found["discrepancy"] = {name: value for name, value in apart.items() if value is not None}
        if isinstance(self.plan.choices.sync, FedLama):
            steps = self.plan.local.steps
            found["interval"] = {name: float(steps * rounds) for name, rounds in zip(names, sync.intervals)}
        return found
