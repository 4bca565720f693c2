"""Every query: facts go in and come out as values, in the caller's transaction. SQLite or PostgreSQL, by URL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Select, bindparam, func, insert, select, tuple_, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from coordinator.store.database import Sessions
from coordinator.store.schema import (
    DEVICES,
    ENROLMENTS,
    EVENTS,
    FINISHED,
    JOBS,
    META,
    METRICS,
    ROUNDS,
    SEATS,
    UPDATES,
    DeviceRecord,
    EventRecord,
    JobRecord,
    MetricRecord,
    RoundRecord,
    UpdateRecord,
)
from federation import rounds
from federation.axes.cover import DeviceProfile
from federation.cohort import Seat
from federation.decode import decode

_SEAT_KEY: Final[dict[str, Any]] = {"job": bindparam("of"), "round": bindparam("in"), "number": bindparam("at")}
_NEW_SEAT: Final = insert(SEATS).values(**_SEAT_KEY, body=bindparam("body"))
_SEAT: Final = (
    update(SEATS).where(*(SEATS.c[name] == value for name, value in _SEAT_KEY.items())).values(body=bindparam("body"))
)
_Record = TypeVar("_Record")


class Repository:
    """The database of a coordinator. A session is one transaction; no method ends it."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    def begin(self) -> AbstractContextManager[Session]:
        """Open a transaction: when the block ends, all of it is recorded, or nothing."""
        return self.sessions.begin()

    def reading(self) -> Session:
        """Open a session that only reads."""
        return self.sessions()

    # --- jobs --------------------------------------------------------------------------------------------------------

    def add_job(self, session: Session, job: JobRecord) -> None:
        session.execute(insert(JOBS), vars(job))

    def change_job(self, session: Session, job: str, **values: Any) -> None:
        session.execute(update(JOBS).where(JOBS.c.id == job).values(**values))

    def job(self, session: Session, job: str) -> JobRecord | None:
        return _first(session, JobRecord, select(JOBS).where(JOBS.c.id == job))

    def job_state(self, session: Session, job: str) -> str | None:
        return session.scalar(select(JOBS.c.state).where(JOBS.c.id == job))

    def jobs(self, session: Session) -> list[JobRecord]:
        return _all(session, JobRecord, select(JOBS).order_by(JOBS.c.created_at))

    def unfinished_jobs(self, session: Session) -> list[JobRecord]:
        """List the jobs with a round to go on with, also stopped ones whose round is closing."""
        closing = select(ROUNDS.c.job).where(ROUNDS.c.state == "closing")
        going_on = JOBS.c.state.not_in(FINISHED) | JOBS.c.id.in_(closing)
        return _all(session, JobRecord, select(JOBS).where(going_on).order_by(JOBS.c.created_at))

    # --- rounds and their seats --------------------------------------------------------------------------------------

    def add_round(self, session: Session, job: str, round: rounds.Round) -> None:
        body = rounds.encode_head(round)
        record = RoundRecord(job, round.number, round.state, body, {}, round.opened_at, closed_at=None)
        session.execute(insert(ROUNDS), vars(record))

    def change_round(self, session: Session, job: str, round: rounds.Round, **values: Any) -> None:
        """Record a round but for its seats; `values` are further columns."""
        mine = update(ROUNDS).where(ROUNDS.c.job == job, ROUNDS.c.number == round.number)
        session.execute(mine.values(state=round.state, body=rounds.encode_head(round), **values))

    def write_seats(self, session: Session, job: str, number: int, seats: Iterable[Seat], *, new: bool) -> None:
        """Record the seats of a round that are new, or have changed."""
        rows = [{"of": job, "in": number, "at": seat.number, "body": rounds.encode_seat(seat)} for seat in seats]
        if rows:
            session.execute(_NEW_SEAT if new else _SEAT, rows)

    def rounds(self, session: Session, job: str) -> list[RoundRecord]:
        return _all(session, RoundRecord, select(ROUNDS).where(ROUNDS.c.job == job).order_by(ROUNDS.c.number))

    def newest_rounds(self, session: Session, job: str, count: int) -> list[RoundRecord]:
        newest = select(ROUNDS).where(ROUNDS.c.job == job).order_by(ROUNDS.c.number.desc()).limit(count)
        return _all(session, RoundRecord, newest)

    def seats(self, session: Session, round: RoundRecord) -> list[dict[str, Any]]:
        mine = select(SEATS.c.body).where(SEATS.c.job == round.job, SEATS.c.round == round.number)
        return list(session.scalars(mine.order_by(SEATS.c.number)))

    # --- updates -----------------------------------------------------------------------------------------------------

    def add_updates(self, session: Session, updates: Sequence[UpdateRecord]) -> None:
        session.execute(insert(UPDATES), [vars(record) for record in updates])

    def update(self, session: Session, task: str) -> UpdateRecord | None:
        return _first(session, UpdateRecord, select(UPDATES).where(UPDATES.c.task == task))

    def updates(self, session: Session, job: str, numbers: Iterable[int]) -> list[UpdateRecord]:
        """List what was acknowledged in some rounds, in the order of rounds and slots."""
        mine = select(UPDATES).where(UPDATES.c.job == job, UPDATES.c.round.in_(numbers))
        return _all(session, UpdateRecord, mine.order_by(UPDATES.c.round, UPDATES.c.slot))

    def updates_behind(self, session: Session, job: str, place: tuple[int, int], count: int) -> list[UpdateRecord]:
        """List a number of updates of a job that follow a round and slot."""
        behind = tuple_(UPDATES.c.round, UPDATES.c.slot) > place
        mine = select(UPDATES).where(UPDATES.c.job == job, behind).order_by(UPDATES.c.round, UPDATES.c.slot)
        return _all(session, UpdateRecord, mine.limit(count))

    def last_update(self, session: Session, job: str, device: str, before: int) -> tuple[int, str] | None:
        """Find the round and the task in which a device last took part."""
        mine = select(UPDATES.c.round, UPDATES.c.task).where(
            UPDATES.c.job == job, UPDATES.c.device == device, UPDATES.c.round < before
        )
        row = session.execute(mine.order_by(UPDATES.c.round.desc()).limit(1)).first()
        return (row.round, row.task) if row else None

    def update_of_slot(self, session: Session, job: str, number: int, slot: int) -> UpdateRecord | None:
        mine = select(UPDATES).where(UPDATES.c.job == job, UPDATES.c.round == number, UPDATES.c.slot == slot)
        return _first(session, UpdateRecord, mine)

    def contributors(self, session: Session, job: str, number: int) -> int:
        """Count the devices that have taken part up to a round."""
        mine = select(func.count(UPDATES.c.device.distinct()))
        return session.scalar(mine.where(UPDATES.c.job == job, UPDATES.c.round <= number)) or 1

    # --- events and scores -------------------------------------------------------------------------------------------

    def add_events(self, session: Session, events: list[dict[str, Any]]) -> None:
        session.execute(insert(EVENTS), events)

    def events(self, session: Session, job: str, after: int, count: int) -> list[EventRecord]:
        newer = select(EVENTS).where(EVENTS.c.job == job, EVENTS.c.id > after).order_by(EVENTS.c.id)
        return _all(session, EventRecord, newer.limit(count))

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

    def metrics(self, session: Session, job: str) -> list[MetricRecord]:
        return _all(session, MetricRecord, select(METRICS).where(METRICS.c.job == job).order_by(METRICS.c.id))

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

    def device_of(self, session: Session, token_hash: str) -> DeviceRecord | None:
        return _first(session, DeviceRecord, select(DEVICES).where(DEVICES.c.token_hash == token_hash))

    def devices(self, session: Session) -> list[DeviceRecord]:
        return _all(session, DeviceRecord, select(DEVICES).order_by(DEVICES.c.enrolled_at))

    def see(self, session: Session, devices: Sequence[str], now: float, every: float) -> set[str]:
        """Note that devices were heard of, not more often than `every` seconds; return those that are revoked."""
        facts = select(DEVICES.c.id, DEVICES.c.revoked, DEVICES.c.seen_at).where(DEVICES.c.id.in_(devices))
        known = session.execute(facts).all()
        late = [id for id, revoked, seen_at in known if not revoked and not now - every < seen_at <= now]
        if late:
            session.execute(update(DEVICES).where(DEVICES.c.id.in_(late)).values(seen_at=now))
        return {id for id, revoked, _ in known if revoked}

    def profile(self, session: Session, device: str) -> DeviceProfile:
        return _profile(session.execute(select(DEVICES.c.profile).where(DEVICES.c.id == device)).scalar_one())

    def present(self, session: Session, since: float) -> dict[str, DeviceProfile]:
        """List the profiles of devices that were heard of since then."""
        here = select(DEVICES.c.id, DEVICES.c.profile).where(DEVICES.c.revoked.is_(False))
        return {id: _profile(told) for id, told in session.execute(here.where(DEVICES.c.seen_at > since))}

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

    def meta(self, session: Session, key: str) -> str | None:
        return session.scalar(select(META.c.value).where(META.c.key == key))

    def add_meta(self, session: Session, key: str, value: str) -> None:
        session.execute(insert(META), {"key": key, "value": value})

    def census(self, session: Session, since: float) -> dict[str, Any]:
        """Count jobs by state, devices, those heard of since then, and committed rounds."""
        states = session.execute(select(JOBS.c.state, func.count()).group_by(JOBS.c.state))
        here = select(func.count()).select_from(DEVICES).where(DEVICES.c.revoked.is_(False))
        committed = select(func.count()).select_from(ROUNDS).where(ROUNDS.c.state == "committed")
        return {
            "jobs": {**dict.fromkeys(("running", "paused", *FINISHED), 0), **{row[0]: row[1] for row in states}},
            "devices": session.scalar(here),
            "devices_present": session.scalar(here.where(DEVICES.c.seen_at > since)),
            "rounds_committed": session.scalar(committed),
        }


def _all(session: Session, kind: type[_Record], statement: Select[Any]) -> list[_Record]:
    return [kind(*row) for row in session.execute(statement)]


def _first(session: Session, kind: type[_Record], statement: Select[Any]) -> _Record | None:
    row = session.execute(statement.limit(1)).first()
    return None if row is None else kind(*row)


def _count(result: Any) -> int:
    return cast("CursorResult[Any]", result).rowcount


def _profile(told: Mapping[str, Any]) -> DeviceProfile:
    return decode(DeviceProfile, told, "profile", defaults=True)
