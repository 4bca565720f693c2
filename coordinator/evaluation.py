"""Have new versions scored beside the rounds, which do not wait for it, and record what was found."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from coordinator.scoring import Evaluation, score
from coordinator.store.bundles import Bundles
from coordinator.store.repository import Repository
from coordinator.store.versions import Versions
from edge_runtime.data_reference import file_of
from federation.decode import decode
from federation.errors import InputError
from federation.job import Evaluate

log = logging.getLogger("embrace.evaluation")


def check_data(reference: str | None) -> None:
    """Refuse a job whose evaluation data is not there."""
    if reference is not None and not file_of(reference).exists():
        raise InputError(f"evaluate.data: the coordinator's machine has no {str(file_of(reference))!r}")


class Evaluations:
    """Score versions one at a time, in the order in which they are requested, and record what was found."""

    def __init__(
        self, repository: Repository, bundles: Bundles, versions: Versions, clock: Callable[[], float]
    ) -> None:
        self._repository = repository
        self._bundles = bundles
        self._versions = versions
        self._clock = clock
        self._waiting: queue.SimpleQueue[Evaluation | None] = queue.SimpleQueue()
        self._unfinished: Counter[str] = Counter()  # by job
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="evaluate", daemon=True)
        self._thread.start()

    def request(self, job: str, bundle: str, version: int, wanted: Evaluate) -> None:
        """Have a version scored, if the job wants that. Its weights are kept until then."""
        if wanted.data is None or version % wanted.every:
            return
        try:
            weights = self._versions.keep_for_scoring(job, version)
        except OSError:  # it is tried again after a restart, if the version is still there then
            log.exception("job %s: version %s cannot be scored", job, version)
            return
        self.put(Evaluation(job, version, self._bundles.directory(bundle), weights, wanted.data, wanted.statistics))

    def resume(self, session: Session) -> None:
        """Request what should have been scored when the process ended, and was not."""
        for job in self._repository.jobs(session):
            wanted = decode(Evaluate, job.plan.get("evaluate", {}), "evaluate", defaults=True)
            for version in self._versions.numbers(job.id) if wanted.data is not None else ():
                if self._repository.is_scored(session, job.id, version):
                    self._versions.release_scored(job.id, version)
                elif 1 <= version <= job.version:  # what lies beyond was never committed
                    self.request(job.id, job.bundle, version, wanted)

    def put(self, request: Evaluation) -> None:
        self._count(request, 1)
        self._waiting.put(request)

    def unfinished(self, job: str) -> bool:
        """Whether there is a version of a job whose score is still to come."""
        with self._counting:
            return self._unfinished[job] > 0

    def _count(self, request: Evaluation, change: int) -> None:
        with self._counting:
            self._unfinished[request.job] += change

    def close(self) -> None:
        """Finish what is waiting."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                self._record(request, score(request))
            except Exception:
                log.exception("version %s of job %s was not evaluated", request.version, request.job)
            finally:
                self._versions.release_scored(request.job, request.version)
                self._count(request, -1)

    def _record(self, request: Evaluation, found: dict[str, Any]) -> None:
        now = self._clock()
        own = {"job": request.job, "version": request.version, "at": now}
        scores = {name: found[name] for name in ("mean_loss", "accuracy") if found.get(name) is not None}
        metrics = [{**own, "name": name, "value": value} for name, value in scores.items()]
        event = {"job": request.job, "at": now, "kind": "Evaluated", "body": {"version": request.version, **found}}
        with self._repository.begin() as session:
            self._repository.add_metrics(session, metrics)
            self._repository.add_events(session, [event])
