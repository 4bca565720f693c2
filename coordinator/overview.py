"""What the dashboard shows that no other client asks for: the fleet at a glance, who trained what, what can be made.

Nothing here changes anything, and every answer is bounded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from coordinator.errors import NotFound
from coordinator.reports import EVENTS_AT_ONCE, Reports, is_number, timing
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.repository import Repository
from coordinator.store.schema import StandingRecord, UpdateRecord
from coordinator.store.versions import Versions
from coordinator.zipping import zipped
from edge_runtime.bundle_files import file_ref
from federation.algorithms import PUBLISHED
from federation.coverage import coverage
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, Manifest, dumps

MOST_SEATS = 20_000
MOST_DEVICES = 2_000


class Overview:
    """Answer the dashboard's questions."""

    def __init__(
        self, repository: Repository, reports: Reports, versions: Versions, bundles: Bundles, data: EvaluationData
    ) -> None:
        self._repository = repository
        self._reports = reports
        self._versions = versions
        self._bundles = bundles
        self._data = data

    # --- what happens ------------------------------------------------------------------------------------------------

    def last_event(self) -> int:
        with self._repository.reading() as session:
            return self._repository.last_event(session)

    def news(self, after: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """List events of all jobs behind a number; and what has no events: devices by state, the newest benchmark."""
        with self._repository.reading() as session:
            rows = [vars(row) for row in self._repository.all_events(session, after, EVENTS_AT_ONCE)]
            measured = self._repository.last_benchmark_at(session)
        return rows, {"fleet": self._reports.device_states(), "benchmarks": {"at": measured}}

    # --- the fleet ---------------------------------------------------------------------------------------------------

    def fleet(self) -> dict[str, Any]:
        """List the devices that are not revoked, those in trouble first, with what their last update told."""
        with self._repository.reading() as session:
            updates = self._repository.newest_updates(session, MOST_DEVICES)
            standings: dict[str, list[StandingRecord]] = {}
            for known in self._repository.standings(session):
                standings.setdefault(known.device, []).append(known)
        rows = [row for row in self._reports.devices() if not row["revoked"]]
        told = [{**row, **_told(updates.get(row["id"])), **_stands(standings.get(row["id"], []))} for row in rows]
        return {"devices": sorted(told, key=_trouble)[:MOST_DEVICES], "total": len(told)}

    # --- a job -------------------------------------------------------------------------------------------------------

    def seats(self, job: str, rounds: int) -> dict[str, Any]:
        """Say who trained what in the newest rounds of a job: every seat, and the layers of every boundary."""
        record = self._reports.record(job)
        with self._repository.reading() as session:
            (newest,) = self._repository.newest_rounds(session, job, 1)
            rows = self._repository.newest_seats(session, job, max(0, newest.number + 1 - rounds), MOST_SEATS)
            names = self._repository.names(session)
        if len(rows) == MOST_SEATS:  # the oldest round may lack some
            rows = [row for row in rows if row[0] > rows[-1][0]] or rows
        manifest = self._bundles.manifest(record.bundle)
        seats = [_seat(number, body) for number, body in rows]
        devices = {device for seat in seats for device in (seat["device"], *seat["lost"])}
        return {
            "layers": [
                {
                    "name": layer.name,
                    "parameters": manifest.space.layer(number).stop - manifest.space.layer(number).start,
                }
                for number, layer in enumerate(manifest.layers)
            ],
            "boundaries": {text: _layers(manifest, text) for text in {seat["boundary"] for seat in seats}},
            "tiers": dict(manifest.tiers),
            "devices": {device: names.get(device, device) for device in devices},
            "seats": seats,
        }

    def versions(self, job: str) -> list[dict[str, Any]]:
        """List the versions of a job whose weights are here, the newest first, with their scores."""
        found = self._reports.job(job)
        with self._repository.reading() as session:
            scores = self._repository.scores(session, job)
        best = found["best"]["version"] if found["best"] else None
        rows = []
        for version in reversed(self._versions.kept(job)):
            path = self._versions.find(job, version)
            if version <= found["version"] and path.is_file():
                known = {name: dict(values)[version] for name, values in scores.items() if version in dict(values)}
                own = {"version": version, "bytes": path.stat().st_size, "scores": known}
                rows.append({**own, "newest": version == found["version"], "best": version == best})
        return rows

    def trained_bundle(self, job: str, version: int) -> tuple[str, Iterator[bytes]]:
        """Return the name and the bytes of a zip file: the job's bundle with the weights of a version."""
        record = self._reports.record(job)
        weights, directory = self._versions.find(job, version), self._bundles.directory(record.bundle)
        manifest = self._bundles.manifest(record.bundle)
        try:
            if version > record.version:  # written, and not recorded yet
                raise FileNotFoundError
            opened = weights.open("rb")  # a round that closes meanwhile may remove its name, not what is open
            ref = replace(file_ref(weights.parent, weights.name), name=manifest.weights.name)
        except FileNotFoundError:
            raise NotFound(f"there is no version {version} of job {job!r} any more") from None
        new = dumps(replace(manifest, weights=ref)).encode()
        files: list[tuple[str, BinaryIO | Path]] = [(MANIFEST_NAME, io.BytesIO(new)), (ref.name, opened)]
        files += [(file.name, directory / file.name) for file in manifest.files() if file != manifest.weights]
        name = f"{_file_name(record.name)}-v{version}"
        return name, zipped([(f"{name}/{file}", content) for file, content in files])

    # --- a new job ---------------------------------------------------------------------------------------------------

    def choices(self) -> dict[str, Any]:
        """List what a job can be made of: bundles, evaluation data, published algorithms."""
        return {
            "bundles": [_bundle(digest, manifest) for digest, manifest in self._bundles.known().items()],
            "evaluation_data": self._data.known(),
            "algorithms": [{"name": each.name, "note": each.note, "paper": each.paper} for each in PUBLISHED.values()],
        }


def _told(update: UpdateRecord | None) -> dict[str, Any]:
    """Take of a device's last report what the table of the fleet has."""
    if update is None:
        return {"last_job": "", "boundary": "", "engine": "", "seconds": {}, "last_update_at": None, "memory": {}}
    found, memory = timing(update), update.report.get("memory")
    kept = memory if isinstance(memory, dict) else {}
    return {
        "last_job": update.job,
        "last_update_at": update.arrived_at,
        **{name: found[name] for name in ("boundary", "engine", "seconds")},
        "memory": {name: kept[name] for name in ("anonymous", "process", "allowed") if is_number(kept.get(name))},
    }


def _stands(known: list[StandingRecord]) -> dict[str, Any]:
    """Sum up how a device does in all jobs; `known` is in the order of time."""
    failed = [standing for standing in known if standing.failures]
    return {
        "done": sum(standing.successes for standing in known),
        "failed": sum(standing.failures for standing in known),
        "in_a_row": max((standing.in_a_row for standing in known), default=0),
        "reason": failed[-1].reason if failed else "",
        "message": failed[-1].message if failed else "",
    }


def _trouble(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort the devices that need a person first."""
    share = row["failed"] / max(1, row["done"] + row["failed"])
    return (
        row["state"] != "benched",
        -row["in_a_row"],
        not row["unfit"],
        -share,
        row["state"] != "gone",
        -row["seconds"].get("wall", 0.0),
        row["name"],
    )


def _seat(number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    member, holders = body["member"], list(body["holders"])
    device = member["device"]
    ended = holders[:-1] if body["state"] in ("leased", "uploaded", "arrived") else holders
    return {
        "round": number,
        "slot": body["number"],
        "device": device,
        "boundary": member["boundary"],
        "state": body["state"],
        "since": body["since"],
        "until": body["until"],
        "seconds": body["seconds"],
        "usual": member["seconds"],
        "lost": list(dict.fromkeys(ended)),
    }


def _layers(manifest: Manifest, boundary: str) -> list[int]:
    try:
        return list(coverage(manifest, boundary).layers)
    except BundleError:
        return []


def _bundle(digest: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "digest": digest,
        "name": manifest.name,
        "layers": len(manifest.layers),
        "parameters": manifest.space.size,
        "bytes": sum(file.bytes for file in manifest.files()),
        "batch": manifest.batch,
        "tiers": dict(manifest.tiers),
    }


def _file_name(name: str) -> str:
    """Make a name of a job one of a file, on any system."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in name)
    return plain.strip("-")[:80] or "model"
