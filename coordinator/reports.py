"""Read what is recorded of jobs, rounds, devices and events. No lock: the database has only what is settled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from statistics import median
from typing import Any

from sqlalchemy.orm import Session

from coordinator.best_versions import BestVersions
from coordinator.errors import NotFound
from coordinator.evaluation import Evaluations
from coordinator.jobs import OpenJob, Units
from coordinator.pacing import Away, Pacing
from coordinator.presence import PRESENCE, Presence
from coordinator.standings import why_benched
from coordinator.store.repository import Repository
from coordinator.store.schema import FINISHED, DeviceRecord, EventRecord, JobRecord, StandingRecord, UpdateRecord
from federation import rounds
from federation.printable import printable
from federation.waiting import Fleet, Waiting, waiting_device, waiting_for

EVENTS_AT_ONCE = 500
LAST_UPDATES = 20  # of a device, of which medians are taken
LARGEST_ROUND = 2**31 - 1
MOST_JOBS, MOST_DEVICES = 50, 20  # that have numbers of their own in Prometheus
MOST_WAITING = 3  # jobs that a device without a task hears of
UPDATES_AT_ONCE = 500

ROUND_COLUMNS = (
    "number",
    "state",
    "opened_at",
    "closed_at",
    "seconds",
    "updates",
    "samples",
    "bytes_up",
    "loss",
    "lost_state",
    "reused",
)
METRIC_COLUMNS = ("version", "name", "value", "at")
# Of an update, then of its report; the parts of the time as in docs/guides/fine-tune.md.
TIMING_COLUMNS = (
    "round",
    "slot",
    "device",
    "boundary",
    "engine",
    "samples",
    "bytes",
    "arrived_at",
    "lost_state",
    "wall",
    "download",
    "hidden_download",
    "load",
    "forward",
    "activation_io",
    "training",
    "training_forward",
    "backward",
    "optimiser",
    "state",
    "evaluation",
    "other",
)


class Reports:
    """Answer questions about everything that is recorded, and which devices no open job can use."""

    def __init__(
        self,
        repository: Repository,
        open_jobs: Mapping[str, OpenJob],
        evaluations: Evaluations,
        best: BestVersions,
        units: Units,
        presence: Presence,
        pacing: Pacing,
    ) -> None:
        self._repository = repository
        self._open_jobs = open_jobs
        self._evaluations = evaluations
        self._best = best
        self._lock = units.lock
        self._clock = units.clock
        self._presence = presence
        self._pacing = pacing

    def jobs(self, match: str | None = None) -> list[dict[str, Any]]:
        """List jobs: all, or those that a name or the beginning of an id may mean."""
        with self._repository.reading() as session:
            return [vars(job) for job in self._repository.jobs(session, match)]

    def record(self, job: str) -> JobRecord:
        with self._repository.reading() as session:
            found = self._repository.job(session, job)
        if found is None:
            raise NotFound(f"there is no job {job!r}")
        return found

    def job(self, job: str) -> dict[str, Any]:
        """Describe a job with its newest round and its best version."""
        record = self.record(job)
        with self._repository.reading() as session:
            best = self._best.of(session, record)
            (newest,) = self._repository.newest_rounds(session, job, 1)
            body = {**newest.body, "slots": self._repository.seats(session, newest)}
        open_job = self._open_jobs.get(job)
        unfit = dict(open_job.state.unfit) if open_job else {}
        told = {"round": {**vars(newest), "body": body}, "unfit": unfit, "best": None if best is None else vars(best)}
        now, known = self._clock(), open_job.state.standings if open_job else {}
        benched = {device: why for device, standing in known.items() if (why := why_benched(standing, now))}
        return {**vars(record), **told, "benched": benched, "waiting": self._waiting(record, open_job)}

    def _waiting(self, record: JobRecord, job: OpenJob | None) -> dict[str, Any] | None:
        """Say what a job waits for, if it does."""
        found = None if job is None else waiting_for(job.state.round, self._fleet(job), paused=record.state == "paused")
        if found is None and self._evaluations.unfinished(record.id):
            found = Waiting("evaluation", f"version {record.version} is being scored")
        return None if found is None else vars(found)

    def _fleet(self, job: OpenJob) -> Fleet:
        """Say what is known of a job's devices, those that are there counted now."""
        now = self._clock()
        with self._repository.reading() as session:
            missing = self._missing(session, job, self._presence.here(session, now), now)
            standings = self._repository.standings(session, job=job.id)
            names = self._repository.names(session)
        benched = {known.device: _why_benched(known) for known in standings if (known.benched_until or 0.0) > now}
        return Fleet(missing, job.state.unfit, benched, names)

    def _missing(self, session: Session, job: OpenJob, here: Collection[str], now: float) -> int:
        """Count the devices that are missing to begin a round; a round does not wait for those that are benched."""
        counted = [device for device in here if device not in job.state.unfit]
        away = self._pacing.count_away(session, job.state, now)
        if away != Away(0, 0):
            return job.engine.missing_to_begin(len(counted), away.resting, away.awaited)
        fit = any(not job.state.why_benched(device, now) for device in counted)
        least = job.engine.plan.participate.needed if fit or not counted else len(counted) + 1
        return max(0, least - len(counted))

    def waiting(self, device: str) -> str:
        """Say to a device that just asked in vain what the jobs wait for. No database: a whole fleet asks."""
        jobs = [job for job in list(self._open_jobs.values()) if device not in job.state.unfit]
        if not jobs:
            return "" if self._open_jobs else "there is no job"
        said = []
        for job in jobs[:MOST_WAITING]:
            state = job.state
            effect = state.waits_for[1] if state.waits_for and state.waits_for[0] == state.round.number else None
            missing = effect.count if isinstance(effect, rounds.WaitForDevices) else 0
            why = state.why_benched(device, self._clock())
            fleet = Fleet(missing, benched={device: why} if why else {})
            words = waiting_device(state.round, fleet, device, paused=state.paused_at is not None)
            said.append(f"job {printable(job.engine.plan.name or job.engine.manifest.name, 40)} {words}")
        return "; ".join([*said, *(["..."] if len(jobs) > MOST_WAITING else [])])

    def job_state(self, job: str) -> str:
        with self._repository.reading() as session:
            state = self._repository.job_state(session, job)
        if state is None:
            raise NotFound(f"there is no job {job!r}")
        return state

    def is_over(self, job: str) -> bool:
        """Whether a job has ended and its last version is scored, if that is wanted."""
        if self.job_state(job) not in FINISHED:
            return False
        with self._lock:  # behind whatever the end of the job led to
            return not self._evaluations.unfinished(job)

    def rounds(self, job: str, first: int = 0) -> list[dict[str, Any]]:
        """List the rounds of a job from one on."""
        self.job_state(job)
        with self._repository.reading() as session:
            rows = self._repository.rounds(session, job, first)
        return [_without(row, "body") for row in rows]

    def round_rows(self, job: str) -> list[dict[str, Any]]:
        """List the rounds of a job, flat: a row for each."""
        rows = self.rounds(job)
        took = [None if row["closed_at"] is None else row["closed_at"] - row["opened_at"] for row in rows]
        return [{**row, **row["summary"], "seconds": seconds} for row, seconds in zip(rows, took)]

    def metrics(self, job: str, first: int = 0) -> list[dict[str, Any]]:
        """List the scores of versions from one on."""
        self.job_state(job)
        with self._repository.reading() as session:
            return [_without(row, "id", "job") for row in self._repository.metrics(session, job, first)]

    def events(self, job: str, after: int) -> tuple[list[dict[str, Any]], bool]:
        """List events behind a number; also whether there will be no others behind these."""
        over = self.is_over(job)
        with self._repository.reading() as session:
            return [vars(row) for row in self._repository.events(session, job, after, EVENTS_AT_ONCE)], over

    def unfit(self, device: str) -> str:
        """Say why none of the jobs that run can use a device; nothing if one can, or if there is none."""
        running = [job for job in list(self._open_jobs.values()) if job.state.paused_at is None]
        now = self._clock()
        found = {job.id: job.state.unfit.get(device) or job.state.why_benched(device, now) for job in running}
        return "; ".join(f"job {job}: {why}" for job, why in found.items()) if all(found.values()) else ""

    def devices(self, match: str | None = None) -> list[dict[str, Any]]:
        """List devices: all, or those that a name or the beginning of an id may mean."""
        with self._repository.reading() as session:
            rows = self._repository.devices(session, match)
            benched = self._repository.benched(session, self._clock())
        working = self._working()
        return [self._described(row, working, benched) for row in rows]

    def _working(self) -> set[str]:
        """List the devices that hold a task."""
        rounds = [job.state.round for job in list(self._open_jobs.values()) if job.state.round.state == "collecting"]
        return {seat.member.device for round in rounds for seat in round.slots if seat.state == "leased"}

    def _described(self, row: DeviceRecord, working: Collection[str], benched: Mapping[str, float]) -> dict[str, Any]:
        if row.revoked:
            state = "revoked"
        elif row.id in working:
            state = "working"
        elif row.seen_at <= self._clock() - PRESENCE and row.away_until < self._clock():
            state = "gone"
        else:
            state = "benched" if row.id in benched else "waiting"
        unfit = "" if row.revoked else self.unfit(row.id)
        return {
            **_without(row, "token_hash", "here_until", "away_until"),
            "state": state,
            "benched_until": benched.get(row.id),
            "unfit": unfit,
        }

    def device(self, device: str) -> dict[str, Any]:
        """Describe a device with what it did: tasks, failures, where its time goes, how it stands in each job."""
        with self._repository.reading() as session:
            row = self._repository.device(session, device)
            if row is None:
                raise NotFound(f"there is no device {device!r}")
            benched = self._repository.benched(session, self._clock())
            done = self._repository.tasks_done(session, device)
            updates = [timing(found) for found in self._repository.updates_of_device(session, device, LAST_UPDATES)]
            failures = self._repository.failures_of_device(session, device, 1)
            standings = {known.job: known for known in self._repository.standings(session, device=device)}
            jobs = [self._repository.job(session, job) for job in done.keys() | standings]
        parts = sorted({part for update in updates for part in update["seconds"]}, key=TIMING_COLUMNS.index)
        seconds = {part: median(u["seconds"][part] for u in updates if part in u["seconds"]) for part in parts}
        return {
            **self._described(row, self._working(), benched),
            "tasks_done": sum(done.values()),
            "tasks_failed": sum(known.failures for known in standings.values()),
            "last_error": _error(failures[0]) if failures else None,
            "last_update_at": updates[0]["arrived_at"] if updates else None,
            "seconds": seconds,
            "jobs": [self._in_job(job, device, done, standings.get(job.id)) for job in jobs if job is not None],
        }

    def _in_job(
        self, job: JobRecord, device: str, done: Mapping[str, int], standing: StandingRecord | None
    ) -> dict[str, Any]:
        open_job = self._open_jobs.get(job.id)
        seat = None if open_job is None else open_job.state.round.seat_of(device)
        known = standing or StandingRecord(job.id, device)
        return {
            "job": job.id,
            "name": job.name,
            "boundary": seat.member.boundary if seat else self._last_boundary(job.id, device),
            "task": seat.state if seat else "",
            "done": done.get(job.id, 0),
            "failed": known.failures,
            "benched_until": known.benched_until if (known.benched_until or 0.0) > self._clock() else None,
            "reason": known.reason,
            "message": known.message,
        }

    def _last_boundary(self, job: str, device: str) -> str:
        with self._repository.reading() as session:
            last = self._repository.last_update(session, job, device, LARGEST_ROUND)
            update = self._repository.update(session, last[1]) if last else None
        return timing(update)["boundary"] if update else ""

    def figures(self) -> dict[str, Any]:
        """Collect numbers for Prometheus: of the newest jobs, of the devices that fail most, of devices by state."""
        now = self._clock()
        with self._repository.reading() as session:
            jobs = self._repository.job_figures(session, MOST_JOBS)
            failing = self._repository.failing_devices(session, MOST_DEVICES)
        states = self.device_states()
        selecting = [job for job in list(self._open_jobs.values()) if _selects(job)]
        with self._repository.reading() as session:
            here = self._presence.here(session, now) if selecting else ()
            missing = {job.id: self._missing(session, job, here, now) for job in selecting}
        return {"jobs": jobs, "failing": failing, "states": states, "missing": missing}

    def device_states(self) -> dict[str, int]:
        """Count devices by what they do now."""
        now = self._clock()
        with self._repository.reading() as session:
            return self._repository.device_states(session, now - PRESENCE, now, self._working())

    def timings(self, job: str, first_round: int = 0) -> Iterator[dict[str, Any]]:
        """Report every accepted update, in the order of rounds and slots; a few are read at a time."""
        self.job_state(job)
        return self._timings(job, first_round)

    def _timings(self, job: str, first_round: int) -> Iterator[dict[str, Any]]:
        last = (first_round, -1)
        while True:
            with self._repository.reading() as session:
                rows = self._repository.updates_behind(session, job, last, UPDATES_AT_ONCE)
            yield from map(timing, rows)
            if len(rows) < UPDATES_AT_ONCE:
                return
            last = (rows[-1].round, rows[-1].slot)

    def check_database(self) -> None:
        """Read something small; raise what the database raises if it does not answer."""
        with self._repository.reading() as session:
            self._repository.ping(session)

    def census(self, since: float) -> dict[str, Any]:
        """Count jobs, devices and rounds; present are the devices that were heard of since then, or are away."""
        with self._repository.reading() as session:
            return self._repository.census(session, since, self._clock())


def _selects(job: OpenJob) -> bool:
    return job.state.round.state == "selecting" and job.state.paused_at is None


def _error(event: EventRecord) -> dict[str, Any]:
    """Take the last failure from an event."""
    words = {name: str(event.body.get(name) or "") for name in ("reason", "message")}
    return {"job": event.job, "at": event.at, **words}


def _why_benched(standing: StandingRecord) -> str:
    return f"{standing.reason}: {standing.message}" if standing.message else standing.reason


def _without(record: object, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in names}


def timing(row: UpdateRecord) -> dict[str, Any]:
    """Take of a report, which is a device's own words, only what is of the right kind."""
    told = row.report.get("seconds")
    told = dict(told) if isinstance(told, dict) else {}
    if isinstance(layers := told.get("forward"), dict):
        told["forward"] = sum(value for value in layers.values() if is_number(value))
    seconds = {name: told[name] for name in TIMING_COLUMNS if is_number(told.get(name))}
    own = {name: getattr(row, name) for name in ("round", "slot", "device", "samples", "bytes", "arrived_at")}
    words = {name: str(row.report.get(name) or "")[:200] for name in ("boundary", "engine")}
    return {**own, **words, "lost_state": row.report.get("lost_state") is True, "seconds": seconds}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
