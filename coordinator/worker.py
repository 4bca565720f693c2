"""A worker: a process that folds the updates of coordinators that share a database. Any number may run.

It answers no requests and looks after no job. It checks what devices have put into object storage, and folds a batch as
soon as enough updates wait; fewer when a round closes or no other has come for a while. What it needs to know of a job
it learns as a coordinator does (sharing.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from coordinator.arrivals import Arrivals
from coordinator.errors import Superseded
from coordinator.folding import PAUSE
from coordinator.jobs import Effect, FoldUpdate, MissedOffer, OpenJob, Units
from coordinator.news import News
from coordinator.partial_sums import BATCH, PartialSums
from coordinator.presence import SharedPresence
from coordinator.sharing import Sharing
from coordinator.store import claims
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.database import open_database
from coordinator.store.open import open_blobs
from coordinator.store.repository import Repository
from coordinator.store.s3 import SCHEME
from coordinator.store.schema import JobRecord
from coordinator.uploaded_checks import UploadedChecks
from federation.engine import RoundEngine
from federation.errors import InputError
from federation.job import plan_from
from federation.round_sums import Reached
from federation.wire import CheckedUpdate

log = logging.getLogger("embrace.worker")
LOOKS = 1.0  # seconds until it looks for updates without having heard of any
AGAIN = 2.0  # seconds until it tries a job again that failed; longer each time it fails
MOST_AGAIN = 16.0
MOST_KNOWN = 256  # bodies of a job of which it remembers what it has found
CLEANS = 60.0  # seconds after which it looks which of its copies others have deleted


@dataclass
class _Notes:
    """What a worker remembers of a job."""

    waiting: tuple[int, int] = 0, 0  # its round, and updates of it that wait to be folded
    since: float = 0.0  # when the last of them came
    known: dict[str, CheckedUpdate] = field(default_factory=dict)  # bodies that this process has checked, by task
    told: bool = False  # that it cannot be merged
    failures: int = 0  # in a row
    again_at: float = 0.0


class Worker:
    """Fold updates of every job that is open."""

    def __init__(self, database: str, blobs: str, directory: Path, *, reached: Reached = lambda point: None) -> None:
        """`directory` is for copies of what is in object storage; it is emptied then."""
        if not database.startswith("postgresql"):
            raise InputError(
                "--database: expected the database that the coordinators share, postgresql+psycopg://USER@HOST/NAME; "
                "a coordinator on SQLite folds by itself and needs no worker"
            )
        if not blobs.startswith(SCHEME) and not (Path(blobs).is_absolute() and Path(blobs).is_dir()):
            raise InputError(
                f"--blobs: expected what the coordinators were given, s3://BUCKET/PREFIX or the absolute path of a "
                f"folder that is there, got {blobs!r}"
            )
        self._repository = Repository(open_database(database, migrate=False))
        self._blobs = open_blobs(blobs, directory, directory)
        self._bodies = Bodies(self._blobs)
        self._bundles = Bundles(self._blobs)
        self._jobs: dict[str, OpenJob] = {}
        self._notes: dict[str, _Notes] = {}
        self._presence = SharedPresence(self._repository)
        self._units = Units(self._repository, time.time, self._handle)
        self._sharing = Sharing(self._units, self._jobs, self._engine_of, self._heard, lambda job: None)
        self._units.shared = self._sharing
        refresh = self._sharing.refresh
        arrivals = Arrivals(self._units, self._bodies, self._jobs, self._presence, reached, refresh)
        self._checks = UploadedChecks(self._repository, arrivals, refresh)
        self._partial = PartialSums(self._units, self._bodies, refresh, self._sharing.tell_of, reached)
        self._news = threading.Event()
        self._ended = threading.Event()
        self._cleaned = time.monotonic()

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Fold until `end` is called; the batch under way is finished."""
        self._sharing.refresh()
        self._sharing.start()
        ready()
        try:
            while not self._ended.is_set():
                self._news.wait(LOOKS)
                self._news.clear()
                try:
                    self._look()
                except Exception:
                    log.exception("the worker failed")
                    self._ended.wait(AGAIN)
        finally:
            self._sharing.stop()
            self._blobs.close()
            self._repository.close()

    def end(self) -> None:
        """Let `run` return. May be called from a signal's handler."""
        self._ended.set()
        self._news.set()

    def _look(self) -> None:
        """Fold what is due of every job, until nothing is."""
        busy = True
        while busy and not self._ended.is_set():
            busy = False
            for job in list(self._jobs.values()):
                if self._ended.is_set():
                    return
                busy |= self._try(job)
        self._notes = {id: notes for id, notes in self._notes.items() if id in self._jobs}
        if time.monotonic() - self._cleaned >= CLEANS:
            self._cleaned = time.monotonic()
            self._blobs.drop_deleted()

    def _try(self, job: OpenJob) -> bool:
        """Do what is due of a job; return whether more may be. One that fails is left for a while: the others go on."""
        notes = self._notes.setdefault(job.id, _Notes())
        if time.monotonic() < notes.again_at:
            return False
        try:
            if job.state.round.slots.uploaded:
                self._checks.run(job)
            folded = False
            if self._is_due(job, notes):
                known, notes.known = notes.known, {}
                folded = bool(self._partial.fold(job, known))
            notes.failures = 0
            return folded
        except Superseded as error:
            log.info("%s", error)
            return False
        except Exception as error:
            notes.failures += 1
            seconds = min(AGAIN * notes.failures, MOST_AGAIN)
            notes.again_at = time.monotonic() + seconds
            # The database or the blobs are away, or took the claim; anything else is a defect.
            expected = isinstance(error, (SQLAlchemyError, OSError))
            log.warning("job %s: tried again in %g s: %s", job.id, seconds, error, exc_info=not expected)
            return False

    def _is_due(self, job: OpenJob, notes: _Notes) -> bool:
        round, now = job.state.round, time.monotonic()
        if job.engine.plan.serve.combine != "mean":
            if not notes.told:
                notes.told = True
                rule = job.engine.plan.serve.combine
                log.info("job %s: a %s is no sum, the coordinator that looks after it folds it alone", job.id, rule)
            return False
        with self._repository.reading() as session:
            count = claims.count_to_fold(session, job.id, round.number)
        if notes.waiting != (round.number, count):
            notes.waiting, notes.since = (round.number, count), now
        return count >= BATCH or (count > 0 and (round.state == "closing" or now - notes.since >= PAUSE))

    def _handle(self, effect: Effect) -> None:
        """Do what follows a verdict; the process that looks after the job hears of it and does the rest."""
        match effect:
            case FoldUpdate(job, update, checked) if checked is not None:
                known = self._notes.setdefault(job.id, _Notes()).known
                if len(known) < MOST_KNOWN:
                    known[update.task] = checked
            case MissedOffer(device):
                self._presence.left(device)

    def _heard(self, news: News) -> None:
        self._news.set()

    def _engine_of(self, record: JobRecord) -> RoundEngine:
        return RoundEngine(plan_from(record.plan), self._bundles.manifest(record.bundle))
