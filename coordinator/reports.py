"""Read what is recorded of jobs, rounds, devices and events. No lock: the database has only what is settled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from coordinator.errors import NotFound
from coordinator.evaluation import Evaluations
from coordinator.jobs import OpenJob
from coordinator.store.repository import Repository
from coordinator.store.schema import FINISHED, JobRecord, UpdateRecord

EVENTS_AT_ONCE = 500
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
        lock: AbstractContextManager[bool],
    ) -> None:
        self._repository = repository
        self._open_jobs = open_jobs
        self._evaluations = evaluations
        self._lock = lock

    def jobs(self) -> list[dict[str, Any]]:
        with self._repository.reading() as session:
            return [vars(job) for job in self._repository.jobs(session)]

    def record(self, job: str) -> JobRecord:
        with self._repository.reading() as session:
            found = self._repository.job(session, job)
        if found is None:
            raise NotFound(f"there is no job {job!r}")
        return found

    def job(self, job: str) -> dict[str, Any]:
        """Describe a job with its newest round."""
        found = vars(self.record(job))
        with self._repository.reading() as session:
            (newest,) = self._repository.newest_rounds(session, job, 1)
            body = {**newest.body, "slots": self._repository.seats(session, newest)}
        open_job = self._open_jobs.get(job)
        unfit = dict(open_job.state.unfit) if open_job else {}
        return {**found, "round": {**vars(newest), "body": body}, "unfit": unfit}

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

    def rounds(self, job: str) -> list[dict[str, Any]]:
        self.job_state(job)
        with self._repository.reading() as session:
            rows = self._repository.rounds(session, job)
        return [_without(row, "body") for row in rows]

    def round_rows(self, job: str) -> list[dict[str, Any]]:
        """List the rounds of a job, flat: a row for each."""
        rows = self.rounds(job)
        took = [None if row["closed_at"] is None else row["closed_at"] - row["opened_at"] for row in rows]
        return [{**row, **row["summary"], "seconds": seconds} for row, seconds in zip(rows, took)]

    def metrics(self, job: str) -> list[dict[str, Any]]:
        """List the scores of versions."""
        self.job_state(job)
        with self._repository.reading() as session:
            return [_without(row, "id", "job") for row in self._repository.metrics(session, job)]

    def events(self, job: str, after: int) -> tuple[list[dict[str, Any]], bool]:
        """List events behind a number; also whether there will be no others behind these."""
        over = self.is_over(job)
        with self._repository.reading() as session:
            return [vars(row) for row in self._repository.events(session, job, after, EVENTS_AT_ONCE)], over

    def unfit(self, device: str) -> str:
        """Say why none of the jobs that run can use a device; nothing if one can, or if there is none."""
        running = [job for job in list(self._open_jobs.values()) if job.state.paused_at is None]
        found = {job.id: job.state.unfit.get(device) for job in running}
        return "; ".join(f"job {job}: {why}" for job, why in found.items()) if all(found.values()) else ""

    def devices(self) -> list[dict[str, Any]]:
        with self._repository.reading() as session:
            rows = self._repository.devices(session)
        return [{**_without(row, "token_hash"), "unfit": "" if row.revoked else self.unfit(row.id)} for row in rows]

    def timings(self, job: str, first_round: int = 0) -> Iterator[dict[str, Any]]:
        """Report every accepted update, in the order of rounds and slots; a few are read at a time."""
        self.job_state(job)
        return self._timings(job, first_round)

    def _timings(self, job: str, first_round: int) -> Iterator[dict[str, Any]]:
        last = (first_round, -1)
        while True:
            with self._repository.reading() as session:
                rows = self._repository.updates_behind(session, job, last, UPDATES_AT_ONCE)
            yield from map(_timing, rows)
            if len(rows) < UPDATES_AT_ONCE:
                return
            last = (rows[-1].round, rows[-1].slot)

    def census(self, since: float) -> dict[str, Any]:
        """Count jobs, devices and rounds; present are the devices that were heard of since then."""
        with self._repository.reading() as session:
            return self._repository.census(session, since)


def _without(record: object, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in names}


def _timing(row: UpdateRecord) -> dict[str, Any]:
    """Take of a report, which is a device's own words, only what is of the right kind."""
    told = row.report.get("seconds")
    told = dict(told) if isinstance(told, dict) else {}
    if isinstance(layers := told.get("forward"), dict):
        told["forward"] = sum(value for value in layers.values() if _is_number(value))
    seconds = {name: told[name] for name in TIMING_COLUMNS if _is_number(told.get(name))}
    own = {name: getattr(row, name) for name in ("round", "slot", "device", "samples", "bytes", "arrived_at")}
    words = {name: str(row.report.get(name) or "")[:200] for name in ("boundary", "engine")}
    return {**own, **words, "lost_state": row.report.get("lost_state") is True, "seconds": seconds}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
