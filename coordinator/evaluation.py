"""Have new versions scored beside the rounds, which do not wait for it, and record what was found."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.best_versions import BestVersions
from coordinator.jobs import UnitOfWork, Units
from coordinator.scoring import Evaluation, score
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.schema import DELETING, JobRecord
from coordinator.store.versions import Versions
from federation.capacity import FLOAT_BYTES
from federation.decode import decode
from federation.errors import EmbraceError
from federation.job import Evaluate

log = logging.getLogger("embrace.evaluation")
_RUNTIME = (1 << 30) + (16 << 20) * (os.cpu_count() or 1)  # bytes; every processor has a thread with its stack
_BATCH = 64  # samples that go through a layer at once


@dataclass(frozen=True)
class Wanted:
    """A version that waits for its score."""

    job: str
    version: int
    bundle: str
    evaluate: Evaluate  # as the plan has it


@dataclass(frozen=True)
class EvaluationLimits:
    """What evaluation may use; settings.py has the same names."""

    evaluation_data: str | None = None  # the operator's folder
    evaluation_bytes: int = 2 << 30  # of uploaded samples
    evaluation_memory: int = 0  # bytes of the process that scores; 0: by the size of model and data
    evaluation_seconds: float = 3600.0


def is_scored_after(wanted: Evaluate, version: int) -> bool:
    """Whether a job wants a version scored."""
    return wanted.data is not None and version % wanted.every == 0


class Evaluations:
    """Score versions one at a time, in the order in which they are requested, and record what was found."""

    def __init__(
        self,
        units: Units,
        bundles: Bundles,
        best: BestVersions,
        versions: Versions,
        data: EvaluationData,
        limits: EvaluationLimits,
        end_job: Callable[[UnitOfWork, str, str], None],
    ) -> None:
        """`end_job` ends a job early, with a reason, if it is not over."""
        self._units = units
        self._repository = units.repository
        self._bundles = bundles
        self._best = best
        self._versions = versions
        self._data = data
        self._limits = limits
        self._end_job = end_job
        self._waiting: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        self._unfinished: Counter[str] = Counter()  # by job
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="evaluate", daemon=True)
        self._thread.start()

    def request(self, job: str, bundle: str, version: int, wanted: Evaluate) -> None:
        """Have a version scored, if the job wants that. Its weights are kept until then."""
        if not is_scored_after(wanted, version):
            return
        try:
            self._versions.keep_for_scoring(job, version)
        except OSError:  # it is tried again after a restart, if the version is still there then
            log.exception("job %s: version %s cannot be scored", job, version)
            self._settle(job, version)
            return
        self.put(Wanted(job, version, bundle, wanted))

    def resume(self, session: Session, job: JobRecord) -> None:
        """Request what should have been scored of a job when its process ended, and was not."""
        with self._counting:
            if self._unfinished[job.id]:  # they are on their way
                return
        wanted = decode(Evaluate, job.plan.get("evaluate", {}), "evaluate", defaults=True)
        for version in self._versions.numbers(job.id) if wanted.data is not None else ():
            if self._repository.is_scored(session, job.id, version):
                self._versions.release_scored(job.id, version)
            elif 1 <= version <= job.version:  # what lies beyond was never committed
                self.request(job.id, job.bundle, version, wanted)
        with self._counting:
            waits = self._unfinished[job.id] > 0
        if not waits:
            self._settle(job.id, job.version)

    def put(self, request: Wanted) -> None:
        self._count(request, 1)
        self._waiting.put(request)

    def unfinished(self, job: str) -> bool:
        """Whether there is a version of a job whose score is still to come, maybe from another process."""
        if self._repository.is_shared:
            with self._repository.reading() as session:
                return self._repository.waits_for_score(session, job)
        with self._counting:
            return self._unfinished[job] > 0

    def _settle(self, job: str, version: int) -> None:
        """Note for other processes that the scores up to a version are there, or will not come."""
        if self._repository.is_shared:
            with suppress(SQLAlchemyError), self._repository.begin() as session:
                self._repository.end_scoring(session, job, version)

    def _count(self, request: Wanted, change: int) -> None:
        with self._counting:
            self._unfinished[request.job] += change

    def close(self) -> None:
        """Finish what is waiting."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                if not self._is_deleted(request.job):
                    self._record(request, self._score(request))
            except Exception:
                log.exception("version %s of job %s was not evaluated", request.version, request.job)
            finally:
                self._count(request, -1)
                self._release(request)
                self._settle(request.job, request.version)

    def _release(self, request: Wanted) -> None:
        """Let the weights go; what cannot be removed now is after a restart."""
        try:
            self._versions.release_scored(request.job, request.version)
        except OSError:
            log.exception("version %s of job %s is scored and cannot be removed", request.version, request.job)

    def _is_deleted(self, job: str) -> bool:
        with self._repository.reading() as session:
            return self._repository.job_state(session, job) in (None, DELETING)

    def _score(self, request: Wanted) -> dict[str, Any]:
        """Have a version scored by a process of its own; what is wrong with the request is an error in words, too."""
        weights = self._versions.keep_for_scoring(request.job, request.version)
        try:
            data = self._data.find(request.evaluate.data or "")
            memory = self._limits.evaluation_memory or self._memory(request.bundle, data)
        except EmbraceError as error:
            return {"error": str(error)}
        directory, seconds = self._bundles.directory(request.bundle), self._limits.evaluation_seconds
        statistics = request.evaluate.statistics
        return score(Evaluation(request.job, request.version, directory, weights, data, statistics, memory, seconds))

    def _memory(self, bundle: str, data: Path) -> int:
        """Bound the memory of a process: the runtime, the model several times, samples that are read into memory."""
        manifest = self._bundles.manifest(bundle)
        activations = FLOAT_BYTES * _BATCH * sum(layer.activations for layer in manifest.layers)
        stored = sum(file.stat().st_size for file in (data, *data.rglob("*")) if file.is_file())
        return _RUNTIME + 8 * manifest.weights.bytes + 8 * activations + 4 * stored

    def _record(self, request: Wanted, found: dict[str, Any]) -> None:
        values = {name: found.get(name) for name in ("accuracy", "mean_loss")}
        with self._units.begin(request.job) as work:
            if self._repository.job_state(work.session, request.job) in (None, DELETING):
                return
            if self._repository.is_shared and self._repository.is_scored(work.session, request.job, request.version):
                return  # by another process
            why = self._best.record(work, request.job, request.version, request.evaluate, values)
            event = {"job": request.job, "at": work.now, "kind": "Evaluated"}
            self._repository.add_events(work.session, [{**event, "body": {"version": request.version, **found}}])
            if why is not None:
                self._end_job(work, request.job, why)
