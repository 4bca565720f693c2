"""`job delete`: a job that is over goes with everything that only it used, and a crash in the middle is made good."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from sqlalchemy import func, select

from coordinator import evaluation
from coordinator.errors import NotFound, Refused
from coordinator.store.schema import DELETING, METADATA
from edge_runtime.data import from_arrays
from federation.errors import InputError
from federation.job import plan_from
from tests.coordinator.databases import copy_database
from tests.coordinator.harness import World, end_process, place_bundle, start_server, upload
from tests.waiting import PATIENCE, wait_until


def samples(world: World) -> str:
    shape = world.manifest.input.shape
    x, y = np.zeros((3, *shape), world.manifest.input.dtype), np.zeros((3, *world.manifest.labels.shape), np.int64)
    return upload(world, from_arrays(x, y, world.manifest))


def files(root: Path) -> set[str]:
    kept = ("bundles", "data", "jobs", "spool")
    return {str(path.relative_to(root)) for folder in kept for path in (root / folder).rglob("*") if path.is_file()}


def rows(world: World) -> dict[str, int]:
    with world.sessions() as session:
        tables = [table for table in METADATA.sorted_tables if "job" in table.c or table.name == "jobs"]
        return {table.name: session.scalar(select(func.count()).select_from(table)) or 0 for table in tables}


@pytest.fixture
def scored(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A job that is done, with a score, a best version and rows in every table."""

    device = world.device()

    def make(data: str) -> str:
        monkeypatch.setattr(evaluation, "score", lambda request: {"accuracy": 1 / request.version})
        job = world.job(num_rounds=3, evaluate={"data": data})
        for _ in range(3):
            world.round([device])
        wait_until(lambda: not world.coordinator._evaluations.unfinished(job))
        return job

    return make


def test_a_job_that_is_being_deleted_is_not_steered(world: World, scored: Callable[..., str]) -> None:
    job = scored(samples(world))
    with world.sessions() as session:
        world.coordinator.repository.change_job(session, job, state=DELETING)
        session.commit()
    for state in ("paused", "stopped", "running"):
        with pytest.raises(Refused, match=f"job {job} is deleting"):
            world.coordinator.set_state(job, state)


def test_everything_of_a_job_goes(world: World, scored: Callable[..., str]) -> None:
    job = scored(samples(world))
    assert all(rows(world)[name] for name in ("jobs", "rounds", "seats", "updates", "metrics", "events"))
    before = {name: (world.root / name).stat() for name in files(world.root)}
    size = sum({facts.st_ino: facts.st_size for facts in before.values()}.values())
    found = world.coordinator.delete_job(job)
    assert found["bytes"] == size and found["bundle"] == world.bundle and found["data"].startswith("sha256:")
    assert files(world.root) == set() and not any(rows(world).values())
    with pytest.raises(NotFound, match="there is no job"):
        world.coordinator.delete_job(job)
    world.restart()
    assert world.coordinator.jobs() == []


def test_what_another_job_uses_stays(world: World, scored: Callable[..., str]) -> None:
    data = samples(world)
    first, second = scored(data), scored(data)
    found = world.coordinator.delete_job(first)
    assert found["bundle"] is None is found["data"]
    assert world.state(second)["best"]["version"] == 1 and world.weights(second).size
    assert (world.files.bundle(world.bundle) / "manifest.json").is_file()
    assert scored(data) not in (first, second), "and can be used again"


def test_a_job_that_runs_is_refused_unless_it_is_forced(world: World) -> None:
    job, device = world.job(), world.device()
    offer = world.offers([device])[device]
    for state in ("running", "paused"):
        if state == "paused":
            world.coordinator.set_state(job, "paused")
        with pytest.raises(Refused, match=f"job {job} is {state}; stop it first"):
            world.coordinator.delete_job(job)
    assert world.coordinator.delete_job(job, force=True)["bundle"] == world.bundle
    world.settle()
    with pytest.raises(NotFound, match="there is no task"):
        world.send(device, offer)
    assert world.poll(device) is None and files(world.root) == set()


def test_a_bundle_that_goes_can_be_sent_again(world: World) -> None:
    job = world.job()
    world.coordinator.delete_job(job, force=True)
    with pytest.raises(InputError, match="is not a bundle"):
        world.job()
    place_bundle(world.root)
    again = world.job(num_rounds=1)
    world.round([world.device()])
    assert world.state(again)["state"] == "done"


def test_a_bundle_that_goes_while_a_job_is_created(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.job()
    create = world.coordinator._versions.create

    def slow(*values: object) -> None:
        create(*values)  # type: ignore[arg-type]
        world.coordinator.delete_job(first, force=True)

    monkeypatch.setattr(world.coordinator._versions, "create", slow)
    with pytest.raises(InputError, match="the bundle went with a job that was deleted; send it again"):
        world.coordinator.create_job(plan_from({"bundle": "x"}), world.bundle)
    assert world.coordinator.jobs() == [] and files(world.root) == set()


def test_a_score_that_comes_when_its_job_is_gone_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[str] = []

    def score(request: evaluation.Evaluation) -> dict[str, float]:
        world.coordinator.delete_job(jobs[0])
        return {"accuracy": 0.5}

    monkeypatch.setattr(evaluation, "score", score)
    jobs.append(world.job(num_rounds=1, evaluate={"data": "coordinator:test.npz"}))
    world.round([world.device()])
    wait_until(lambda: not world.coordinator._evaluations.unfinished(jobs[0]))
    assert not any(rows(world).values()) and files(world.root) == set()


@pytest.mark.parametrize(("point", "times"), [("before-delete", 1), ("mid-delete", 1), ("mid-delete", 2)])
def test_killed_while_a_job_is_deleted(world: World, tmp_path: Path, point: str, times: int) -> None:
    job, other = world.job(), place_bundle(world.root, width=5)[0]
    world.coordinator.set_state(job, "stopped")
    staying = world.coordinator.create_job(plan_from({"bundle": "x"}), other)
    token = world.registry.set_admin_token()
    world.end()
    directory = Path(shutil.copytree(world.root, tmp_path / "copy"))
    copy_database(world.root, directory)
    process, url = start_server(directory, point=point, times=times)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with pytest.raises(httpx.TransportError):
            httpx.delete(f"{url}/v1/jobs/{job}", headers=headers, timeout=PATIENCE)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        end_process(process)
        process, url = start_server(directory)
        assert httpx.delete(f"{url}/v1/jobs/{job}", headers=headers).status_code == 404
        assert [row["id"] for row in httpx.get(f"{url}/v1/jobs", headers=headers).json()] == [staying]
    finally:
        end_process(process)
    assert os.listdir(directory / "bundles") == [other] and os.listdir(directory / "jobs") == [staying]
    world.begin()
