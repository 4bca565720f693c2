"""What can be read: jobs, rounds, devices, events; and the files that devices fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import select

from coordinator.errors import NotFound
from coordinator.store.database import Sessions
from coordinator.store.files import Files
from coordinator.store.schema import Base, DeviceRow, EventRow, JobRow, MetricRow, RoundRow
from federation.bundle_files import check_bundle, file_ref
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, Manifest, read_manifest

FINISHED = ("stopped", "done", "failed")
EVENTS_AT_ONCE = 500


class Views:
    """Reading, which needs no lock: the database has only what is settled."""

    def __init__(self, files: Files, sessions: Sessions) -> None:
        self.files, self.sessions = files, sessions
        self._graphs: dict[str, Path] = {}

    def jobs(self) -> list[dict[str, Any]]:
        with self.sessions() as session:
            return [_columns(row) for row in session.scalars(select(JobRow).order_by(JobRow.created_at))]

    def job(self, job: str) -> dict[str, Any]:
        with self.sessions() as session:
            row = session.get(JobRow, job)
            if row is None:
                raise NotFound(f"there is no job {job!r}")
            newest = select(RoundRow).where(RoundRow.job == job).order_by(RoundRow.number.desc()).limit(1)
            last = session.scalars(newest).first()
            return {**_columns(row), "round": _columns(last) if last else None}

    def rounds(self, job: str) -> list[dict[str, Any]]:
        self.job(job)
        with self.sessions() as session:
            rows = session.scalars(select(RoundRow).where(RoundRow.job == job).order_by(RoundRow.number))
            return [{k: v for k, v in _columns(row).items() if k != "body"} for row in rows]

    def metrics(self, job: str) -> list[dict[str, Any]]:
        """Scores of versions."""
        self.job(job)
        with self.sessions() as session:
            rows = session.scalars(select(MetricRow).where(MetricRow.job == job).order_by(MetricRow.id))
            return [{k: v for k, v in _columns(row).items() if k not in ("id", "job")} for row in rows]

    def devices(self) -> list[dict[str, Any]]:
        with self.sessions() as session:
            rows = session.scalars(select(DeviceRow).order_by(DeviceRow.enrolled_at))
            return [{k: v for k, v in _columns(row).items() if k != "token_hash"} for row in rows]

    def events(self, job: str, after: int) -> tuple[list[dict[str, Any]], bool]:
        """Events behind a number, and whether the job is over."""
        over = self.job(job)["state"] in FINISHED
        with self.sessions() as session:
            newer = select(EventRow).where(EventRow.job == job, EventRow.id > after).order_by(EventRow.id)
            return [_columns(row) for row in session.scalars(newer.limit(EVENTS_AT_ONCE))], over

    def version_file(self, job: str, version: int) -> tuple[Path, Manifest]:
        with self.sessions() as session:
            row = session.get(JobRow, job)
        path = self.files.version(job, version)
        if row is None or not path.is_file():
            raise NotFound(f"there is no version {version} of job {job!r} any more")
        return path, read_manifest(self.files.bundle(row.bundle))

    def bundle_file(self, digest: str, name: str) -> Path:
        return self.files.bundle(digest) / name

    def graph(self, sha256: str) -> Path:
        """A graph of any bundle."""
        if sha256 not in self._graphs:
            for directory in (self.files.root / "bundles").iterdir():
                if (directory / MANIFEST_NAME).is_file() and not directory.name.endswith(".draft"):
                    manifest = read_manifest(directory)
                    known = [file for file in manifest.files() if file != manifest.weights]
                    self._graphs |= {file.sha256: directory / file.name for file in known}
        if sha256 not in self._graphs:
            raise NotFound(f"there is no graph {sha256!r}")
        return self._graphs[sha256]

    def draft_file(self, digest: str, name: str) -> Path:
        """Where a file of a bundle goes that is on its way."""
        folder = self.files.bundle(f"{digest}.draft")
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
            raise BundleError(f"{name!r} is no file of a bundle")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def complete_bundle(self, digest: str) -> None:
        """Check what has come and give it its name."""
        final, draft = self.files.bundle(digest), self.files.bundle(f"{digest}.draft")
        if final.is_dir():
            return
        manifest = read_manifest(draft)
        if file_ref(draft, MANIFEST_NAME).sha256 != digest:
            raise BundleError(f"the manifest that came does not have the sha256 {digest}")
        check_bundle(draft, manifest)
        draft.rename(final)


def _columns(row: Base) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__mapper__.column_attrs}
