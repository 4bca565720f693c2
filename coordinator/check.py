"""Verify what a coordinator has stored, while it may be at work: read only.

- Rows refer to rows: every foreign key, and the round of every seat and update. A job has as many committed rounds as
  its newest version says.
- What rows name is there, and is what it was: files of bundles, uploaded data and bodies by their sha256, weights and
  server state by their form. In object storage everything that is read is compared with the sha256 of its ref.
- Every stored version adds up: version N is, bit for bit, the server's step from version N - 1 with the sums of round
  N - 1, wherever all three are stored. A median has no sums, nor has a version that an earlier program made.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Select, and_, exists, func, select

from coordinator.best_versions import BestVersions
from coordinator.jobs import needed_updates, restore_job
from coordinator.store.blobs import Blobs, DirectoryBlobs
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.repository import Repository
from coordinator.store.schema import DELETING, METADATA, ROUNDS, SEATS, UPDATES, JobRecord
from coordinator.store.sums import read_sums
from coordinator.store.versions import Versions
from federation.engine import RoundEngine
from federation.errors import EmbraceError
from federation.job import plan_from

TRIES = 5  # of a job that goes on while it is looked at
_PART = 1 << 20  # bytes


@dataclass(frozen=True)
class JobCheck:
    """What was looked at of a job, and what is wrong with it, a line each."""

    job: str
    version: int
    versions: int = 0  # that are stored
    computed: int = 0  # of them again, from the version before and the sums
    blobs: int = 0  # that were read
    wrong: tuple[str, ...] = ()


class Check:
    """Look through a database and its blobs."""

    def __init__(self, repository: Repository, blobs: Blobs) -> None:
        self._repository = repository
        self._blobs = blobs
        self._versions = Versions(blobs)
        self._bodies = Bodies(blobs)
        self._bundles = Bundles(blobs)
        self._data = EvaluationData(blobs)
        self._known: dict[str, str | None] = {}  # bundles and data, and what is wrong with them

    def rows(self) -> tuple[str, ...]:
        """Say which rows refer to rows that are not there."""
        with self._repository.reading() as session:
            wrong = [(name, session.scalar(found) or 0) for name, found in _dangling()]
        return tuple(f"{count} rows of {name}, which are not there" for name, count in wrong if count)

    def jobs(self) -> Iterator[JobCheck]:
        """Check every job, one after the other."""
        with self._repository.reading() as session:
            found = [job for job in self._repository.jobs(session) if job.state != DELETING]
        for job in found:
            if (checked := self._settled(job)) is not None:
                yield checked

    def _settled(self, job: JobRecord) -> JobCheck | None:
        """Check a job; if it went on meanwhile, what seemed to be wrong may have been removed, and it is done again."""
        for _ in range(TRIES):
            checked = self._check(job)
            with self._repository.reading() as session:
                now = self._repository.job(session, job.id)
            if now is None or now.state == DELETING:
                return None
            if not checked.wrong or now.version == job.version:
                break
            job = now
        return checked

    def _check(self, job: JobRecord) -> JobCheck:
        wrong: list[str] = []
        found = JobCheck(job.id, job.version)

        def look(what: str, at: Callable[[], int]) -> int:
            try:
                return at()
            except (EmbraceError, OSError) as error:
                wrong.append(f"{what}: {error}")
                return 0

        with self._repository.reading() as session:
            committed = self._repository.committed_rounds(session, job.id)
            if committed != job.version:
                wrong.append(f"its newest version is {job.version}, and {committed} rounds are committed")
        blobs = look(f"bundle {job.bundle}", lambda: self._bundle(job))
        blobs += look("evaluation data", lambda: self._evaluation_data(job))
        if not wrong or blobs:  # without a bundle there is nothing to compare with
            try:
                engine = RoundEngine(plan_from(job.plan), self._bundles.manifest(job.bundle))
            except (EmbraceError, OSError) as error:
                return replace(found, wrong=(*wrong, f"it cannot be opened: {error}"))
            blobs += look("bodies", lambda: self._check_bodies(job, engine))
            blobs += look("best version", lambda: self._best(job))
            stored = [number for number in self._versions.stored(job.id) if number <= job.version]
            for number in stored if job.version in stored else [*stored, job.version]:
                blobs += look(f"version {number}", lambda: self._readable(job, engine, number))  # noqa: B023
            computed = sum(look(f"version {number}", lambda: self._adds_up(job, engine, number)) for number in stored)  # noqa: B023
            found = replace(found, versions=len(stored), computed=computed)
        return replace(found, blobs=blobs, wrong=tuple(dict.fromkeys(wrong)))

    # --- blobs -------------------------------------------------------------------------------------------------------

    def _bundle(self, job: JobRecord) -> int:
        path = self._bundles.directory(job.bundle)
        if not path.is_dir():
            raise EmbraceError("it is not there")
        self._bundles.checked(job.bundle)
        return 1

    def _evaluation_data(self, job: JobRecord) -> int:
        reference = plan_from(job.plan).evaluate.data
        for _ in self._data.keys(reference):
            _compare(self._data.find(reference or ""), (reference or "").rpartition(":")[2])
            return 1
        return 0

    def _check_bodies(self, job: JobRecord, engine: RoundEngine) -> int:
        """Hash the bodies of updates that are still to be folded, or go on to the next round."""
        with self._repository.reading() as session:
            if job.id not in {row.id for row in self._repository.unfinished_jobs(session)}:
                return 0
            needed = needed_updates(self._repository, session, restore_job(self._repository, session, job, engine))
        for update in needed:
            try:
                _compare(self._bodies.file(update), update.sha256)
            except (EmbraceError, OSError) as error:
                raise EmbraceError(f"the update of task {update.task}: {error}") from None
            finally:
                self._bodies.drop(update)  # a round's bodies may be more than this disk takes
        return len(needed)

    def _best(self, job: JobRecord) -> int:
        with self._repository.reading() as session:
            best = BestVersions(self._repository, self._versions).of(session, job)
        if best is None:
            return 0
        if not self._versions.find(job.id, best.version).is_file():
            raise EmbraceError(f"the weights of version {best.version} are not there")
        return 1

    def _readable(self, job: JobRecord, engine: RoundEngine, version: int) -> int:
        """Open the weights and the state of a version: they have to be of this model."""
        if not self._versions.weights(job.id, version).is_file():
            raise EmbraceError("its weights are not there")
        self._versions.open(job.id, version, engine.space, engine.vector_names)
        return 1 + bool(engine.vector_names)

    # --- sums --------------------------------------------------------------------------------------------------------

    def _adds_up(self, job: JobRecord, engine: RoundEngine, version: int) -> int:
        """Compute a version again, if the one before and the sums are stored; return whether that was possible."""
        place = (job.id, version - 1, engine.space, engine.vector_names)
        before = {kind: path for kind, path in self._versions.files(job.id, version - 1).items() if path.is_file()}
        if not version or not before or not self._versions.weights(job.id, version).is_file():
            return 0
        if not self._versions.sums(job.id, version).is_file():
            if self._summary(job, version - 1).get("sums_kept"):
                raise EmbraceError("the sums that it was made of are not there")
            return 0
        stored = read_sums(self._versions.sums(job.id, version), engine.space)
        if stored.round != version - 1:
            raise EmbraceError(f"its sums are those of round {stored.round}; expected {version - 1}")
        facts = engine.facts_of(version - 1, self._summary(job, version - 2).get("facts"))
        sums = stored.as_round(engine, facts)
        with tempfile.TemporaryDirectory(prefix="embrace-check-") as folder:
            again = Versions(own := DirectoryBlobs(Path(folder)))
            for kind, path in before.items():
                copy = again.files(job.id, version - 1)[kind]
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            again.write_next(*place, engine.changes(sums, again.read(*place), stored.devices))
            own.close()
            for kind, path in self._versions.files(job.id, version).items():
                made = again.files(job.id, version)[kind]
                if made.is_file() and _digest(made) != _digest(path):
                    what = "weights are" if kind == "weights" else "state is"
                    raise EmbraceError(f"its {what} not what version {version - 1} and the sums of its round make")
        return 1

    def _summary(self, job: JobRecord, round: int) -> dict[str, Any]:
        with self._repository.reading() as session:
            return self._repository.summary(session, job.id, round)


def _dangling() -> Iterator[tuple[str, Select[Any]]]:
    """Yield queries that count rows without the row that they refer to."""
    for table in METADATA.sorted_tables:
        for key in table.foreign_keys:
            other = key.column
            there = exists().where(other == key.parent)
            yield f"{table.name} name {other.table.name}", select(func.count()).select_from(table).where(~there)
    for table in (SEATS, UPDATES):
        there = exists().where(and_(ROUNDS.c.job == table.c.job, ROUNDS.c.number == table.c.round))
        yield f"{table.name} name rounds", select(func.count()).select_from(table).where(~there)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()


def _compare(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise EmbraceError("it is not there")
    if (found := _digest(path)) != sha256:
        raise EmbraceError(f"it has the sha256 {found}; expected {sha256}")
