"""Updates that arrive: where a body goes, whether it counts, and that it is recorded before its device hears so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.credentials import new_id
from coordinator.errors import NotFound, Refused
from coordinator.jobs import FoldUpdate, OpenJob, OpenJobState, ReachPoint, UnitOfWork, Units
from coordinator.presence import Presence
from coordinator.store.bodies import Bodies
from coordinator.store.schema import UpdateRecord
from federation import cohort
from federation.errors import EmbraceError, InputError
from federation.round_sums import Reached
from federation.wire import CheckedUpdate, UpdateDecoder


@dataclass(frozen=True)
class Receiving:
    """Where an update goes while it arrives, and what it has to be."""

    task: str
    path: Path
    decoder: UpdateDecoder
    most: int  # bytes that it can have


@dataclass(frozen=True)
class Arrival:
    """An update that is whole and sound, before it is recorded."""

    device: str
    receiving: Receiving
    checked: CheckedUpdate
    sha256: str
    report: dict[str, Any]  # the device's own words
    own_name: str = ""  # of the body, where other processes may receive the same one

    @property
    def body(self) -> tuple[Path, str, str]:
        return self.receiving.path, self.receiving.task, self.own_name or self.sha256


def job_of(task: str) -> str:
    """Name the job of a task."""
    return task.partition("-")[0]


class Arrivals:
    """Receive and record the updates of open jobs. Thread-safe."""

    def __init__(
        self,
        units: Units,
        bodies: Bodies,
        jobs: Mapping[str, OpenJob],
        presence: Presence,
        reached: Reached,
        refresh: Callable[[str], None],
    ) -> None:
        """`refresh` learns what other processes have changed of a job."""
        self._units = units
        self._repository = units.repository
        self._bodies = bodies
        self._jobs = jobs
        self._presence = presence
        self._reached = reached
        self._refresh = refresh

    def receive(self, device: str, task: str) -> Receiving:
        """Prepare for an update: only the device that holds the task may send it."""
        with self._units.lock:
            with self._repository.reading() as session:
                known = self._repository.update(session, task)
            if known is not None and known.device == device:  # its round may be over since
                raise Refused("this update has arrived already", "duplicate")
            self._refresh(job_of(task))
            job, seat, _ = self.held(device, task)
            return self._receiving(task, job, job.state, seat)

    def receive_at_once(self, device: str, task: str) -> Receiving | None:
        """Do the same without lock and database, if the task is plainly under way; `accept_all` decides what counts."""
        if job_of(task) not in self._jobs:
            return None
        try:
            job, seat, attempt = self.held(device, task)
        except (NotFound, Refused):
            return None
        state = job.state  # without the lock the round may have closed since: then the long way says so
        if (
            not seat.is_at_work(device, attempt)
            or not seat.number < len(state.round.slots)
            or state.round.slots[seat.number] is not seat
        ):
            return None
        return self._receiving(task, job, state, seat)

    def _receiving(self, task: str, job: OpenJob, state: OpenJobState, seat: cohort.Seat) -> Receiving:
        decoder, most = job.engine.decoder(seat.member.boundary, state.round.number, state.facts)
        return Receiving(task, self._bodies.arriving(task), decoder, most)

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Exception | None]:
        """Record several updates: they share a transaction, and the wait until their bodies are on the disk."""
        answers: list[Exception | None] = []
        if self._repository.is_shared:
            arrivals = [replace(arrival, own_name=new_id()) for arrival in arrivals]
        try:
            answers += self._bodies.commit_all([arrival.body for arrival in arrivals])
            for _ in arrivals:
                self._reached("after-spool")
            with self._units.begin(*{job_of(arrival.receiving.task) for arrival in arrivals}) as work:
                self._presence.came(work.session, [arrival.device for arrival in arrivals], work.now)
                answers = [answer or self._record(work, arrival) for answer, arrival in zip(answers, arrivals)]
        except BaseException:
            self._discard(arrivals)
            raise
        self._discard([arrival for arrival, answer in zip(arrivals, answers) if answer is not None])
        return answers

    def _record(self, work: UnitOfWork, arrival: Arrival) -> Exception | None:
        """Record an update; return None, or why it does not count."""
        task = arrival.receiving.task
        try:
            job, seat, attempt = self.held(arrival.device, task)
            samples = _samples(arrival.report, job.engine.plan.bounds.max_samples)
        except EmbraceError as error:
            return error
        number = job.state.round.number
        effects = work.advance(job, cohort.UpdateArrived(arrival.device, seat.number, attempt))
        for effect in effects:
            if isinstance(effect, cohort.AcceptUpdate):
                work.succeeded(job, effect.seat)
            if isinstance(effect, cohort.RejectUpdate):
                return Refused(f"the update of task {task} does not count: {effect.reason}", effect.reason)
            if isinstance(effect, cohort.AlreadyAccepted):  # twice at once
                return Refused("this update has arrived already", "duplicate")
        update = UpdateRecord(
            task=task,
            job=job.id,
            round=number,
            slot=seat.number,
            device=arrival.device,
            sha256=arrival.sha256,
            bytes=arrival.checked.size,
            samples=samples,
            weight=job.engine.weight(samples),
            report=arrival.report,
            arrived_at=work.now,
            body=arrival.own_name,
        )
        work.add_update(update)
        # In front: if this is the last of a round, it is folded before the round is closed.
        work.outbox[:0] = [ReachPoint("after-record"), FoldUpdate(job, update, arrival.checked)]
        return None

    def _discard(self, arrivals: Sequence[Arrival]) -> None:
        """Remove bodies that are part of no round."""
        for arrival in arrivals:
            arrival.receiving.path.unlink(missing_ok=True)
            with self._units.lock:
                _, task, name = arrival.body
                if not self._counts(task, name):
                    self._bodies.delete(task, name)

    def _counts(self, task: str, name: str) -> bool:
        """Whether a body is part of a round that is open, or of the one before that it goes on from."""
        with self._repository.reading() as session:
            update = self._repository.update(session, task)
        if self._repository.is_shared:  # the body is ours alone: it counts if it is what was recorded
            return update is not None and update.body_name == name
        job = self._jobs.get(job_of(task))
        if update is None or update.body_name != name or job is None:
            return False
        number = job.state.round.number
        return update.round == number or (update.round == number - 1 and job.engine.inherits(number))

    def held(self, device: str, task: str) -> tuple[OpenJob, cohort.Seat, int]:
        """Find the job, the seat and the attempt of a task, if it ever was this device's."""
        id, _, rest = task.partition("-")
        try:
            number, slot, attempt = map(int, rest.split("-"))
        except ValueError:
            raise NotFound(f"there is no task {task!r}") from None
        if task != f"{id}-{number}-{slot}-{attempt}":  # one task has one name
            raise NotFound(f"there is no task {task!r}")
        job = self._jobs.get(id)
        if job is None:
            with self._repository.reading() as session:
                state = self._repository.job_state(session, id)
            if state is not None:
                raise Refused(f"job {id} is {state}", "round_closed")
            raise NotFound(f"there is no task {task!r}")
        round = job.state.round
        if number != round.number:
            raise Refused(f"round {number} is over; the job is in round {round.number}", "round_closed")
        if not 0 <= slot < len(round.slots) or device not in round.slots[slot].holders:
            raise NotFound(f"there is no task {task!r}")  # another device's tasks are not this one's to know
        return job, round.slots[slot], attempt


def _samples(report: dict[str, Any], most: int) -> int:
    samples = report.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= most:
        raise InputError(f"report.samples: expected a number from 1 to {most}, got {samples!r}")
    return samples
