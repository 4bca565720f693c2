"""Delete jobs that are over: weights, bodies, rows, and the bundle and evaluation data that no other job uses.

First the job is marked, then its files go, then its rows: what a crash interrupts is finished at the next start.
"""

from __future__ import annotations

from typing import Any

from coordinator.jobs import ReachPoint, Units
from coordinator.store.blobs import Blobs
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.schema import DELETING, JobRecord
from coordinator.store.versions import Versions
from federation.round_sums import Reached


class Deletion:
    """Remove all that there is of jobs that are marked."""

    def __init__(self, units: Units, blobs: Blobs, data: EvaluationData, bundles: Bundles, reached: Reached) -> None:
        self._units = units
        self._repository = units.repository
        self._blobs = blobs
        self._bodies = Bodies(blobs)
        self._versions = Versions(blobs)
        self._bundles = bundles
        self._data = data
        self._reached = reached

    def finish_all(self) -> None:
        """Finish what was interrupted."""
        with self._repository.reading() as session:
            marked = [job for job in self._repository.jobs(session) if job.state == DELETING]
        for job in marked:
            self.finish(job)

    def finish(self, job: JobRecord) -> dict[str, Any]:
        """Remove the files and the rows of a job that is marked; return what became free."""
        with self._units.begin() as work:  # meanwhile no job is created on the same bundle
            others = [other for other in self._repository.jobs(work.session) if other.id != job.id]
            bundle = None if any(other.bundle == job.bundle for other in others) else job.bundle
            data = _data(job) if _data(job) not in map(_data, others) else None
            keys = [self._versions.folder(job.id), *self._bodies.of_job(job.id)]
            keys += [self._bundles.key(bundle)] if bundle else []
            keys += self._data.keys(data)
            freed = self._blobs.size(*keys)
            for key in keys:
                self._blobs.delete(key)
                self._reached("mid-delete")
            if bundle:
                self._bundles.forget(bundle)
            self._repository.delete_job(work.session, job.id)
            work.outbox.append(ReachPoint("after-delete"))
        return {"bytes": freed, "bundle": bundle, "data": data if self._data.keys(data) else None}


def _data(job: JobRecord) -> str | None:
    found: str | None = job.plan.get("evaluate", {}).get("data")
    return found
