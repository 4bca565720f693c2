"""A file system without room: uploads are refused, nothing is lost, and work goes on when there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator import folding
from edge_runtime.bundle_files import map_weights
from federation.job import plan_from
from tests.coordinator.harness import Files, Offer, body_of, place_bundle, put_update, scripted, serving
from tests.waiting import wait_until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """A file that takes all but so many bytes."""
    found = os.statvfs(place)
    filler = place / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)
    return filler


def test_a_full_disk_refuses_uploads_and_work_goes_on_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "TRY_AGAIN", 0.2)
    directory = small_disk / "data"
    with serving(directory) as site:
        bundle, manifest = place_bundle(directory, width=30_000)  # 480 kB
        service = site.server.coordinator
        job = service.create_job(plan_from({"bundle": "x", "num_rounds": 2}), bundle)
        before = np.array(map_weights(Files(directory).version(job, 0), manifest.space))
        with site.http(site.enrol()[1]) as client:
            offer = Offer(client.post("/v1/tasks/next?wait=5").json())
            body = body_of(manifest, offer)
            filler = fill(small_disk, leave=100_000)
            for _ in range(2):
                answer = put_update(client, offer, body)
                assert answer.status_code == 507, answer.text
                assert answer.headers["content-type"] == "application/problem+json"
                assert int(answer.headers["retry-after"]) > 0 and answer.json()["status"] == 507
                assert site.spool() == []
            assert client.get(f"/v1/jobs/{job}/versions/0/weights").status_code == 200
            filler.unlink()
            fill(small_disk, leave=800_000)  # room for the body, not for the new version beside it
            assert put_update(client, offer, body).status_code == 201
            site.settle()
            assert service.job(job)["round"]["state"] == "closing" and service.job(job)["version"] == 0
            filler.unlink()
            wait_until(lambda: service.job(job)["version"])  # it is tried again
            after = np.array(map_weights(Files(directory).version(job, 1), manifest.space))
            expected = (before.astype(np.float64) + scripted(manifest, offer)).astype(np.float32)
            np.testing.assert_array_max_ulp(after, expected, maxulp=1)
            offer = Offer(client.post("/v1/tasks/next?wait=30").json())
            assert put_update(client, offer, body_of(manifest, offer)).status_code == 201
            site.settle()
            assert service.job(job)["state"] == "done" and site.spool() == []
