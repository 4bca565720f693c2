"""Every query: facts go in and come out as values, in the caller's transaction. SQLite or PostgreSQL, by URL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

from sqlalchemy import (
    ColumnElement,
    Engine,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from coordinator.store.database import Sessions
from coordinator.store.postgresql import number_events, take_turn
from coordinator.store.schema import (
    BENCHMARKS,
    DEVICES,
    ENROLMENTS,
    EVENTS,
    FINISHED,
    JOBS,
    META,
    METADATA,
    METRICS,
    ROUNDS,
    SEATS,
    SESSIONS,
    SHARED_JOBS,
    STANDINGS,
    UPDATES,
    BenchmarkRecord,
    DeviceRecord,
    EventRecord,
    JobRecord,
    MetricRecord,
    RoundRecord,
    SessionRecord,
    SharedJobRecord,
    StandingRecord,
    UpdateRecord,
)
from federation import rounds
from federation.axes.cover import DeviceProfile
from federation.cohort import Seat
from federation.decode import decode
from federation.errors import InputError

_SEAT_KEY: Final[dict[str, Any]] = {"job": bindparam("of"), "round": bindparam("in"), "number": bindparam("at")}
_SEAT_VALUES: Final[dict[str, Any]] = {"body": bindparam("body"), "revision": bindparam("revised")}
_NEW_SEAT: Final = insert(SEATS).values(**_SEAT_KEY, **_SEAT_VALUES)
_SEAT: Final = (
    update(SEATS).where(*(SEATS.c[name] == value for name, value in _SEAT_KEY.items())).values(**_SEAT_VALUES)
)
MOST_MATCHES = 50
MOST_PROFILES = 4096  # different ones that are kept decoded
_AT_ONCE = 500  # ids in one statement
_ADD_UNLESS_THERE: Final = text("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT DO NOTHING")
_FAILURES: Final = ("TaskFailed", "RejectUpdate", "DeviceBenched")  # kinds of events
_READ_HERE: Final = ("JobCreated", "JobState", "Evaluated")  # kinds of events that are looked up, and stay
_ALIVE: Final = "alive"  # when a process was last at work; kept where several share the database
_CHECKED: Final = UPDATES.c.checked.is_(True)
_Record = TypeVar("_Record")


class Repository:
    """The database of a coordinator. A session is one transaction; no method ends it."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.engine: Engine = sessions.kw["bind"]
        self.is_shared = self.engine.dialect.name == "postgresql"  # with other processes, which change the same jobs

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """Open a transaction: when the block ends, all of it is recorded, or nothing."""
        with self.sessions.begin() as session:
            yield session

    def reading(self) -> Session:
        """Open a session that only reads."""
        return self.sessions()

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """Open a session that reads what was recorded at one moment, and waits for no lock."""
        with self.sessions() as session:
            session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    # --- processes that share the database ---------------------------------------------------------------------------

    def lock_jobs(self, session: Session, jobs: Collection[str] | None) -> dict[str, int]:
        """Keep other processes from changing open jobs until the transaction ends; return their revisions by job.

        Without `jobs` it is all of them, and a process that does the same waits, also if there are none.
        """
        if jobs is None:
            take_turn(session)
        return self.revisions(session, jobs, lock=True)

    def revisions(self, session: Session, jobs: Collection[str] | None, *, lock: bool = False) -> dict[str, int]:
        """Read the revisions of open jobs, the oldest jobs first: every process locks them in this order.

        Nothing else that changes is read with them: a statement that had to wait for a lock sees the new values of the
        locked rows only.
        """
        mine = select(SHARED_JOBS.c.job, SHARED_JOBS.c.revision).join(JOBS, JOBS.c.id == SHARED_JOBS.c.job)
        mine = mine.where(SHARED_JOBS.c.open.is_(True)).order_by(JOBS.c.created_at, JOBS.c.id)
        if jobs is not None:
            mine = mine.where(SHARED_JOBS.c.job.in_(jobs))
        if lock:
            mine = mine.with_for_update(of=SHARED_JOBS, key_share=True)
        return {row[0]: row[1] for row in session.execute(mine)}

    def add_shared_job(self, session: Session, job: str) -> None:
        session.execute(insert(SHARED_JOBS), vars(SharedJobRecord(job, revision=0, open=True, scoring=0)))

    def change_shared_job(self, session: Session, job: str, **values: Any) -> None:
        session.execute(update(SHARED_JOBS).where(SHARED_JOBS.c.job == job).values(**values))

    def shared_jobs(self, session: Session) -> list[SharedJobRecord]:
        """List the jobs that a process has to look after."""
        return _all(session, SharedJobRecord, select(SHARED_JOBS).order_by(SHARED_JOBS.c.job))

    def delete_shared_job(self, session: Session, job: str) -> None:
        session.execute(delete(SHARED_JOBS).where(SHARED_JOBS.c.job == job))

    def end_scoring(self, session: Session, job: str, version: int) -> None:
        """Note that no version of a job up to one waits for its score."""
        mine = update(SHARED_JOBS).where(SHARED_JOBS.c.job == job, SHARED_JOBS.c.scoring <= version)
        session.execute(mine.values(scoring=0))

    def waits_for_score(self, session: Session, job: str) -> bool:
        mine = select(SHARED_JOBS.c.scoring).where(SHARED_JOBS.c.job == job)
        return bool(session.scalar(mine))

    def is_alive(self, session: Session, now: float) -> float | None:
        """Note that a process is at work; return when one last was. Other processes wait to do the same."""
        before = session.scalar(select(META.c.value).where(META.c.key == _ALIVE).with_for_update())
        if before is None:
            self.add_meta(session, _ALIVE, str(now))
            return None
        self.change_meta(session, _ALIVE, str(max(now, float(before))))
        return float(before)

    def is_due(self, session: Session, key: str, now: float, every: float) -> bool:
        """Whether something was not done for so long, by any process; then it counts as done now."""
        before = session.scalar(select(META.c.value).where(META.c.key == key).with_for_update())
        if before is not None and 0 <= now - float(before) < every:
            return False
        if before is None:  # two processes may find this at once: the one whose row it becomes does the work
            return _count(session.execute(_ADD_UNLESS_THERE, {"key": key, "value": str(now)})) > 0
        self.change_meta(session, key, str(now))
        return True

    # --- jobs --------------------------------------------------------------------------------------------------------

    def add_job(self, session: Session, job: JobRecord) -> None:
        session.execute(insert(JOBS), vars(job))

    def change_job(self, session: Session, job: str, **values: Any) -> None:
        session.execute(update(JOBS).where(JOBS.c.id == job).values(**values))

    def job(self, session: Session, job: str) -> JobRecord | None:
        return _first(session, JobRecord, select(JOBS).where(JOBS.c.id == job))

    def state_and_version(self, session: Session, job: str) -> tuple[str, int]:
        """Read what changes of a job that is there."""
        state, version = session.execute(select(JOBS.c.state, JOBS.c.version).where(JOBS.c.id == job)).one()
        return state, version

    def job_state(self, session: Session, job: str) -> str | None:
        return session.scalar(select(JOBS.c.state).where(JOBS.c.id == job))

    def jobs(self, session: Session, match: str | None = None) -> list[JobRecord]:
        """List jobs: all, or those that a name or the beginning of an id may mean."""
        return _all(session, JobRecord, _matching(JOBS, match).order_by(JOBS.c.created_at))

    def ping(self, session: Session) -> None:
        """Read a row, if there is one."""
        session.execute(select(JOBS.c.id).limit(1)).first()

    def unfinished_jobs(self, session: Session) -> list[JobRecord]:
        """List the jobs with a round to go on with, also stopped ones whose round is closing."""
        closing = select(ROUNDS.c.job).where(ROUNDS.c.state == "closing")
        going_on = JOBS.c.state.not_in(FINISHED) | JOBS.c.id.in_(closing)
        return _all(session, JobRecord, select(JOBS).where(going_on).order_by(JOBS.c.created_at))

    def delete_job(self, session: Session, job: str) -> None:
        """Remove a job and every row that is about it."""
        for table in reversed(METADATA.sorted_tables):
            if "job" in table.c:
                session.execute(delete(table).where(table.c.job == job))
        session.execute(delete(JOBS).where(JOBS.c.id == job))

    # --- rounds and their seats --------------------------------------------------------------------------------------

    def add_round(self, session: Session, job: str, round: rounds.Round) -> None:
        body = rounds.encode_head(round)
        record = RoundRecord(job, round.number, round.state, body, {}, round.opened_at, closed_at=None)
        session.execute(insert(ROUNDS), vars(record))

    def change_round(self, session: Session, job: str, round: rounds.Round, **values: Any) -> None:
        """Record a round but for its seats; `values` are further columns."""
        mine = update(ROUNDS).where(ROUNDS.c.job == job, ROUNDS.c.number == round.number)
        session.execute(mine.values(state=round.state, body=rounds.encode_head(round), **values))

    def write_seats(
        self, session: Session, job: str, number: int, seats: Iterable[Seat], *, new: bool, revision: int
    ) -> None:
        """Record the seats of a round that are new, or have changed."""
        place = {"of": job, "in": number, "revised": revision}
        rows = [{**place, "at": seat.number, "body": rounds.encode_seat(seat)} for seat in seats]
        if rows:
            session.execute(_NEW_SEAT if new else _SEAT, rows)

    def rounds(self, session: Session, job: str, first: int = 0) -> list[RoundRecord]:
        mine = select(ROUNDS).where(ROUNDS.c.job == job, ROUNDS.c.number >= first)
        return _all(session, RoundRecord, mine.order_by(ROUNDS.c.number))

    def committed_rounds(self, session: Session, job: str) -> int:
        """Count the rounds of a job that led to a version."""
        mine = select(func.count()).select_from(ROUNDS).where(ROUNDS.c.job == job, ROUNDS.c.state == "committed")
        return session.scalar(mine) or 0

    def summary(self, session: Session, job: str, number: int) -> dict[str, Any]:
        """Read what a round came to; nothing if there is no such round."""
        mine = select(ROUNDS.c.summary).where(ROUNDS.c.job == job, ROUNDS.c.number == number)
        return session.scalar(mine) or {}

    def newest_rounds(self, session: Session, job: str, count: int) -> list[RoundRecord]:
        newest = select(ROUNDS).where(ROUNDS.c.job == job).order_by(ROUNDS.c.number.desc()).limit(count)
        return _all(session, RoundRecord, newest)

    def seats(self, session: Session, round: RoundRecord, since: int = -1) -> list[dict[str, Any]]:
        """List the seats of a round that were written after a revision."""
        mine = select(SEATS.c.body).where(SEATS.c.job == round.job, SEATS.c.round == round.number)
        return list(session.scalars(mine.where(SEATS.c.revision > since).order_by(SEATS.c.number)))

    def newest_seats(
        self, session: Session, job: str, first_round: int, count: int
    ) -> list[tuple[int, dict[str, Any]]]:
        """List the round and the body of the newest seats of a job from a round on, the newest rounds first."""
        mine = select(SEATS.c.round, SEATS.c.body).where(SEATS.c.job == job, SEATS.c.round >= first_round)
        rows = session.execute(mine.order_by(SEATS.c.round.desc(), SEATS.c.number).limit(count))
        return [(row[0], row[1]) for row in rows]

    # --- updates -----------------------------------------------------------------------------------------------------

    def add_updates(self, session: Session, updates: Sequence[UpdateRecord]) -> None:
        session.execute(insert(UPDATES), [vars(record) for record in updates])

    def update(self, session: Session, task: str) -> UpdateRecord | None:
        return _first(session, UpdateRecord, select(UPDATES).where(UPDATES.c.task == task))

    def updates(self, session: Session, job: str, numbers: Iterable[int]) -> list[UpdateRecord]:
        """List what counts in some rounds, in the order of rounds and slots."""
        mine = select(UPDATES).where(UPDATES.c.job == job, UPDATES.c.round.in_(numbers), _CHECKED)
        return _all(session, UpdateRecord, mine.order_by(UPDATES.c.round, UPDATES.c.slot))

    def unchecked_updates(self, session: Session, job: str | None = None) -> list[UpdateRecord]:
        """List what devices have put into object storage and no process has checked: of a job, or of all."""
        mine = select(UPDATES).where(~UPDATES.c.checked)
        mine = mine if job is None else mine.where(UPDATES.c.job == job)
        return _all(session, UpdateRecord, mine.order_by(UPDATES.c.job, UPDATES.c.round, UPDATES.c.slot))

    def mark_checked(self, session: Session, task: str) -> None:
        session.execute(update(UPDATES).where(UPDATES.c.task == task).values(checked=True))

    def delete_updates(self, session: Session, tasks: Collection[str]) -> None:
        session.execute(delete(UPDATES).where(UPDATES.c.task.in_(tasks)))

    def updates_of_slots(self, session: Session, job: str, number: int, slots: Sequence[int]) -> Iterator[UpdateRecord]:
        """List what counts in some slots of a round."""
        mine = select(UPDATES).where(UPDATES.c.job == job, UPDATES.c.round == number, _CHECKED).order_by(UPDATES.c.slot)
        for first in range(0, len(slots), _AT_ONCE):
            yield from _all(session, UpdateRecord, mine.where(UPDATES.c.slot.in_(slots[first : first + _AT_ONCE])))

    def updates_behind(self, session: Session, job: str, place: tuple[int, int], count: int) -> list[UpdateRecord]:
        """List a number of updates of a job that follow a round and slot."""
        behind = tuple_(UPDATES.c.round, UPDATES.c.slot) > place
        mine = select(UPDATES).where(UPDATES.c.job == job, behind, _CHECKED).order_by(UPDATES.c.round, UPDATES.c.slot)
        return _all(session, UpdateRecord, mine.limit(count))

    def last_update(self, session: Session, job: str, device: str, before: int) -> tuple[int, str] | None:
        """Find the round and the task in which a device last took part."""
        mine = select(UPDATES.c.round, UPDATES.c.task).where(
            UPDATES.c.job == job, UPDATES.c.device == device, UPDATES.c.round < before, _CHECKED
        )
        row = session.execute(mine.order_by(UPDATES.c.round.desc()).limit(1)).first()
        return (row.round, row.task) if row else None

    def update_of_slot(self, session: Session, job: str, number: int, slot: int) -> UpdateRecord | None:
        mine = select(UPDATES).where(UPDATES.c.job == job, UPDATES.c.round == number, UPDATES.c.slot == slot)
        return _first(session, UpdateRecord, mine.where(_CHECKED))

    def contributors(self, session: Session, job: str, number: int) -> int:
        """Count the devices that have taken part up to a round."""
        mine = select(func.count(UPDATES.c.device.distinct()))
        return session.scalar(mine.where(UPDATES.c.job == job, UPDATES.c.round <= number, _CHECKED)) or 1

    def updates_of_device(self, session: Session, device: str, count: int) -> list[UpdateRecord]:
        """List the newest updates of a device, in all jobs."""
        mine = select(UPDATES).where(UPDATES.c.device == device, _CHECKED)
        return _all(session, UpdateRecord, mine.order_by(UPDATES.c.arrived_at.desc()).limit(count))

    def newest_updates(self, session: Session, count: int) -> dict[str, UpdateRecord]:
        """List the newest update of every device that is not revoked, by device."""
        other = UPDATES.alias()
        mine = select(other.c.task).where(other.c.device == DEVICES.c.id, other.c.checked)
        newest = mine.order_by(other.c.arrived_at.desc()).limit(1)
        newer = DEVICES.join(UPDATES, UPDATES.c.task == newest.correlate(DEVICES).scalar_subquery())
        mine = select(UPDATES).select_from(newer).where(DEVICES.c.revoked.is_(False)).limit(count)
        return {row.device: row for row in _all(session, UpdateRecord, mine)}

    def tasks_done(self, session: Session, device: str) -> dict[str, int]:
        """Count the updates of a device, by job."""
        mine = select(UPDATES.c.job, func.count()).where(UPDATES.c.device == device, _CHECKED)
        return {row[0]: row[1] for row in session.execute(mine.group_by(UPDATES.c.job))}

    # --- how devices do ----------------------------------------------------------------------------------------------

    def standings(
        self, session: Session, *, job: str | None = None, device: str | None = None, since: int = -1
    ) -> list[StandingRecord]:
        """List how devices have done: those of a job (written after a revision), or one device in every job."""
        wanted = {"job": job, "device": device}
        mine = [STANDINGS.c[name] == value for name, value in wanted.items() if value is not None]
        mine += [STANDINGS.c.revision > since] if since >= 0 else []
        return _all(session, StandingRecord, select(STANDINGS).where(*mine).order_by(STANDINGS.c.at))

    def benched(self, session: Session, now: float) -> dict[str, float]:
        """List the devices that a job which is not over gives no task yet, and until when."""
        open_jobs = select(JOBS.c.id).where(JOBS.c.state.not_in(FINISHED))
        mine = select(STANDINGS.c.device, func.max(STANDINGS.c.benched_until))
        mine = mine.where(STANDINGS.c.benched_until > now, STANDINGS.c.job.in_(open_jobs)).group_by(STANDINGS.c.device)
        return {row[0]: row[1] for row in session.execute(mine)}

    def write_standings(self, session: Session, standings: Sequence[StandingRecord]) -> None:
        """Record the standings that are new, or have changed."""
        new = (postgresql if self.is_shared else sqlite).insert(STANDINGS)
        place, values = STANDINGS.primary_key, {column.name: new.excluded[column.name] for column in STANDINGS.c}
        rows = [vars(record) for record in standings]
        session.connection().execute(new.on_conflict_do_update(index_elements=place, set_=values), rows)

    # --- what training costs on devices ------------------------------------------------------------------------------

    def write_benchmark(self, session: Session, record: BenchmarkRecord, most: int) -> None:
        """Record a benchmark in place of its predecessor; of one device only the newest `most` stay."""
        same = [column == getattr(record, column.name) for column in BENCHMARKS.primary_key]
        session.execute(delete(BENCHMARKS).where(*same))
        session.execute(insert(BENCHMARKS), vars(record))
        mine = BENCHMARKS.c.device == record.device
        newest = select(BENCHMARKS.c.at).where(mine).order_by(BENCHMARKS.c.at.desc())
        oldest = session.scalar(newest.offset(most - 1).limit(1))
        if oldest is not None:
            session.execute(delete(BENCHMARKS).where(mine, BENCHMARKS.c.at < oldest))

    def delete_benchmarks(self, session: Session, device: str) -> None:
        session.execute(delete(BENCHMARKS).where(BENCHMARKS.c.device == device))

    def benchmarks(
        self, session: Session, bundle: str | None, device: str | None, count: int
    ) -> list[tuple[BenchmarkRecord, str]]:
        """List the newest benchmarks and the names of their devices: all, those of a bundle, of a device."""
        wanted = {"bundle": bundle, "device": device}
        mine = [BENCHMARKS.c[name] == value for name, value in wanted.items() if value is not None]
        found = select(*BENCHMARKS.c, DEVICES.c.name).join(DEVICES, DEVICES.c.id == BENCHMARKS.c.device).where(*mine)
        rows = session.execute(found.order_by(BENCHMARKS.c.at.desc(), BENCHMARKS.c.device).limit(count))
        return [(BenchmarkRecord(*row[:-1]), row[-1]) for row in rows]

    # --- events and scores -------------------------------------------------------------------------------------------

    def add_events(self, session: Session, events: list[dict[str, Any]]) -> None:
        if self.is_shared:  # a client that has seen a number sees no lower one come later
            number_events(session)
        session.execute(insert(EVENTS), events)

    def events(self, session: Session, job: str, after: int, count: int) -> list[EventRecord]:
        newer = select(EVENTS).where(EVENTS.c.job == job, EVENTS.c.id > after).order_by(EVENTS.c.id)
        return _all(session, EventRecord, newer.limit(count))

    def all_events(self, session: Session, after: int, count: int) -> list[EventRecord]:
        """List events of all jobs behind a number."""
        newer = select(EVENTS).where(EVENTS.c.id > after).order_by(EVENTS.c.id)
        return _all(session, EventRecord, newer.limit(count))

    def count_old_events(self, session: Session, job: str, keep: int, before: float) -> int:
        """Count the events of a job that may go: those before a time, and all but the newest `keep`; 0 keeps all."""
        return session.scalar(select(func.count()).where(*self._old_events(session, job, keep, before))) or 0

    def delete_old_events(self, session: Session, job: str, keep: int, before: float, most: int) -> None:
        """Remove the oldest of these, at most so many."""
        old = select(EVENTS.c.id).where(*self._old_events(session, job, keep, before))
        session.execute(delete(EVENTS).where(EVENTS.c.id.in_(old.order_by(EVENTS.c.id).limit(most))))

    def _old_events(self, session: Session, job: str, keep: int, before: float) -> list[ColumnElement[bool]]:
        newest = select(EVENTS.c.id).where(EVENTS.c.job == job).order_by(EVENTS.c.id.desc())
        border = session.scalar(newest.offset(keep - 1).limit(1)) if keep else None
        old = (EVENTS.c.at < before) | (EVENTS.c.id < (border or 0))
        return [EVENTS.c.job == job, EVENTS.c.kind.not_in(_READ_HERE), old]

    def last_event(self, session: Session) -> int:
        return session.scalar(select(func.max(EVENTS.c.id))) or 0

    def failures_of_device(self, session: Session, device: str, count: int) -> list[EventRecord]:
        """List the newest events that tell of a failure of a device, in all jobs."""
        mine = select(EVENTS).where(EVENTS.c.kind.in_(_FAILURES), EVENTS.c.body["device"].as_string() == device)
        return _all(session, EventRecord, mine.order_by(EVENTS.c.id.desc()).limit(count))

    def failure_of_task(self, session: Session, job: str, task: str, reason: str) -> str | None:
        """Find the message of the last failure of a task for a reason; None if there was none."""
        told = select(EVENTS.c.body).where(EVENTS.c.job == job, EVENTS.c.kind == "TaskFailed")
        mine = told.where(EVENTS.c.body["task"].as_string() == task, EVENTS.c.body["reason"].as_string() == reason)
        found = session.scalar(mine.order_by(EVENTS.c.id.desc()).limit(1))
        return None if found is None else str(found["message"])

    def state_changed_at(self, session: Session, job: str) -> float | None:
        """Find when the state of a job was last set."""
        told = select(func.max(EVENTS.c.at)).where(EVENTS.c.job == job, EVENTS.c.kind == "JobState")
        found: float | None = session.scalar(told)
        return found

    def last_sign_of_life(self, session: Session) -> float | None:
        """Find when the coordinator last wrote something."""
        found = [session.scalar(select(func.max(at))) for at in (EVENTS.c.at, DEVICES.c.seen_at)]
        return max((at for at in found if at is not None), default=None)

    def add_metrics(self, session: Session, metrics: list[dict[str, Any]]) -> None:
        if metrics:
            session.execute(insert(METRICS), metrics)

    def metrics(self, session: Session, job: str, first: int = 0) -> list[MetricRecord]:
        mine = select(METRICS).where(METRICS.c.job == job, METRICS.c.version >= first)
        return _all(session, MetricRecord, mine.order_by(METRICS.c.id))

    def scores(self, session: Session, job: str) -> dict[str, list[tuple[int, float]]]:
        """List the versions of a job with their values, by metric."""
        found: dict[str, list[tuple[int, float]]] = {}
        mine = select(METRICS.c.name, METRICS.c.version, METRICS.c.value).where(METRICS.c.job == job)
        for name, version, value in session.execute(mine.order_by(METRICS.c.version)):
            found.setdefault(name, []).append((version, value))
        return found

    def is_scored(self, session: Session, job: str, version: int) -> bool:
        told = select(EVENTS.c.id).where(EVENTS.c.job == job, EVENTS.c.kind == "Evaluated")
        return session.scalar(told.where(EVENTS.c.body["version"].as_integer() == version).limit(1)) is not None

    # --- devices -----------------------------------------------------------------------------------------------------

    def add_device(self, session: Session, device: DeviceRecord) -> None:
        session.execute(insert(DEVICES), vars(device))

    def change_device(self, session: Session, device: str, **values: Any) -> bool:
        """Set columns of a device; False if there is none."""
        return _count(session.execute(update(DEVICES).where(DEVICES.c.id == device).values(**values))) > 0

    def device(self, session: Session, device: str) -> DeviceRecord | None:
        return _first(session, DeviceRecord, select(DEVICES).where(DEVICES.c.id == device))

    def names(self, session: Session) -> dict[str, str]:
        """List the names of all devices, by id."""
        return {row[0]: row[1] for row in session.execute(select(DEVICES.c.id, DEVICES.c.name))}

    def is_named(self, session: Session, name: str) -> bool:
        """Whether a device that is not revoked has a name."""
        mine = select(DEVICES.c.id).where(DEVICES.c.name == name, DEVICES.c.revoked.is_(False))
        return session.scalar(mine.limit(1)) is not None

    def device_of(self, session: Session, token_hash: str) -> DeviceRecord | None:
        return _first(session, DeviceRecord, select(DEVICES).where(DEVICES.c.token_hash == token_hash))

    def devices(self, session: Session, match: str | None = None) -> list[DeviceRecord]:
        """List devices: all, or those that a name or the beginning of an id may mean."""
        return _all(session, DeviceRecord, _matching(DEVICES, match).order_by(DEVICES.c.enrolled_at))

    def set_here(
        self, session: Session, devices: Sequence[str], until: float, besides: tuple[float, float] = (1.0, 0.0)
    ) -> None:
        """Note until when devices are there, unless what is known lies between two times; lock rows in order."""
        mine = select(DEVICES.c.id).where(DEVICES.c.id.in_(devices), ~DEVICES.c.here_until.between(*besides))
        rows = mine.order_by(DEVICES.c.id).with_for_update(key_share=True).cte()
        changed = update(DEVICES).where(DEVICES.c.id.in_(select(rows.c.id)))
        session.execute(changed.values(here_until=until, away_until=0.0))

    def set_away(self, session: Session, until: Mapping[str, float]) -> None:
        """Note until when devices count as there that are away, a time for each; lock rows in order."""
        mine = update(DEVICES).where(DEVICES.c.id == bindparam("whose"))
        rows = [{"whose": device, "back": until[device]} for device in sorted(until)]
        session.connection().execute(mine.values(here_until=0.0, away_until=bindparam("back")), rows)

    def away(self, session: Session, now: float, among: Collection[str] | None = None) -> Sequence[tuple[str, float]]:
        """List the devices that were told to come back, and until when they count as there."""
        mine = select(DEVICES.c.id, DEVICES.c.away_until).where(DEVICES.c.away_until >= now)
        mine = mine.where(DEVICES.c.revoked.is_(False))
        asked = [mine] if among is None else [mine.where(DEVICES.c.id.in_(ids)) for ids in _parts(among)]
        return [(id, until) for statement in asked for id, until in session.execute(statement)]

    def count_there(self, session: Session, now: float) -> tuple[int, int]:
        """Count the devices that would come for a task, and those that were told to come back."""
        counted = select(func.count()).select_from(DEVICES).where(DEVICES.c.revoked.is_(False))
        times = DEVICES.c.here_until, DEVICES.c.away_until
        here, away = (session.scalar(counted.where(time >= now)) or 0 for time in times)
        return here, away

    def here(self, session: Session, now: float) -> Sequence[str]:
        """List the devices that would come for a task, by what all processes have noted."""
        there = select(DEVICES.c.id).where(DEVICES.c.revoked.is_(False), DEVICES.c.here_until >= now)
        return session.scalars(there).all()

    def see(self, session: Session, devices: Sequence[str], now: float, every: float) -> set[str]:
        """Note that devices were heard of, not more often than `every` seconds; return those that are revoked."""
        facts = select(DEVICES.c.id, DEVICES.c.revoked, DEVICES.c.seen_at).where(DEVICES.c.id.in_(devices))
        known = session.execute(facts).all()
        late = [id for id, revoked, seen_at in known if not revoked and not now - every < seen_at <= now]
        if late:
            session.execute(update(DEVICES).where(DEVICES.c.id.in_(late)).values(seen_at=now))
        return {id for id, revoked, _ in known if revoked}

    def present(self, session: Session, since: float) -> Sequence[tuple[str, float]]:
        """List the devices that were heard of since then, and when."""
        mine = select(DEVICES.c.id, DEVICES.c.seen_at).where(DEVICES.c.revoked.is_(False), DEVICES.c.seen_at > since)
        return [(id, at) for id, at in session.execute(mine)]

    def profiles(self, session: Session, devices: Collection[str]) -> tuple[dict[str, DeviceProfile], dict[str, str]]:
        """Read the profiles of devices; also list those that cannot be read, and why."""
        profiles, unreadable = {}, {}
        for ids in _parts(devices):
            for id, told in session.execute(select(DEVICES.c.id, DEVICES.c.profile).where(DEVICES.c.id.in_(ids))):
                try:
                    profiles[id] = _profile(json.dumps(told))
                except InputError as error:  # an earlier program took what this one does not
                    unreadable[id] = str(error)
        return profiles, unreadable

    def last_benchmark_at(self, session: Session) -> float | None:
        """Find when the newest benchmark arrived."""
        found: float | None = session.scalar(select(func.max(BENCHMARKS.c.at)))
        return found

    # --- credentials, numbers ----------------------------------------------------------------------------------------

    def add_enrolment(self, session: Session, token_hash: str, expires_at: float, uses: int) -> None:
        values = {"token_hash": token_hash, "expires_at": expires_at, "uses_left": uses}
        session.execute(insert(ENROLMENTS), values)

    def use_enrolment(self, session: Session, token_hash: str, now: float) -> bool:
        """Take one use, in one statement: of two devices that come at once with the last use, one gets it."""
        columns = ENROLMENTS.c
        usable = (columns.token_hash == token_hash, columns.uses_left > 0, columns.expires_at > now)
        taken = update(ENROLMENTS).where(*usable).values(uses_left=columns.uses_left - 1)
        return _count(session.execute(taken)) > 0

    def has_enrolment(self, session: Session, token_hash: str, now: float) -> bool:
        """Whether a device could enrol with a token now."""
        columns = ENROLMENTS.c
        usable = (columns.token_hash == token_hash, columns.uses_left > 0, columns.expires_at > now)
        return session.scalar(select(columns.token_hash).where(*usable)) is not None

    def add_session(self, session: Session, record: SessionRecord, most: int) -> set[str]:
        """Record a session; those that are over go, and the oldest of too many. Return the hashes of the others."""
        newest = select(SESSIONS.c.token_hash, SESSIONS.c.expires_at).order_by(SESSIONS.c.created_at.desc())
        rows = session.execute(newest).all()
        kept = set([token for token, expires_at in rows if expires_at > record.created_at][: most - 1])
        gone = [token for token, _ in rows if token not in kept]  # by name: another process may open one meanwhile
        session.execute(delete(SESSIONS).where(SESSIONS.c.token_hash.in_(gone)))
        session.execute(insert(SESSIONS), vars(record))
        return kept

    def page_session(self, session: Session, token_hash: str) -> SessionRecord | None:
        return _first(session, SessionRecord, select(SESSIONS).where(SESSIONS.c.token_hash == token_hash))

    def end_session(self, session: Session, token_hash: str) -> None:
        session.execute(delete(SESSIONS).where(SESSIONS.c.token_hash == token_hash))

    def meta(self, session: Session, key: str) -> str | None:
        return session.scalar(select(META.c.value).where(META.c.key == key))

    def add_meta(self, session: Session, key: str, value: str) -> None:
        session.execute(insert(META), {"key": key, "value": value})

    def change_meta(self, session: Session, key: str, value: str) -> None:
        session.execute(update(META).where(META.c.key == key).values(value=value))

    def census(self, session: Session, since: float, now: float) -> dict[str, Any]:
        """Count jobs by state, devices, those heard of since then or away as of now, and committed rounds."""
        states = session.execute(select(JOBS.c.state, func.count()).group_by(JOBS.c.state))
        here = select(func.count()).select_from(DEVICES).where(DEVICES.c.revoked.is_(False))
        committed = select(func.count()).select_from(ROUNDS).where(ROUNDS.c.state == "committed")
        return {
            "jobs": {**dict.fromkeys(("running", "paused", *FINISHED), 0), **{row[0]: row[1] for row in states}},
            "devices": session.scalar(here),
            "devices_present": session.scalar(here.where(~_is_gone(since, now))),
            "rounds_committed": session.scalar(committed),
        }

    def device_states(self, session: Session, since: float, now: float, working: Collection[str]) -> dict[str, int]:
        """Count devices by what they do, as of now; gone are those that were not heard of since then."""
        open_jobs = select(JOBS.c.id).where(JOBS.c.state.not_in(FINISHED))
        benched = select(STANDINGS.c.device).where(STANDINGS.c.benched_until > now, STANDINGS.c.job.in_(open_jobs))
        gone, resting = (_is_gone(since, now), "gone"), (DEVICES.c.id.in_(benched), "benched")
        state = case((DEVICES.c.revoked.is_(True), "revoked"), gone, resting, else_="waiting").label("state")
        counted = select(state, func.count()).group_by(state)
        found = Counter({row[0]: row[1] for row in session.execute(counted)})
        for ids in _parts(working):
            for known, count in session.execute(counted.where(DEVICES.c.id.in_(ids))):
                if known != "revoked":
                    found[known] -= count
                    found["working"] += count
        return found

    def job_figures(self, session: Session, count: int) -> list[dict[str, Any]]:
        """List the numbers of the newest jobs: state, version, the last committed round and the scores of versions."""
        found = []
        for job in _all(session, JobRecord, select(JOBS).order_by(JOBS.c.created_at.desc()).limit(count)):
            last = select(ROUNDS).where(ROUNDS.c.job == job.id, ROUNDS.c.state == "committed")
            round = _first(session, RoundRecord, last.order_by(ROUNDS.c.number.desc()))
            scored = select(func.max(METRICS.c.version)).where(METRICS.c.job == job.id).scalar_subquery()
            newest = select(METRICS).where(METRICS.c.job == job.id, METRICS.c.version == scored)
            scores = {row.name: row.value for row in _all(session, MetricRecord, newest)}
            found.append({"job": job, "round": round, "scores": scores})
        return found

    def failing_devices(self, session: Session, count: int) -> list[tuple[str, str, int]]:
        """List the devices with the most failures: id, name, failures."""
        failures = func.sum(STANDINGS.c.failures)
        mine = select(DEVICES.c.id, DEVICES.c.name, failures).join(STANDINGS, STANDINGS.c.device == DEVICES.c.id)
        mine = mine.group_by(DEVICES.c.id, DEVICES.c.name).having(failures > 0)
        rows = session.execute(mine.order_by(failures.desc(), DEVICES.c.id).limit(count))
        return [(row[0], row[1], int(row[2])) for row in rows]


def _all(session: Session, kind: type[_Record], statement: Select[Any]) -> list[_Record]:
    return [kind(*row) for row in session.execute(statement)]


def _matching(table: Table, match: str | None) -> Select[Any]:
    """Select what a text may mean, the best first and not many; everything if there is no text."""
    if match is None:
        return select(table)
    meant = (table.c.name == match) | table.c.id.startswith(match, autoescape=True)
    return select(table).where(meant).order_by(table.c.id != match, table.c.name != match).limit(MOST_MATCHES)


def _first(session: Session, kind: type[_Record], statement: Select[Any]) -> _Record | None:
    row = session.execute(statement.limit(1)).first()
    return None if row is None else kind(*row)


def _count(result: Any) -> int:
    return cast("CursorResult[Any]", result).rowcount


def _is_gone(since: float, now: float) -> ColumnElement[bool]:
    """Whether a device was not heard of since then, and was not told to come back."""
    return and_(DEVICES.c.seen_at <= since, DEVICES.c.away_until < now)


def _parts(ids: Collection[str]) -> Iterator[list[str]]:
    """Divide ids into what one statement takes."""
    listed = sorted(ids)
    return (listed[first : first + _AT_ONCE] for first in range(0, len(listed), _AT_ONCE))


@lru_cache(MOST_PROFILES)
def _profile(told: str) -> DeviceProfile:
    return decode(DeviceProfile, json.loads(told), "profile", defaults=True)
