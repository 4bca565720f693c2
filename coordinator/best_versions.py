"""Record the scores of versions, keep the weights of the best one, and say when a job has no better one to expect."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from coordinator.jobs import KeepBest, UnitOfWork
from coordinator.store.repository import Repository
from coordinator.store.schema import JobRecord
from coordinator.store.versions import Versions
from federation.best_version import Best, find_best, reason_to_stop
from federation.job import Evaluate


class BestVersions:
    """The best version of every job by its metric. The scores are in the database, and so is the answer."""

    def __init__(self, repository: Repository, versions: Versions) -> None:
        self._repository = repository
        self._versions = versions

    def of(self, session: Session, job: JobRecord) -> Best | None:
        """Find the best version of a job."""
        return find_best(job.plan.get("evaluate", {}).get("metric"), self._repository.scores(session, job.id))

    def record(
        self, work: UnitOfWork, job: str, version: int, evaluate: Evaluate, values: dict[str, Any]
    ) -> str | None:
        """Record the values of a version by metric; return why the job should end now, if it should."""
        own = {"job": job, "version": version, "at": work.now}
        known = {name: value for name, value in values.items() if value is not None}
        self._repository.add_metrics(work.session, [{**own, "name": name, "value": v} for name, v in known.items()])
        scores = self._repository.scores(work.session, job)
        best = find_best(evaluate.metric, scores)
        if best is None:
            return None
        if best.version == version:
            self._versions.keep_best(job, version)  # before it is recorded: what is recorded is there
            work.outbox.append(KeepBest(job, version))
        return reason_to_stop(evaluate.stop_rule, best.metric, scores[best.metric])
