"""Remove what an operator does not want to keep: old events, old versions, bodies that belong to no round.

What is needed to go on stays, whatever the settings are: the newest two versions of a job, its best one and those that
wait for their score; events that the coordinator reads itself; bodies of jobs that are not over. A file that is being
sent stays readable until it is sent. A run does a bounded amount of work, in small transactions; one process at a time
has its turn.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy.exc import OperationalError

from coordinator.errors import StoreAway
from coordinator.store.blobs import Blobs
from coordinator.store.bodies import Bodies
from coordinator.store.repository import Repository
from coordinator.store.schema import DELETING, JobRecord
from coordinator.store.versions import Versions

log = logging.getLogger("embrace.retention")
EVERY = 600.0  # seconds between two runs, of all processes together
LEAST_VERSIONS = 2  # the newest, and the one that a round which is being closed began with
MOST_EVENTS = 50_000  # of a job that one run of a coordinator removes
_AT_ONCE = 1_000  # events of one transaction: devices wait for no more
_DAY = 86_400.0


@dataclass(frozen=True)
class Keep:
    """How much stays of each job; settings.py has the same names."""

    keep_versions: int = LEAST_VERSIONS
    keep_events: int = 100_000  # the newest; 0: all
    keep_days: float = 0.0  # older versions and events go; 0: none for its age


@dataclass(frozen=True)
class Surplus:
    """What there is of a job beyond what is kept."""

    job: str
    events: int
    versions: tuple[int, ...]
    bodies: tuple[str, ...]  # keys


class Retention:
    """Find what can go, and remove it."""

    def __init__(self, repository: Repository, blobs: Blobs, keep: Keep, clock: Callable[[], float]) -> None:
        self._repository = repository
        self._versions = Versions(blobs)
        self._bodies = Bodies(blobs)
        self._blobs = blobs
        self._keep = keep
        self._clock = clock

    def run_in_turn(self) -> None:
        """Remove what can go, unless this or another process has done so lately."""
        with self._repository.begin() as session:
            if not self._repository.is_due(session, "pruned", self._clock(), EVERY):
                return
        found: list[Surplus] = []
        try:
            with self._repository.begin() as session:
                sweeps = self._repository.is_due(session, "swept", self._clock(), _DAY)
            if sweeps and (count := self._blobs.remove_unnamed(time.time() - _DAY)):  # by the clock of the storage
                log.info("removed what no key names", extra={"facts": {"objects": count}})
            for surplus in self.find():
                self.remove(surplus, MOST_EVENTS)
                found.append(surplus)
        except (OperationalError, StoreAway) as error:
            log.warning("what is old stays for now: %s", error)
        if found:
            log.info("removed what was old", extra={"facts": dict(total(found))})

    def find(self) -> Iterator[Surplus]:
        """List what could be removed of each job; nothing is changed."""
        bodies: dict[str, list[str]] = {}
        for key in self._bodies.arrived():  # before the jobs are read: what a new job receives is not among them
            bodies.setdefault(self._bodies.job_of(key), []).append(key)
        with self._repository.reading() as session:
            jobs = [job for job in self._repository.jobs(session) if job.state != DELETING]
            goes_on = {job.id for job in self._repository.unfinished_jobs(session)}
            goes_on |= {row.job for row in self._repository.shared_jobs(session)}
        for job in jobs:
            found = Surplus(job.id, self._old_events(job), self._old_versions(job), ())
            if job.id not in goes_on:
                found = Surplus(job.id, found.events, found.versions, tuple(bodies.get(job.id, ())))
            if found.events or found.versions or found.bodies:
                yield found
        for id in sorted(bodies.keys() - {job.id for job in jobs}):  # of jobs that were deleted while they arrived
            yield Surplus(id, 0, (), tuple(bodies[id]))

    def remove(self, surplus: Surplus, most_events: int) -> None:
        """Remove what was found of a job; of too many events the oldest ones."""
        keep, left = self._keep.keep_events, min(surplus.events, most_events)
        while left > 0:
            with self._repository.begin() as session:
                count = min(left, _AT_ONCE)
                self._repository.delete_old_events(session, surplus.job, keep, self._oldest(), count)
            left -= count
        self._versions.forget_these(surplus.job, surplus.versions)
        self._blobs.delete(*surplus.bodies)

    def _oldest(self) -> float:
        """Find the time before which everything may go."""
        return self._clock() - self._keep.keep_days * _DAY if self._keep.keep_days else 0.0

    def _old_events(self, job: JobRecord) -> int:
        with self._repository.reading() as session:
            return self._repository.count_old_events(session, job.id, self._keep.keep_events, self._oldest())

    def _old_versions(self, job: JobRecord) -> tuple[int, ...]:
        """List the versions that may go: too many, or too old."""
        stored = [number for number in self._versions.stored(job.id) if number <= job.version - LEAST_VERSIONS]
        if not stored:
            return ()
        with self._repository.reading() as session:
            made = {row.number + 1: row.closed_at for row in self._repository.rounds(session, job.id, stored[0] - 1)}
        made[0] = job.created_at
        few, oldest = job.version + 1 - max(self._keep.keep_versions, LEAST_VERSIONS), self._oldest()
        return tuple(number for number in stored if number < few or (made.get(number) or oldest) < oldest)


def total(found: list[Surplus]) -> Counter[str]:
    """Count what was found, by kind."""
    return Counter(
        events=sum(own.events for own in found),
        versions=sum(len(own.versions) for own in found),
        bodies=sum(len(own.bodies) for own in found),
    )
