"""A job that is open, the unit of work in which its state changes, and the effects that follow a commit.

Everything that matters is in the database before any client hears of it. The state of a job is an immutable value: a
unit of work makes a new one, and the job has it once the database has it. If the database refuses, nothing happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from sqlalchemy.orm import Session

from coordinator import standings
from coordinator.store.repository import Repository
from coordinator.store.schema import FINISHED, JobRecord, StandingRecord, UpdateRecord
from federation import cohort, rounds
from federation.algorithm import Facts
from federation.engine import RoundEngine
from federation.exchange import Inherit
from federation.messages import Task
from federation.seating import Seats
from federation.wire import CheckedUpdate


@dataclass(frozen=True)
class OpenJobState:
    """What changes of an open job."""

    version: int  # of the newest weights
    round: rounds.Round
    facts: Facts  # at the beginning of the round
    previous: cohort.Cohort | None = None  # of the round before
    paused_at: float | None = None
    unfit: Mapping[str, str] = field(default_factory=dict)  # devices that can train nothing here, and why
    waits_for: tuple[int, rounds.Effect] | None = None  # what clients were last told that a round waits for
    standings: Mapping[str, StandingRecord] = field(default_factory=dict)  # how devices have done
    refused: Mapping[str, int] = field(default_factory=dict)  # bodies of tasks of the round that were no updates
    last_round: float | None = None  # seconds that the round before took

    def is_recorded_as(self, other: OpenJobState) -> bool:
        """Whether the database has the same of both; what each process knows for itself is left out."""
        recorded = ("version", "round", "facts", "previous", "paused_at", "standings")
        return all(getattr(self, name) is getattr(other, name) for name in recorded)

    def calls_for_others(self, before: OpenJobState) -> bool:
        """Whether other processes may have something to do for it that they had not before."""
        then, now = before.round, self.round
        return (self.version, self.paused_at, now.number, now.state, now.slots.uploaded) != (
            before.version,
            before.paused_at,
            then.number,
            then.state,
            then.slots.uploaded,
        )

    def why_benched(self, device: str, now: float) -> str:
        """Say for how long a device gets no task and why; nothing if it may have one."""
        return standings.why_benched(self.standings.get(device), now)

    def benched(self, now: float) -> set[str]:
        """List the devices that get no task now."""
        known = self.standings.items()
        return {
            device for device, standing in known if standing.benched_until is not None and now < standing.benched_until
        }

    def only_rests(self, device: str) -> bool:
        """Whether a device that gets no task has done nothing wrong: it is slow."""
        return self.standings[device].reason == standings.SLOW


@dataclass(eq=False)
class OpenJob:
    """A job with a round. `state` is what the database has, but for renewed leases; a unit of work replaces it.

    Where several processes share the database, leases are recorded, too, and `revision` says how new the state is.
    """

    id: str
    bundle: str
    engine: RoundEngine
    state: OpenJobState
    revision: int = 0


def restore_job(
    repository: Repository, session: Session, job: JobRecord, engine: RoundEngine, revision: int = 0
) -> OpenJob:
    """Open a job as the database has it."""
    newest, *before = repository.newest_rounds(session, job.id, 2)
    facts = engine.facts_of(newest.number, before[0].summary.get("facts") if before else None)
    current, *past = [rounds.decode(row.body, repository.seats(session, row)) for row in (newest, *before)]
    previous = _cohort(past[0]) if past else None
    paused_at = repository.state_changed_at(session, job.id) if job.state == "paused" else None
    known = {record.device: record for record in repository.standings(session, job=job.id)}
    took = before[0].closed_at - before[0].opened_at if before and before[0].closed_at is not None else None
    state = OpenJobState(job.version, current, facts, previous, paused_at, standings=known, last_round=took)
    return OpenJob(job.id, job.bundle, engine, state, revision)


def refresh_job(repository: Repository, session: Session, job: OpenJob, revision: int) -> None:
    """Let a job be what another process has made of it; of its round and the next only what has changed is read."""
    known, slots, since = job.state, job.state.round.slots, job.revision
    newest, *before = repository.rounds(session, job.id, known.round.number)[::-1]
    if len(before) > 1:
        record = repository.job(session, job.id)
        assert record is not None, "a job whose revision is known"
        job.state = replace(restore_job(repository, session, record, job.engine).state, unfit=known.unfit)
        job.revision = revision
        return
    for row in before:  # the round that is known, as it ended
        ended, slots = rounds.decode(row.body, repository.seats(session, row, since), slots), Seats()
        facts = job.engine.facts_of(newest.number, row.summary.get("facts"))
        took = None if row.closed_at is None else row.closed_at - row.opened_at
        known = replace(known, facts=facts, previous=_cohort(ended), refused={}, last_round=took)
    round = rounds.decode(newest.body, repository.seats(session, newest, since), slots)
    stand = {row.device: row for row in repository.standings(session, job=job.id, since=since)}
    state, version = repository.state_and_version(session, job.id)
    paused_at = None
    if state == "paused":
        paused_at = known.paused_at or repository.state_changed_at(session, job.id)
    standings = {**known.standings, **stand} if stand else known.standings
    job.state = replace(known, round=round, version=version, paused_at=paused_at, standings=standings)
    job.revision = revision


def find_inherited(
    repository: Repository, session: Session, job: OpenJob, slot: int
) -> tuple[UpdateRecord, str] | None:
    """Find the update whose local model the device of a slot goes on with, and what it trained."""
    number, previous = job.state.round.number, job.state.previous
    if previous is None or slot >= len(previous.seats) or not job.engine.inherits(number):
        return None
    update = repository.update_of_slot(session, job.id, number - 1, slot)
    return None if update is None else (update, previous.seats[slot].member.boundary)


def needed_updates(repository: Repository, session: Session, job: OpenJob) -> list[UpdateRecord]:
    """List the updates whose bodies are of use: those of the round, and those that it goes on from."""
    number = job.state.round.number
    return repository.updates(session, job.id, [number - 1, number] if job.engine.inherits(number) else [number])


def _cohort(round: rounds.Round) -> cohort.Cohort | None:
    """The cohort that took part, for the next round of a window."""
    return cohort.Cohort(round.slots, round.wanted, round.quorum) if round.slots else None


# --- what follows a commit -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdmitJob:
    job: OpenJob


@dataclass(frozen=True)
class ForgetJob:
    job: OpenJob


@dataclass(frozen=True)
class FoldUpdate:
    job: OpenJob
    update: UpdateRecord
    checked: CheckedUpdate | None = None  # None: it is checked again, from its body


@dataclass(frozen=True)
class CheckUpdate:  # that lies in object storage
    job: OpenJob
    update: UpdateRecord


@dataclass(frozen=True)
class FinishRound:
    job: OpenJob


@dataclass(frozen=True)
class LookAfter:  # other processes have changed it: fold what has arrived, and close its round if that is due
    job: OpenJob
    all: bool = False  # also fold what no process may be at work on: its last keeper has ended


@dataclass(frozen=True)
class DeleteBodies:  # behind what is being folded
    job: OpenJob | None  # that is over; None: it goes on without them
    updates: tuple[UpdateRecord, ...]


@dataclass(frozen=True)
class EvaluateVersion:
    job: OpenJob
    version: int


@dataclass(frozen=True)
class KeepBest:  # the weights of this version; those that were the best before can go
    job: str
    version: int | None


@dataclass(frozen=True)
class ShutOut:
    device: str


@dataclass(frozen=True)
class MissedOffer:  # a device did not come for its task: it counts as gone until it is heard of again
    device: str


@dataclass(frozen=True)
class NotifyDevices:
    """There may be something to do for devices that wait."""


@dataclass(frozen=True)
class ReachPoint:  # at which a test may end the process
    name: str


Effect = (
    AdmitJob
    | ForgetJob
    | FoldUpdate
    | CheckUpdate
    | FinishRound
    | DeleteBodies
    | EvaluateVersion
    | KeepBest
    | ShutOut
    | MissedOffer
    | NotifyDevices
    | ReachPoint
)

# What clients that watch a job are told.
_SHOWN = (
    rounds.WarnLayerUncovered,
    rounds.RoundAbandoned,
    rounds.WaitForDevices,
    rounds.WaitForUpdates,
    cohort.GrantLease,
    cohort.AcceptUpdate,
    cohort.RejectUpdate,
)


class UnitOfWork:
    """Changes of jobs that are recorded together; `outbox` has what follows once they are."""

    def __init__(self, repository: Repository, session: Session, now: float) -> None:
        self._repository = repository
        self.session = session
        self.now = now
        self.outbox: list[Effect] = []
        self._states: dict[OpenJob, OpenJobState] = {}
        self._written: dict[OpenJob, tuple[cohort.Seat, ...]] = {}  # the seats as this transaction has them
        self._updates: list[UpdateRecord] = []
        self._events: list[dict[str, Any]] = []
        self.has_events = False  # for clients that watch
        self._standings: dict[tuple[str, str], StandingRecord] = {}  # those that have changed
        self._own: dict[OpenJob, dict[str, StandingRecord]] = {}  # all, of the jobs of which some have

    def state(self, job: OpenJob) -> OpenJobState:
        return self._states.get(job, job.state)

    def change(self, job: OpenJob, **values: Any) -> None:
        self._states[job] = replace(self.state(job), **values)

    def now_of(self, job: OpenJob) -> float:
        """The time as a job sees it: while it is paused time stands still, and no device pays for the pause."""
        paused_at = self.state(job).paused_at
        return self.now if paused_at is None else paused_at

    def add_update(self, update: UpdateRecord) -> None:
        self._updates.append(update)

    def note(self, job: OpenJob, kind: str, body: dict[str, Any], at: float | None = None) -> None:
        """Add an event for clients that watch a job."""
        self._events.append({"job": job.id, "at": self.now if at is None else at, "kind": kind, "body": body})

    def note_unfit(self, job: OpenJob, unfit: Mapping[str, str]) -> None:
        """Replace the devices that a job cannot use; clients that watch hear of each once."""
        state = self.state(job)
        for device, why in unfit.items():
            if state.unfit.get(device) != why:
                self.note(job, "DeviceUnfit", {"round": state.round.number, "device": device, "message": why})
        if unfit != state.unfit:
            self.change(job, unfit=unfit)

    def open_round(self, job: OpenJob, number: int) -> None:
        """Open the next round of a job; its facts are those that the round before led to."""
        self._write_seats(job)
        before = self.state(job).round
        opened = job.engine.open(number, self.now_of(job))
        self._repository.add_round(self.session, job.id, opened)
        took = opened.opened_at - before.opened_at
        self.change(job, round=opened, previous=_cohort(before), refused={}, last_round=took)
        self._written[job] = ()

    def advance(self, job: OpenJob, event: rounds.Event, **columns: Any) -> tuple[rounds.Effect, ...]:
        """Apply a fact to the round of a job and gather what it leads to; `columns` are recorded with its new state."""
        state, now = self.state(job), self.now_of(job)
        before = state.round
        round, effects = rounds.advance(before, event, now)
        if round is not before:
            self.change(job, round=round)
            if rounds.encode_head(round) != rounds.encode_head(before):
                columns |= {"closed_at": now} if round.state in ("committed", "abandoned") else {}
                self._repository.change_round(self.session, job.id, round, **columns)
        freed = any(isinstance(effect, rounds.WaitForDevices) for effect in effects)
        overdue = any(isinstance(effect, rounds.WaitForUpdates) for effect in effects)
        if (freed or round.state == "closing") and not isinstance(event, rounds.DevicesLeft):
            self._blame(job, before, round)
        if before.slots.uploaded:
            self._drop_unchecked(job, before, round)
        for effect in effects:
            self._tell(job, effect, now)
            if isinstance(effect, rounds.CloseRound):
                self.outbox.append(FinishRound(job))
            elif isinstance(effect, rounds.RoundAbandoned):
                self._fail(job, effect.reason)
        # Seats are offered or free now, or held too long. While devices are missing to begin, asking leads to nothing.
        if round.state == "collecting" and (freed or overdue or before.state == "selecting"):
            self.notify_devices()
        return effects

    def succeeded(self, job: OpenJob, seat: cohort.Seat) -> None:
        """Count an update of a device, which rests if its round waited for it."""
        round, device, seconds, slow = self.state(job).round, seat.member.device, seat.seconds or 0.0, ""
        if round.is_held_up_after(seat):
            slow = f"it took {seconds:.1f} s, the others {round.usual:.1f} s"
        self._stand(job, standings.succeeded(self._standing(job, device), seconds, self.now, slow))
        if slow:
            self._note_bench(job, device, standings.SLOW)

    def failed(self, job: OpenJob, device: str, reason: str, message: str = "", taken: float | None = None) -> None:
        """Count a failure of a device; clients that watch hear if it is benched."""
        known = [other.seconds for other in self.state(job).standings.values() if other.seconds is not None]
        usual = median(known) if known else None
        self._stand(job, standings.failed(self._standing(job, device), reason, message, self.now, usual, taken))
        self._note_bench(job, device, reason)

    def _note_bench(self, job: OpenJob, device: str, reason: str) -> None:
        standing = self._standing(job, device)
        if why := standings.why_benched(standing, self.now):
            until = standing.benched_until or self.now
            told = {"device": device, "reason": reason, "seconds": until - self.now, "until": until, "message": why}
            self.note(job, "DeviceBenched", {"round": self.state(job).round.number, **told})

    def _standing(self, job: OpenJob, device: str) -> StandingRecord:
        return self.state(job).standings.get(device) or StandingRecord(job.id, device)

    def _stand(self, job: OpenJob, standing: StandingRecord) -> None:
        standing = replace(standing, revision=job.revision + 1)
        self._standings[job.id, standing.device] = standing
        if job not in self._own:  # one copy for all changes of this unit
            self._own[job] = dict(self.state(job).standings)
            self.change(job, standings=self._own[job])
        self._own[job][standing.device] = standing

    def _blame(self, job: OpenJob, before: rounds.Round, after: rounds.Round) -> None:
        """Count the devices that let their leases run out, and those that a round closed without."""
        closes = before.state == "collecting" and after.state == "closing" and after.arrived < after.wanted
        for seat, now in zip(before.slots, after.slots):
            ended = seat.state == "leased" and now.state in ("expired", "offered")
            taken_back = ended and (seat.until > self.now_of(job) or seat.until >= before.ends_by(seat))
            if taken_back or (closes and now.state == "leased"):
                usual = f", the others {after.usual:.1f} s" if after.usual else ""
                taken = self.now_of(job) - seat.since
                self.failed(job, seat.member.device, standings.LATE, f"it has taken {taken:.1f} s{usual}", taken)
            elif ended:
                self.failed(job, seat.member.device, standings.LOST, "it was not heard of during its task")
            elif seat.state == "offered" and (now.state == "expired" or (closes and now.state == "offered")):
                self.outbox.append(MissedOffer(seat.member.device))

    def _drop_unchecked(self, job: OpenJob, before: rounds.Round, after: rounds.Round) -> None:
        """Remove updates that were not checked in time. Their devices are not to blame."""
        gone = ("expired", "offered") if after.state == "collecting" else ("expired", "offered", "uploaded")
        seats = [seat for seat, now in zip(before.slots, after.slots) if seat.state == "uploaded" and now.state in gone]
        tasks = [f"{job.id}-{before.number}-{seat.number}-{len(seat.holders)}" for seat in seats]
        updates = [update for task in tasks if (update := self._repository.update(self.session, task)) is not None]
        if updates:
            self._repository.delete_updates(self.session, [update.task for update in updates])
            self.outbox.append(DeleteBodies(None, tuple(updates)))

    def task(self, job: OpenJob, seat: cohort.Seat) -> Task:
        """Say what the device of a seat does."""
        state, engine = self.state(job), job.engine
        device, number = seat.member.device, state.round.number
        last = self._repository.last_update(self.session, job.id, device, number) if engine.keeps_state else None
        found = find_inherited(self._repository, self.session, job, seat.number)
        inherit = Inherit(found[0].task, found[1]) if found else None
        return engine.task(seat, number, state.facts, last=last, inherit=inherit)

    def notify_devices(self) -> None:
        if NotifyDevices() not in self.outbox:
            self.outbox.append(NotifyDevices())

    def _tell(self, job: OpenJob, effect: rounds.Effect, now: float) -> None:
        """Note an effect for clients that watch."""
        state = self.state(job)
        number = state.round.number
        if isinstance(effect, rounds.WaitForDevices):  # devices ask again and again; clients hear it once
            if state.waits_for == (number, effect):
                return
            self.change(job, waits_for=(number, effect))
        if isinstance(effect, rounds.CloseRound):  # of many seats, which can be read elsewhere
            self.note(job, "CloseRound", {"round": number, "updates": len(effect.seats)}, now)
        elif isinstance(effect, _SHOWN):
            facts = {
                name: rounds.encode_seat(value) if isinstance(value, cohort.Seat) else value
                for name, value in vars(effect).items()
            }
            self.note(job, type(effect).__name__, {"round": number, **facts}, now)

    def _fail(self, job: OpenJob, why: str) -> None:
        """End a job without a round to go on with: failed, unless it was stopped."""
        self.write()  # for the updates of this unit
        if self._repository.job_state(self.session, job.id) not in FINISHED:
            self._repository.change_job(self.session, job.id, state="failed", message=why)
            self.note(job, "JobState", {"state": "failed", "message": why})
        updates = needed_updates(self._repository, self.session, job)
        self.outbox += [ForgetJob(job), DeleteBodies(job, tuple(updates))]

    def write(self) -> None:
        """Record what was gathered: updates, seats and events, many rows at a time."""
        if self._updates:
            self._repository.add_updates(self.session, self._updates)
        for job in self._states:
            self._write_seats(job)
        if self._events:
            self.has_events = True
            self._repository.add_events(self.session, self._events)
        if self._standings:
            self._repository.write_standings(self.session, list(self._standings.values()))
        self._standings = {}
        self._updates = []
        self._events = []

    def _write_seats(self, job: OpenJob) -> None:
        round, known = self.state(job).round, self._written.get(job, job.state.round.slots)
        if round.slots is not known:
            changed = [seat for seat in round.slots if not known or seat is not known[seat.number]]
            revision = job.revision + 1
            self._repository.write_seats(self.session, job.id, round.number, changed, new=not known, revision=revision)
            self._written[job] = round.slots

    def changed(self) -> list[OpenJob]:
        """List the jobs of which rows have changed."""
        return [job for job, state in self._states.items() if not state.is_recorded_as(job.state)]

    def settle(self) -> None:
        """Let jobs have the states that the database has now."""
        for job, state in self._states.items():
            job.state = state


class SharedJobs(Protocol):
    """What a unit of work does where other processes change the same jobs."""

    def lock(self, session: Session, jobs: Collection[str] | None) -> None:
        """Keep other processes from changing jobs until the transaction ends, and learn what they have changed."""

    def tell(self, work: UnitOfWork) -> None:
        """Tell other processes of a unit of work; they hear it once it is recorded."""


class Units:
    """Units of work, one at a time. Nothing slow happens in one: bodies are folded by a worker."""

    def __init__(
        self,
        repository: Repository,
        clock: Callable[[], float],
        handle: Callable[[Effect], None],
        recorded: Callable[[], None] = lambda: None,
    ) -> None:
        """`recorded` is called after every unit that was recorded."""
        self.repository = repository
        self.clock = clock
        self.shared: SharedJobs | None = None
        self._recorded = recorded
        self.lock = threading.RLock()
        self._handle = handle

    @contextmanager
    def begin(self, *jobs: str, now: float | None = None) -> Iterator[UnitOfWork]:
        """Record the block's changes when it ends, and handle what follows; if that fails, nothing has changed.

        A block that names jobs changes no others: other processes go on with those. `now` is for a caller that has read
        the clock and goes on with what it read.
        """
        with self.lock:
            with self.repository.begin() as session:
                if self.shared is not None:
                    self.shared.lock(session, jobs or None)
                work = UnitOfWork(self.repository, session, self.clock() if now is None else now)
                yield work
                work.write()
                changed = [] if self.shared is None else work.changed()
                if self.shared is not None:
                    self.shared.tell(work)
            work.settle()
            for job in changed:
                job.revision += 1
            for effect in work.outbox:
                self._handle(effect)
            self._recorded()
