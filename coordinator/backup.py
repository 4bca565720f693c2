"""Back up a coordinator's directory while it is at work: one archive in which database and files are of one moment.

The files are immutable once they have their names, but the coordinator removes those that it is done with. So they are
linked into a folder, the database is copied, and what is new is linked, too. What the copy refers to was there when it
was made: a link of it is missing only if it both came and went in between. Then all of it is done again.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from coordinator.best_versions import BestVersions
from coordinator.jobs import needed_updates, restore_job
from coordinator.store.blobs import FOLDERS, DirectoryBlobs
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.repository import Repository
from coordinator.store.schema import DELETING, JobRecord
from coordinator.store.versions import Versions
from edge_runtime.files import disk_errors, replacing, sole_user
from federation.engine import RoundEngine
from federation.errors import EmbraceError, InputError
from federation.job import UPLOADED, plan_from
from federation.round_sums import Reached

DATABASE = "coordinator.db"
OWN_FILES = ("admin.token", "serve.toml")  # which lie beside the database, if they are there
TRIES = 8
_STAGE = "backup.draft"


@dataclass(frozen=True)
class Backup:
    """What an archive holds."""

    file: Path
    bytes: int
    jobs: int
    devices: int


def write_backup(directory: Path, file: Path, *, reached: Reached = lambda point: None) -> Backup:
    """Write an archive of a coordinator's directory; what had its name before stays until it is whole."""
    if not (directory / DATABASE).is_file():
        raise InputError(f"there is no {DATABASE} in {directory}: expected the directory of a coordinator with SQLite")
    errors = disk_errors(no_room=f"no room to back up {directory} to {file}", otherwise=f"cannot back up {directory}")
    with errors, sole_user(directory / "backup.lock", f"another backup of {directory} is under way"):
        with _stage(directory) as stage:
            jobs, devices = _copy(directory, stage, reached)
            draft = file.with_name(f"{file.name}.new")
            draft.unlink(missing_ok=True)  # whose mode may be another
            with replacing(file, mode=0o600, draft=draft) as out, tarfile.open(fileobj=out, mode="w") as archive:
                for path in sorted(stage.iterdir()):
                    archive.add(path, path.name)
        return Backup(file, file.stat().st_size, jobs, devices)


@contextmanager
def _stage(directory: Path) -> Iterator[Path]:
    """Make a folder for links, which have to be on the disk of the files."""
    stage = directory / _STAGE
    shutil.rmtree(stage, ignore_errors=True)  # of a backup that was killed
    stage.mkdir(mode=0o700)
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _copy(directory: Path, stage: Path, reached: Reached) -> tuple[int, int]:
    """Fill the stage; return how many jobs and devices the database has."""
    missing = ""
    for last in [False] * (TRIES - 1) + [True]:
        _link_all(directory, stage)
        reached("files-linked")
        _copy_database(directory / DATABASE, stage / DATABASE)
        reached("database-copied")
        _link_all(directory, stage)
        missing, jobs, devices = _check(stage, wishes=not last)
        if not missing:
            for name in filter(lambda own: (directory / own).is_file(), OWN_FILES):
                shutil.copy2(directory / name, stage / name)
            return jobs, devices
    raise EmbraceError(f"{directory} could not be backed up: {missing}; tried {TRIES} times")


def _link_all(directory: Path, stage: Path) -> None:
    """Link every file that has its final name; those that go meanwhile are not waited for."""
    for folder in FOLDERS:
        (stage / folder).mkdir(exist_ok=True)
        for place, names, files in os.walk(directory / folder):
            names[:] = [name for name in names if not name.endswith(".draft")]
            here = stage / Path(place).relative_to(directory)
            here.mkdir(parents=True, exist_ok=True)
            for name in files:
                if not name.endswith((".draft", ".part")):
                    with suppress(FileNotFoundError, FileExistsError):
                        _link(Path(place) / name, here / name)


def _link(path: Path, to: Path) -> None:
    try:
        to.hardlink_to(path)
    except PermissionError:  # a file system without links
        shutil.copy2(path, to)


def _copy_database(path: Path, to: Path) -> None:
    """Copy the database as it is at one moment; the coordinator goes on writing."""
    to.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as target:
        source.execute("PRAGMA busy_timeout=10000")
        source.backup(target)


def _check(stage: Path, *, wishes: bool) -> tuple[str, int, int]:
    """Say what the copied database refers to and the stage lacks; and count its jobs and devices."""
    repository, blobs = Repository(open_database(sqlite_url(stage))), DirectoryBlobs(stage)
    try:
        with repository.reading() as session:
            jobs = [job for job in repository.jobs(session) if job.state != DELETING]
            unfinished = {job.id for job in repository.unfinished_jobs(session)}
            missing = ""
            for job in jobs:
                try:
                    _check_job(repository, session, blobs, job, goes_on=job.id in unfinished, wishes=wishes)
                except (EmbraceError, OSError) as error:
                    missing = f"job {job.id}: {error}"
            return missing, len(jobs), len(repository.devices(session))
    finally:
        blobs.close()
        repository.close()  # with the last connection the log is merged into the file


def _check_job(
    repository: Repository, session: Session, blobs: DirectoryBlobs, job: JobRecord, *, goes_on: bool, wishes: bool
) -> None:
    """Open everything that the coordinator would open of a job."""
    plan, versions = plan_from(job.plan), Versions(blobs)
    manifest = Bundles(blobs).checked(job.bundle)
    engine = RoundEngine(plan, manifest)
    versions.open(job.id, job.version, engine.space, engine.vector_names)
    if goes_on:
        restored = restore_job(repository, session, job, engine)
        for update in needed_updates(repository, session, restored):
            Bodies(blobs).file(update).stat()
    if (plan.evaluate.data or "").startswith(UPLOADED):
        EvaluationData(blobs).find(plan.evaluate.data or "").stat()
    best = BestVersions(repository, versions).of(session, job) if wishes else None  # older programs did not keep it
    if best is not None:
        versions.find(job.id, best.version).stat()
