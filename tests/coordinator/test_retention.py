"""What is old goes by age and count; what is needed to go on stays, and a job goes on to the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from coordinator import retention
from coordinator.retention import Keep
from coordinator.store.database import open_database
from coordinator.store.repository import Repository
from federation.job import plan_from
from tests.coordinator.databases import about_postgresql, database_url, query
from tests.coordinator.harness import World, place_bundle, serving
from tests.embrace.cli.conftest import run
from tests.waiting import PATIENCE

DAY = 86_400.0
ALWAYS = {"JobCreated", "JobState", "Evaluated"}


def versions(world: World, job: str) -> list[int]:
    return sorted(int(path.stem) for path in world.files.version(job, 0).parent.glob("*.safetensors"))


def keeping(world: World, **keep: float) -> None:
    """Start again with other settings."""
    world.end()
    world.keep = Keep(**keep)  # type: ignore[arg-type]
    world.begin()


def prune(world: World) -> None:
    """As a coordinator does, which has not done so for long."""
    with world.coordinator.repository.begin() as session:
        world.coordinator.repository.is_due(session, "pruned", world.now - 2 * retention.EVERY, 0.0)
    world.coordinator.prune()


def test_as_many_versions_stay_as_the_settings_say(world: World) -> None:
    keeping(world, keep_versions=4)
    job, device = world.job(num_rounds=9), world.device()
    seen = []
    for _ in range(6):
        world.round([device])
        seen.append(versions(world, job))
    assert seen[-1] == [3, 4, 5, 6] and seen[1] == [0, 1, 2]
    world.restart()
    assert versions(world, job) == [3, 4, 5, 6]
    keeping(world, keep_versions=2)
    prune(world)
    assert versions(world, job) == [5, 6]


def test_versions_go_by_their_age_but_for_the_newest_two(world: World) -> None:
    keeping(world, keep_versions=9, keep_days=2)
    job, device = world.job(num_rounds=9), world.device()
    for _ in range(4):
        world.round([device])
        world.now += DAY
    prune(world)  # version 1 is four days old, version 4 one
    assert versions(world, job) == [3, 4]
    world.now += 9 * DAY
    prune(world)
    assert versions(world, job) == [3, 4]
    world.round([device])
    assert world.state(job)["version"] == 5


def test_events_go_by_count_and_age_but_for_those_that_are_read_again(world: World) -> None:
    keeping(world, keep_events=5)
    job, device = world.job(num_rounds=9), world.device()
    for _ in range(3):
        world.round([device])
    world.coordinator.set_state(job, "paused")
    world.coordinator.set_state(job, "running")
    before = world.coordinator.events(job, 0)[0]
    assert len(before) > 9
    prune(world)
    after = world.coordinator.events(job, 0)[0]
    assert after == [row for row in before if row["kind"] in ALWAYS or row in before[-5:]]
    keeping(world, keep_events=0, keep_days=1)
    world.now += 2 * DAY
    prune(world)
    assert {row["kind"] for row in world.coordinator.events(job, 0)[0]} <= ALWAYS
    world.round([device])
    assert world.state(job)["version"] == 4


def test_a_run_removes_a_bounded_number_of_events(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping(world, keep_events=1)
    job, device = world.job(num_rounds=9), world.device()
    for _ in range(4):
        world.round([device])
    monkeypatch.setattr(retention, "MOST_EVENTS", 5)
    monkeypatch.setattr(retention, "_AT_ONCE", 2)
    before = world.coordinator.events(job, 0)[0]
    prune(world)
    assert len(world.coordinator.events(job, 0)[0]) == len(before) - 5


def test_one_process_at_a_time_has_its_turn(world: World) -> None:
    keeping(world, keep_events=1)
    job, device = world.job(num_rounds=9), world.device()
    world.coordinator.prune()
    world.round([device])
    before = world.coordinator.events(job, 0)[0]
    world.coordinator.prune()
    assert world.coordinator.events(job, 0)[0] == before
    prune(world)
    assert world.coordinator.events(job, 0)[0] != before


def test_bodies_of_jobs_that_are_over_go_and_no_others(world: World) -> None:
    devices = world.fleet("strong", "strong")
    over = world.job(num_rounds=1, participate={"min_available": 2, "quorum": 1.0})
    world.round(devices)
    assert world.state(over)["state"] == "done"
    world.finish(over)
    going_on = world.job(num_rounds=1, participate={"min_available": 2, "quorum": 1.0})
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    (needed,) = world.spool()
    for name in (f"{over}-0-0-1.aa.body", "deleted-0-0-1.bb.body", f"{over}-0-0-1.cc.part"):
        (world.root / "spool" / name).write_bytes(b"left behind")
    prune(world)
    assert world.spool() == sorted([needed, f"{over}-0-0-1.cc.part"])
    world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(going_on)["state"] == "done"


def test_weights_that_are_being_sent_are_sent_to_the_end(tmp_path: Path) -> None:
    """A version goes while a client reads it."""
    with serving(tmp_path / "served", keep_versions=2) as site:
        digest, _ = place_bundle(site.directory, width=400_000)
        job = site.server.coordinator.create_job(plan_from({"bundle": "x"}), digest)
        with site.http(site.enrol()[1]) as device, device.stream("GET", f"/v1/jobs/{job}/versions/0/weights") as answer:
            parts = answer.iter_raw(1 << 10)
            first = next(parts)
            file = site.directory / "jobs" / job / "versions" / "0.safetensors"
            expected = file.read_bytes()
            file.unlink()
            assert first + b"".join(parts) == expected
            assert answer.status_code == httpx.codes.OK


def test_the_same_bits_with_and_without(make_world: Callable[..., World]) -> None:
    """Everything that can go is removed after every update."""
    found = []
    for often in (False, True):
        world = make_world()
        keeping(world, keep_events=1, keep_days=1e-6)
        devices, job = world.fleet("strong", "moderate"), world.job(num_rounds=3, serve={"rule": "momentum"})
        for _ in range(3):
            for device, offer in world.offers(devices).items():
                world.send(device, offer)
                if often:
                    prune(world)
                    world.restart()
            world.settle()
        assert world.state(job)["version"] == 3
        found.append(world.files.version(job, 3).read_bytes())
    assert found[0] == found[1]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_would_go_and_then_removes_it(world: World) -> None:
    keeping(world, keep_versions=9)
    job, device = world.job(num_rounds=9), world.device()
    for _ in range(4):
        world.round([device])
    given = ["admin", "prune", "--data", world.root, "--database", database_url(world.root), "--keep-events", 3]
    told = run(*given, "--dry-run", "--json").json
    assert told["removed"] is False and told["jobs"][0]["versions"] == [0, 1, 2]
    assert versions(world, job) == [0, 1, 2, 3, 4]
    count = "SELECT count(*) FROM events WHERE kind NOT IN ('JobCreated', 'JobState', 'Evaluated')"
    before = query(world.root, count)[0][0]
    answer = run(*given)
    assert answer.code == 0 and "removed" in answer.out and str(told["jobs"][0]["events"]) in answer.out
    assert versions(world, job) == [3, 4]
    assert query(world.root, count)[0][0] == before - told["jobs"][0]["events"] > 0
    world.round([device])
    assert world.state(job)["version"] == 5


def test_a_directory_that_is_none_is_refused_and_left_alone(tmp_path: Path) -> None:
    answer = run("admin", "prune", "--data", tmp_path)
    assert answer.code == 2 and "coordinator.db" in answer.error
    assert list(tmp_path.iterdir()) == []


@about_postgresql
def test_of_two_processes_that_begin_to_prune_at_once_one_does(world: World) -> None:
    """The second finds no row either, and adds one while the transaction of the first goes on."""
    first, second = world.coordinator.repository, Repository(open_database(database_url(world.root)))
    adds, answers = threading.Event(), []

    def look(*statement: Any) -> None:
        if statement[2].startswith("INSERT"):
            adds.set()

    def ask() -> None:
        with second.begin() as session:
            answers.append(second.is_due(session, "anything", world.now, retention.EVERY))

    event.listen(second.engine, "before_cursor_execute", look)
    asks = threading.Thread(target=ask)
    with first.begin() as session:
        assert first.is_due(session, "anything", world.now, retention.EVERY)
        asks.start()
        assert adds.wait(PATIENCE)
    asks.join(PATIENCE)
    second.close()
    assert answers == [False]
