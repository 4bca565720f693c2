"""Several coordinators on one database: any of them answers any request, and one looks after each job.

What a round is, is in rows. A process keeps the jobs that are open in memory, with the revision of each. A unit of work
locks the rows of the jobs that it changes; if their revisions are other ones by then, it reads what has changed, and
goes on from there. So a process that stalled, and wakes up, writes nothing that is out of date.

What follows a commit is told to all processes: they wake the devices that wait for a task, and read at once what they
may have something to do for (a round closes, an update lies there to be checked). The rest they read with the next unit
of work, or twice a second. A process that missed news (its connection was lost) reads everything again, and trusts no
token that it knew.

The process that holds a job's lock is its keeper: it lets time pass, folds, closes rounds and scores versions. If it
ends, or stalls, the database lets go of the lock, and another process takes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.credentials import new_id
from coordinator.evaluation import is_scored_after
from coordinator.jobs import (
    AdmitJob,
    CheckUpdate,
    EvaluateVersion,
    ForgetJob,
    NotifyDevices,
    OpenJob,
    ShutOut,
    UnitOfWork,
    Units,
    refresh_job,
    restore_job,
)
from coordinator.news import News, decode
from coordinator.store.postgresql import Listener, Locks, send_news
from coordinator.store.schema import JobRecord
from federation.engine import RoundEngine
from federation.errors import InputError

log = logging.getLogger("embrace.sharing")
LOOKS = 0.5  # seconds until a process looks again whether a job has no keeper


class Sharing:
    """Share the open jobs of a process with other processes."""

    def __init__(
        self,
        units: Units,
        jobs: dict[str, OpenJob],
        engine_of: Callable[[JobRecord], RoundEngine],
        heard: Callable[[News], None],
        forgotten: Callable[[OpenJob], None],
    ) -> None:
        """`heard` is called with what other processes tell, `forgotten` with jobs that another process has ended."""
        self._units = units
        self._repository = units.repository
        self._jobs = jobs
        self._engine_of = engine_of
        self._heard = heard
        self._forgotten = forgotten
        self._own = new_id()
        self._looked = 0.0
        self._locks = Locks(self._repository.engine)
        self._listener = Listener(self._repository.engine, self._hear, lambda: self._heard_of(News(lost=True)))
        self.broken: dict[str, str] = {}  # jobs that cannot be opened, and why

    def start(self) -> None:
        self._listener.start()

    def stop(self) -> None:
        """Let other processes look after the jobs."""
        self._listener.stop()
        self._locks.close()

    # --- jobs --------------------------------------------------------------------------------------------------------

    def lock(self, session: Session, jobs: Collection[str] | None) -> None:
        """Keep other processes from changing jobs until the transaction ends, and learn what they have changed."""
        self._take_in(session, self._repository.lock_jobs(session, jobs), jobs)

    def refresh(self, *jobs: str) -> None:
        """Learn what other processes have changed, of some jobs or of all, and wait for none of them."""
        with self._units.lock, self._repository.snapshot() as session:
            self._take_in(session, self._repository.revisions(session, jobs or None), jobs or None)

    def _take_in(self, session: Session, revisions: Mapping[str, int], among: Collection[str] | None) -> None:
        for id, revision in revisions.items():
            known = self._jobs.get(id)
            if known is None:
                self._admit(session, id, revision)
            elif known.revision != revision:
                refresh_job(self._repository, session, known, revision)
        for id in [id for id in (self._jobs if among is None else among) if id not in revisions]:
            over = self._jobs.pop(id, None)
            if over is not None:
                self._forgotten(over)

    def _admit(self, session: Session, id: str, revision: int) -> None:
        record = self._repository.job(session, id)
        if record is None or id in self.broken:
            return
        try:
            self._jobs[id] = restore_job(self._repository, session, record, self._engine_of(record), revision)
        except InputError as error:  # the others go on
            log.error("job %s cannot be continued: %s", id, error)
            self.broken[id] = str(error)

    def tell(self, work: UnitOfWork) -> None:
        """Record what a unit of work changed of open jobs; other processes hear of it once it is recorded."""
        session, changed = work.session, work.changed()
        told = [job.id for job in changed if work.state(job).calls_for_others(job.state)]
        for job in changed:
            self._repository.change_shared_job(session, job.id, revision=job.revision + 1)
        for effect in work.outbox:
            match effect:
                case AdmitJob(job):
                    self._repository.add_shared_job(session, job.id)
                    told.append(job.id)
                case ForgetJob(job):
                    self._repository.change_shared_job(session, job.id, open=False)
                    told.append(job.id)
                case CheckUpdate(job):
                    told.append(job.id)
                case EvaluateVersion(job, version) if is_scored_after(job.engine.plan.evaluate, version):
                    self._repository.change_shared_job(session, job.id, scoring=version)
        shut_out = tuple(effect.device for effect in work.outbox if isinstance(effect, ShutOut))
        devices = NotifyDevices() in work.outbox
        if work.outbox or work.has_events or told:
            send_news(session, News(self._own, tuple(dict.fromkeys(told)), devices=devices, shut_out=shut_out).encode())

    def tell_of(self, session: Session, job: str) -> None:
        """Tell other processes that a sum of a job's round is stored, once the transaction is recorded."""
        send_news(session, News(self._own, summed=(job,)).encode())

    # --- news --------------------------------------------------------------------------------------------------------

    def _hear(self, told: Sequence[str]) -> None:
        """Take several messages as one."""
        news = [found for found in map(decode, told) if found.sender != self._own]
        if news:
            self._heard_of(
                News(
                    jobs=tuple({job for one in news for job in one.jobs}),
                    summed=tuple({job for one in news for job in one.summed}),
                    devices=any(one.devices for one in news),
                    shut_out=tuple({device for one in news for device in one.shut_out}),
                    signed_out=tuple({session for one in news for session in one.signed_out}),
                    lost=any(one.lost for one in news),
                )
            )

    def _heard_of(self, news: News) -> None:
        if news.jobs or news.lost:
            self.refresh(*(() if news.lost else news.jobs))
        self._heard(news)

    # --- keepers -----------------------------------------------------------------------------------------------------

    def keeps(self, job: str) -> bool:
        """Whether this process looks after a job."""
        return self._locks.holds(job)

    def keep(self, job: str) -> None:
        """Look after a job that was created here; if the database is away, it has no keeper for a moment."""
        try:
            self._locks.take([job])
        except SQLAlchemyError as error:
            log.warning("job %s has no keeper yet: %s", job, error)

    def find_jobs_to_keep(self) -> tuple[set[str], list[str]]:
        """Say that this process is at work, read what has changed, and take the jobs that no process looks after.

        Return these; and of all that this process looks after those that are over.
        """
        now = time.monotonic()
        if now - self._looked < LOOKS:
            return set(), []
        self._looked = now
        with self._repository.begin() as session:
            self._repository.is_alive(session, self._units.clock())
            shared = self._repository.shared_jobs(session)
        known = {id: job.revision for id, job in list(self._jobs.items())}
        if stale := tuple(row.job for row in shared if row.open and known.get(row.job, row.revision) < row.revision):
            self._heard_of(News(jobs=stale))
        new = self._locks.take_only(row.job for row in shared)
        return new, [row.job for row in shared if self.keeps(row.job) and not row.open and not row.scoring]
