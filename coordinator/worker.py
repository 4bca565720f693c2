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
from dataclasses import dataclass
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
AGAIN = 2.0  # seconds until it tries again what failed
MOST_KNOWN = 256  # bodies of a job of which it remembers what it has found
CLEANS = 60.0  # seconds after which it looks which of its copies others have deleted


@dataclass
class _Waiting:
    """Updates of a round that wait to be folded, and since when no other has come."""

    round: int
    updates: int
    since: float


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
        self._known: dict[str, dict[str, CheckedUpdate]] = {}  # bodies that this process has checked, by job and task
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
        self._waiting: dict[str, _Waiting] = {}
        self._told: set[str] = set()  # jobs that cannot be merged, of which it was said
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
                except (SQLAlchemyError, OSError) as error:  # the database or the blobs are away, or took the claim
                    log.warning("tried again in %g s: %s", AGAIN, error)
                    self._ended.wait(AGAIN)
                except Superseded as error:
                    log.info("%s", error)
                except Exception:
                    log.exception("a batch could not be folded")
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
                if job.state.round.slots.uploaded:
                    self._checks.run(job)
                if self._is_due(job):
                    busy |= bool(self._partial.fold(job, self._known.pop(job.id, {})))
        if time.monotonic() - self._cleaned >= CLEANS:
            self._cleaned = time.monotonic()
            self._blobs.drop_deleted()

    def _is_due(self, job: OpenJob) -> bool:
        round, now = job.state.round, time.monotonic()
        if job.engine.plan.serve.combine != "mean":
            if job.id not in self._told:
                self._told.add(job.id)
                rule = job.engine.plan.serve.combine
                log.info("job %s: a %s is no sum, the coordinator that looks after it folds it alone", job.id, rule)
            return False
        with self._repository.reading() as session:
            count = claims.count_to_fold(session, job.id, round.number)
        known = self._waiting.get(job.id)
        if known is None or (known.round, known.updates) != (round.number, count):
            known = self._waiting[job.id] = _Waiting(round.number, count, now)
        return count >= BATCH or (count > 0 and (round.state == "closing" or now - known.since >= PAUSE))

    def _handle(self, effect: Effect) -> None:
        """Do what follows a verdict; the process that looks after the job hears of it and does the rest."""
        match effect:
            case FoldUpdate(job, update, checked) if checked is not None:
                known = self._known.setdefault(job.id, {})
                if len(known) < MOST_KNOWN:
                    known[update.task] = checked
            case MissedOffer(device):
                self._presence.left(device)

    def _heard(self, news: News) -> None:
        self._news.set()

    def _engine_of(self, record: JobRecord) -> RoundEngine:
        return RoundEngine(plan_from(record.plan), self._bundles.manifest(record.bundle))
