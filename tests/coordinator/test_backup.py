"""A backup while the coordinator works: restored elsewhere after a kill -9, the job ends with the same bits."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from coordinator.backup import TRIES, write_backup
from edge_runtime.client import DeviceClient
from federation.errors import EmbraceError, InputError
from tests.coordinator.databases import about_sqlite
from tests.coordinator.harness import ALL_THREE, ROOT, TIERS, Files, World, end_process, start_server
from tests.coordinator.test_kill import answer, enrol_all
from tests.waiting import wait_until

pytestmark = about_sqlite

ROUNDS = 3


def restored(archive: Path, to: Path) -> Path:
    """As docs/guides/operations.md says: tar --extract --directory NEW --file FILE."""
    to.mkdir()
    subprocess.run(["tar", "--extract", "--directory", str(to), "--file", str(archive)], check=True)
    return to


def backup(directory: Path, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "embrace", "serve", "--data", str(directory), "--backup", str(file)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])  # the second has vectors on the server
def test_a_killed_and_wiped_coordinator_goes_on_from_its_backup(tmp_path: Path, algorithm: str) -> None:
    world = World(tmp_path / "start")
    world.now = time.time()
    tokens = enrol_all(world)
    job = world.job(num_rounds=ROUNDS, algorithm=algorithm, **ALL_THREE)
    world.end()

    def serve(directory: Path, work: dict[str, int], after: Path | None = None) -> None:
        """Let devices answer so many tasks each; then the archive is written, and the process is killed."""
        process, url = start_server(directory)
        clients = {tier: DeviceClient(url, token) for tier, token in zip(TIERS, tokens)}
        try:
            left = dict(work)
            while any(left.values()):
                for tier, client in clients.items():
                    offer = client.next_task(0.2) if left[tier] else None
                    if offer is not None:
                        answer(client, world.manifest, offer)
                        left[tier] -= 1
            if after is not None:
                told = backup(directory, after)
                assert told.returncode == 0 and told.stdout.startswith(f"backup of {directory}: {after}, "), told
            else:
                wait_until(lambda: Files(directory).version(job, ROUNDS).is_file())
        finally:
            for client in clients.values():
                client.close()
            end_process(process)

    undisturbed, first = (Path(shutil.copytree(tmp_path / "start", tmp_path / name)) for name in ("whole", "first"))
    serve(undisturbed, dict.fromkeys(TIERS, ROUNDS))
    # Killed in the middle of the second round: one device of three has answered.
    archive = tmp_path / "coordinator.tar"
    serve(first, {"strong": 2, "moderate": 1, "weak": 1}, archive)
    shutil.rmtree(first)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    again = restored(archive, tmp_path / "again")
    assert [path.name for path in (again / "spool").iterdir()], "the update of the open round is part of it"
    serve(again, {"strong": 1, "moderate": 2, "weak": 2})
    ends = [Files(directory).version(job, ROUNDS).read_bytes() for directory in (undisturbed, again)]
    assert ends[0] == ends[1]


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return set(opened.getnames())


def test_what_goes_while_it_is_written_is_in_it(tmp_path: Path) -> None:
    """Two rounds are committed once the database is copied: the version that the copy refers to is removed by then."""
    world = World(tmp_path / "served")
    fleet, job = world.fleet(*TIERS), world.job(num_rounds=9, **ALL_THREE)
    world.round(fleet)
    before, steps = world.weights(job), iter([2])

    def reached(point: str) -> None:
        for _ in range(next(steps, 0) if point == "database-copied" else 0):
            world.round(fleet)

    write_backup(tmp_path / "served", tmp_path / "b.tar", reached=reached)
    assert not world.files.version(job, 1).exists() and world.state(job)["version"] == 3
    world.end()
    world.root = restored(tmp_path / "b.tar", tmp_path / "again")
    world.files = Files(world.root)
    world.begin()
    assert world.state(job)["version"] == 1 and (world.weights(job) == before).all()
    world.round(fleet)
    assert world.state(job)["version"] == 2
    world.end()


def test_what_comes_and_goes_in_between_is_tried_again(tmp_path: Path) -> None:
    """A version is made after the first look and removed before the second: this moment cannot be had."""
    world = World(tmp_path / "served")
    fleet, job = world.fleet(*TIERS), world.job(num_rounds=9, **ALL_THREE)
    passed: list[str] = []

    def reached(point: str) -> None:
        passed.append(point)
        for _ in range({1: 1, 2: 2}.get(len(passed), 0)):
            world.round(fleet)

    write_backup(tmp_path / "served", tmp_path / "b.tar", reached=reached)
    assert passed == ["files-linked", "database-copied"] * 2
    assert f"jobs/{job}/versions/3.safetensors" in names(tmp_path / "b.tar")
    world.end()


def test_a_damaged_directory_is_told_and_leaves_the_old_archive(tmp_path: Path) -> None:
    world = World(tmp_path / "served")
    job = world.job()
    write_backup(tmp_path / "served", tmp_path / "b.tar")
    old = (tmp_path / "b.tar").read_bytes()
    world.files.version(job, 0).unlink()
    with pytest.raises(EmbraceError, match=f"job {job}: .*; tried {TRIES} times"):
        write_backup(tmp_path / "served", tmp_path / "b.tar")
    assert (tmp_path / "b.tar").read_bytes() == old
    assert sorted(os.listdir(tmp_path)) == ["b.tar", "served"] and "backup.draft" not in os.listdir(tmp_path / "served")
    world.end()


def test_other_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no coordinator.db in"):
        write_backup(tmp_path, tmp_path / "b.tar")
    (tmp_path / "serve.toml").write_text('database = "postgresql://nowhere/x"\n')
    told = backup(tmp_path, tmp_path / "b.tar")
    assert told.returncode == 2 and "pg_dump" in told.stderr and told.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["serve.toml"]
