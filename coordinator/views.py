"""What can be read: jobs, rounds, devices, events; and the files that devices fetch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, tuple_

from coordinator.aggregate import open_version
from coordinator.errors import NotFound
from coordinator.store.database import Sessions
from coordinator.store.files import Files
from coordinator.store.schema import Base, DeviceRow, EventRow, JobRow, MetricRow, RoundRow, SeatRow, UpdateRow
from edge_runtime.bundle_files import check_bundle, file_ref, read_manifest
from federation.coverage import coverage
from federation.errors import BundleError, InputError
from federation.exchange import graph_region, trained_region
from federation.job import Plan, plan_from
from federation.layout import MODEL
from federation.manifest import MANIFEST_NAME, FileRef, Manifest
from federation.region import Region
from federation.space import Vector

FINISHED = ("stopped", "done", "failed")
EVENTS_AT_ONCE = 500
UPDATES_AT_ONCE = 500

ROUND_COLUMNS = (
    "number",
    "state",
    "opened_at",
    "closed_at",
    "seconds",
    "updates",
    "samples",
    "bytes_up",
    "loss",
    "lost_state",
)
METRIC_COLUMNS = ("version", "name", "value", "at")
# Of an update, then of its report; the parts of the time as in docs/guides/fine-tune.md.
TIMING_COLUMNS = (
    "round",
    "slot",
    "device",
    "boundary",
    "engine",
    "samples",
    "bytes",
    "arrived_at",
    "lost_state",
    "wall",
    "download",
    "hidden_download",
    "load",
    "forward",
    "activation_io",
    "training",
    "training_forward",
    "backward",
    "optimiser",
    "state",
    "evaluation",
    "other",
)


class Views:
    """Reading, which needs no lock: the database has only what is settled."""

    def __init__(self, files: Files, sessions: Sessions) -> None:
        self.files = files
        self.sessions = sessions
        self._graphs: dict[str, Path] = {}
        self._manifests: dict[str, Manifest] = {}  # of bundles, which never change
        self._versions: dict[str, tuple[int, Manifest]] = {}  # of jobs: a version that is recorded, and there are older

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
            if last is None:
                return {**_columns(row), "round": None}
            mine = select(SeatRow.body).where(SeatRow.job == job, SeatRow.round == last.number)
            slots = list(session.scalars(mine.order_by(SeatRow.number)))
            return {**_columns(row), "round": {**_columns(last), "body": {**last.body, "slots": slots}}}

    def job_state(self, job: str) -> str:
        with self.sessions() as session:
            state = session.scalar(select(JobRow.state).where(JobRow.id == job))
        if state is None:
            raise NotFound(f"there is no job {job!r}")
        return state

    def is_over(self, job: str) -> bool:
        return self.job_state(job) in FINISHED

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
        """Events behind a number, and whether there will be no others behind these."""
        over = self.is_over(job)
        with self.sessions() as session:
            newer = select(EventRow).where(EventRow.job == job, EventRow.id > after).order_by(EventRow.id)
            return [_columns(row) for row in session.scalars(newer.limit(EVENTS_AT_ONCE))], over

    def version_file(self, job: str, version: int) -> tuple[Path, Manifest]:
        with self.sessions() as session:
            row = session.get(JobRow, job)
        if row is None:
            raise NotFound(f"there is no job {job!r}")
        path = self.files.version(job, version)
        if not 0 <= version <= row.version or not path.is_file():
            raise NotFound(f"there is no version {version} of job {job!r} any more")
        self._versions[job] = row.version, self._manifest(row.bundle)
        return path, self._manifest(row.bundle)

    def known_version(self, job: str, version: int) -> tuple[Path, Manifest] | None:
        """The same for a version that somebody asked for before: no database, no waiting."""
        newest, manifest = self._versions.get(job, (-1, None))
        return (self.files.version(job, version), manifest) if manifest is not None and version <= newest else None

    def part(self, job: str, version: int, name: str, boundary: str, unit: int | None) -> tuple[Region, Vector]:
        """A part of a vector of a version: what a boundary's graph takes, or of what it trains one unit."""
        _, manifest = self.version_file(job, version)
        with self.sessions() as session:
            plan = plan_from(session.get_one(JobRow, job).plan)
        if name not in (MODEL, *plan.choices.tracks):
            raise NotFound(f"job {job!r} has no vector {name!r}")
        region, space = self._part_region(plan, manifest, boundary, unit), manifest.space
        vectors = open_version(self.files, job, version, space, plan.choices.vectors)
        return region, region.gather(vectors[name])

    def _part_region(self, plan: Plan, manifest: Manifest, boundary: str, unit: int | None) -> Region:
        covered = coverage(manifest, boundary)
        if unit is None:
            return graph_region(manifest, covered)
        units = plan.choices.sync.units(manifest.space)
        if unit >= len(units):
            raise InputError(f"unit: expected a number below {len(units)}, got {unit}")
        return trained_region(manifest, covered) & units[unit]

    def _manifest(self, bundle: str) -> Manifest:
        if bundle not in self._manifests:
            self._manifests[bundle] = read_manifest(self.files.bundle(bundle))
        return self._manifests[bundle]

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
        path = self.files.bundle(f"{digest}.draft") / FileRef(name, "0" * 64, 0).name  # which refuses ways out of it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BundleError(f"{name!r}: there is a file where it needs a folder") from None
        if path.is_dir():
            raise BundleError(f"{name!r} is a folder already")
        return path

    def complete_bundle(self, digest: str) -> None:
        """Check what has come and give it its name."""
        final, draft = self.files.bundle(digest), self.files.bundle(f"{digest}.draft")
        if final.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
            return
        manifest = read_manifest(draft)
        if file_ref(draft, MANIFEST_NAME).sha256 != digest:
            raise BundleError(f"the manifest that came does not have the sha256 {digest}")
        check_bundle(draft, manifest)
        draft.rename(final)

    # --- tables and numbers ------------------------------------------------------------------------------------------

    def round_rows(self, job: str) -> list[dict[str, Any]]:
        """The rounds of a job, flat: a row for each."""
        rows = self.rounds(job)
        took = [None if row["closed_at"] is None else row["closed_at"] - row["opened_at"] for row in rows]
        return [{**row, **row["summary"], "seconds": seconds} for row, seconds in zip(rows, took)]

    def timings(self, job: str, first_round: int = 0) -> Iterator[dict[str, Any]]:
        """What the report of every accepted update says, in the order of rounds and slots; a few at a time."""
        self.job(job)
        return self._timings(job, first_round)

    def _timings(self, job: str, first_round: int) -> Iterator[dict[str, Any]]:
        place = tuple_(UpdateRow.round, UpdateRow.slot)
        mine = select(UpdateRow).where(UpdateRow.job == job).order_by(UpdateRow.round, UpdateRow.slot)
        last = (first_round, -1)
        while True:
            with self.sessions() as session:
                rows = list(session.scalars(mine.where(place > last).limit(UPDATES_AT_ONCE)))
            yield from map(_timing, rows)
            if len(rows) < UPDATES_AT_ONCE:
                return
            last = (rows[-1].round, rows[-1].slot)

    def census(self, since: float) -> dict[str, Any]:
        """How many there are of everything; present are the devices that were heard of since then."""
        with self.sessions() as session:
            states = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state))
            here = select(func.count()).select_from(DeviceRow).where(DeviceRow.revoked.is_(False))
            committed = select(func.count()).select_from(RoundRow).where(RoundRow.state == "committed")
            return {
                "jobs": {**dict.fromkeys(("running", "paused", *FINISHED), 0), **{row[0]: row[1] for row in states}},
                "devices": session.scalar(here),
                "devices_present": session.scalar(here.where(DeviceRow.seen_at > since)),
                "rounds_committed": session.scalar(committed),
            }


def _timing(row: UpdateRow) -> dict[str, Any]:
    """Of a report, which is a device's own words, only what is of the right kind."""
    told = row.report.get("seconds")
    told = dict(told) if isinstance(told, dict) else {}
    if isinstance(layers := told.get("forward"), dict):
        told["forward"] = sum(value for value in layers.values() if _is_number(value))
    seconds = {name: told[name] for name in TIMING_COLUMNS if _is_number(told.get(name))}
    own = {name: getattr(row, name) for name in ("round", "slot", "device", "samples", "bytes", "arrived_at")}
    words = {name: str(row.report.get(name) or "")[:200] for name in ("boundary", "engine")}
    return {**own, **words, "lost_state": row.report.get("lost_state") is True, "seconds": seconds}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _columns(row: Base) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__mapper__.column_attrs}
