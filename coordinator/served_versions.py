"""What devices fetch of a job: the weights of a version, and parts of its vectors."""

from __future__ import annotations

import logging
from pathlib import Path

from coordinator.errors import NotFound
from coordinator.reports import Reports
from coordinator.store.bundles import Bundles
from coordinator.store.versions import Versions
from federation.coverage import coverage
from federation.errors import InputError
from federation.exchange import graph_region, trained_region
from federation.job import Plan, plan_from
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.region import Region
from federation.space import Vector

log = logging.getLogger("embrace.coordinator")


class ServedVersions:
    """Find versions, and cut parts out of them."""

    def __init__(self, reports: Reports, bundles: Bundles, versions: Versions) -> None:
        self._reports = reports
        self._bundles = bundles
        self._versions = versions
        self._known: dict[str, tuple[int, Path, Manifest]] = {}  # of jobs: the version that was last asked for

    def version_file(self, job: str, version: int) -> tuple[Path, Manifest]:
        record = self._reports.record(job)
        path = self._versions.find(job, version)
        if not 0 <= version <= record.version or not path.is_file():
            raise NotFound(f"there is no version {version} of job {job!r} any more")
        manifest = self._bundles.manifest(record.bundle)
        self._known[job] = version, path, manifest
        return path, manifest

    def known_version(self, job: str, version: int) -> tuple[Path, Manifest] | None:
        """Find a version that a device asked for before: no database, no waiting."""
        found = self._known.get(job)
        return found[1:] if found is not None and found[0] == version and found[1].is_file() else None

    def weights_url(self, job: str, version: int) -> str | None:
        """Sign a URL from which devices can read a version themselves; None if they have to ask here."""
        try:
            return self._versions.url(job, version)
        except OSError as error:  # the storage is away
            log.warning("job %s, version %s: no URL could be signed: %s", job, version, error)
            return None

    def forget(self, job: str) -> None:
        """Forget what is known of a job that was removed."""
        self._known.pop(job, None)

    def part(self, job: str, version: int, name: str, boundary: str, unit: int | None) -> tuple[Region, Vector]:
        """Cut out what a boundary's graph takes of a vector, or of what it trains one unit."""
        _, manifest = self.version_file(job, version)
        plan = plan_from(self._reports.record(job).plan)
        if name not in (MODEL, *plan.choices.tracks):
            raise NotFound(f"job {job!r} has no vector {name!r}")
        region = _part_region(plan, manifest, boundary, unit)
        vectors = self._versions.open(job, version, manifest.space, plan.choices.vectors)
        return region, region.gather(vectors[name])


def _part_region(plan: Plan, manifest: Manifest, boundary: str, unit: int | None) -> Region:
    covered = coverage(manifest, boundary)
    if unit is None:
        return graph_region(manifest, covered)
    units = plan.choices.sync.units(manifest.space)
    if unit >= len(units):
        raise InputError(f"unit: expected a number below {len(units)}, got {unit}")
    return trained_region(manifest, covered) & units[unit]
