"""Updates that are checked after they were acknowledged: until then they do not count, and the round waits for them."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.arrivals import Uploaded
from coordinator.errors import NotChecked, NotFound, Refused, StoreAway
from coordinator.store.bodies import Bodies
from coordinator.store.schema import UpdateRecord
from federation.cohort import CHECK
from federation.messages import TaskOffer
from federation.wire import WireError
from tests.coordinator.harness import ALL_THREE, World, body_of, only, scripted


def put(world: World, task: str, body: bytes, name: str = "own") -> None:
    """Place a body where the storage would have it."""
    path = world.coordinator._bodies.arriving(task)
    path.write_bytes(body)
    world.coordinator._bodies.commit_all([(path, task, name)])


def complete(world: World, device: str, offer: TaskOffer, body: bytes, **other: Any) -> bool:
    said = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body), "report": {"samples": 1}, **other}
    counts: bool = only(world.coordinator.complete_all([Uploaded(device, offer.id, "own", **said)]))
    return counts


def test_it_counts_as_if_it_had_been_sent(tmp_path: Path) -> None:
    found = []
    for way in ("sent", "uploaded"):
        world = World(tmp_path / way)
        devices, job = world.fleet("strong", "moderate", "weak"), world.job(num_rounds=2, **ALL_THREE)
        for _ in range(2):
            for device, offer in world.offers(devices).items():
                if way == "sent":
                    world.send(device, offer)
                else:
                    body = body_of(world.manifest, offer)
                    put(world, offer.id, body)
                    assert complete(world, device, offer, body) is False
                    world.settle()
                    assert complete(world, device, offer, body) is True, "it is told again, whatever it says"
            world.settle()
        assert world.state(job)["version"] == 2 and world.spool() == []
        found.append(world.weights(job).tobytes())
        assert [row["done"] for row in world.coordinator.overview.fleet()["devices"]] == [2, 2, 2]
        world.end()
    assert found[0] == found[1]


@pytest.mark.parametrize("what", ["not finite", "another shape", "another digest", "cut off", "no header"])
def test_an_unsound_one_is_refused_and_its_device_hears_why(world: World, what: str) -> None:
    job = world.job(num_rounds=1)
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    vector = scripted(world.manifest, offer)
    body = body_of(world.manifest, offer)
    if what == "not finite":
        body = body_of(world.manifest, offer, np.where(np.arange(vector.size) == 3, np.nan, vector).astype(np.float32))
    elif what == "another shape":
        body = body.replace(b"[2,3]", b"[3,2]")
        assert body != body_of(world.manifest, offer)
    elif what == "cut off":
        body = body[:-4]
    elif what == "no header":
        body = b"\xff" * len(body)
    put(world, offer.id, body)
    other = {"sha256": "0" * 64} if what == "another digest" else {}
    assert complete(world, device, offer, body, **other) is False
    world.settle()
    for _ in range(2):
        with pytest.raises(WireError):
            complete(world, device, offer, body, **other)
    assert world.state(job)["version"] == 0 and world.spool() == []
    assert world.state(job)["round"]["body"]["slots"][0]["state"] == "failed"
    told = [event["body"] for event in world.coordinator.events(job, 0)[0] if event["kind"] == "TaskFailed"]
    assert len(told) == 1 and (told[0]["task"], told[0]["reason"]) == (offer.id, "refused")
    assert world.coordinator.device(device)["tasks_failed"] == 1
    world.later(3600)
    again = world.poll(device)
    assert again is not None and again.id != offer.id
    world.send(device, again)
    world.settle()
    assert world.state(job)["version"] == 1


def test_what_is_no_update_at_all_is_refused_at_once(world: World) -> None:
    world.job(num_rounds=1)
    device, other = world.fleet("strong", "strong")
    offer = world.offers([device, other])[device]
    body = body_of(world.manifest, offer)
    with pytest.raises(WireError, match="the most that it can have"):
        complete(world, device, offer, body, bytes=1 << 40)
    with pytest.raises(Exception, match=r"report\.samples"):
        complete(world, device, offer, body, report={"samples": 0})
    with pytest.raises(NotFound):
        complete(world, other, offer, body)
    world.later(1e6)
    with pytest.raises(Refused, match="expired"):
        complete(world, device, offer, body)


def test_a_round_waits_for_what_is_not_checked_and_a_restart_checks_it(world: World) -> None:
    """The process ends before the verdict: the next one comes to it."""
    rule = {"min_available": 2, "quorum": 1}
    devices, job = world.fleet("strong", "strong"), world.job(num_rounds=1, participate=rule)
    (one, first), (other, second) = world.offers(devices).items()
    body = body_of(world.manifest, first)
    put(world, first.id, body)
    world.coordinator._folding.put = lambda item: None  # type: ignore[method-assign]
    complete(world, one, first, body)
    assert sorted(row["state"] for row in world.state(job)["round"]["body"]["slots"]) == ["leased", "uploaded"]
    assert "1 update being checked" in world.state(job)["waiting"]["text"]
    with pytest.raises(NotChecked, match="being checked"):  # a device that sends it here asks again
        world.send(one, first)
    world.restart()
    world.settle()
    with pytest.raises(Refused, match="already"):
        world.send(one, first)
    world.send(other, second)
    world.settle()
    assert world.state(job)["version"] == 1 and complete(world, one, first, body) is True


def test_surplus_that_is_not_checked_in_time_goes(world: World) -> None:
    """More devices than wanted: the round closes with what has arrived."""
    job = world.job(num_rounds=2, participate={"count": 1, "over_select": 1.0, "min_available": 2})
    (quick, first), (slow, second) = world.offers(world.fleet("strong", "strong")).items()
    body = body_of(world.manifest, second)
    put(world, second.id, body)
    with world.coordinator._units.lock:  # the worker waits for it
        complete(world, slow, second, body)
        world.send(quick, first)
    world.settle()
    assert world.state(job)["version"] == 1 and world.spool() == []
    with world.coordinator.repository.reading() as session:
        assert world.coordinator.repository.unchecked_updates(session) == []
    assert not any(event["kind"] == "TaskFailed" for event in world.coordinator.events(job, 0)[0])


def unreadable(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """Let the storage answer every reading of an upload with an error."""

    def take(bodies: Bodies, update: UpdateRecord) -> Path:
        raise error

    monkeypatch.setattr(Bodies, "take_upload", take)


def unchecked(world: World) -> list[str]:
    with world.coordinator.repository.reading() as session:
        return [update.task for update in world.coordinator.repository.unchecked_updates(session)]


@pytest.mark.parametrize("why", ["deadline", "late", "restart"])
def test_one_that_cannot_be_read_does_not_block_its_round(
    world: World, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"min_available": 2, "quorum": 1, **({} if why == "late" else {"deadline": 60.0})}
    devices, job = world.fleet("strong", "strong"), world.job(num_rounds=2, participate=rule)
    (one, first), (other, second) = world.offers(devices).items()
    unreadable(monkeypatch, StoreAway("the storage is away"))
    body = body_of(world.manifest, first)
    put(world, first.id, body)
    complete(world, one, first, body)
    world.send(other, second)
    world.later(CHECK - 1)
    assert world.state(job)["version"] == 0 and unchecked(world) == [first.id]
    if why == "restart":
        world.restart()
        world.later(CHECK)  # the time in which no process may have run is not counted
    world.later(2)
    world.later(2)
    assert world.state(job)["version"] == 1
    assert unchecked(world) == [] and world.spool() == []
    with pytest.raises(Refused):
        complete(world, one, first, body)
    assert world.coordinator.device(one)["tasks_failed"] == 0, "it was not to blame"


def test_one_that_is_lost_frees_its_seat_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.job(num_rounds=1)
    device = world.device()
    offer = world.poll(device)
    body = body_of(world.manifest, offer)
    unreadable(monkeypatch, FileNotFoundError("no such object"))
    complete(world, device, offer, body)
    world.settle()
    assert world.state(job)["round"]["body"]["slots"][0]["state"] == "failed" and unchecked(world) == []
    assert world.coordinator.device(device)["tasks_failed"] == 0, "it was not to blame"
    with pytest.raises(Refused, match="expired"):
        complete(world, device, offer, body)
    again = world.poll(device)
    assert again is not None
    world.send(device, again)
    world.settle()
    assert world.state(job)["version"] == 1


def test_a_sound_one_that_a_process_did_not_know_of_is_looked_at_again(world: World) -> None:
    """What it knew of the round was older than the update that it found in the database."""
    job = world.job(num_rounds=1)
    device = world.device()
    offer = world.poll(device)
    body = body_of(world.manifest, offer)
    put(world, offer.id, body)
    arrivals = world.coordinator._folding._checks._arrivals
    examine = arrivals.examine
    arrivals.examine = lambda update: NotFound(f"there is no task {update.task!r}")  # type: ignore[method-assign]
    complete(world, device, offer, body)
    world.settle()
    assert unchecked(world) == [offer.id]
    arrivals.examine = examine  # type: ignore[method-assign]
    world.later(10)
    assert world.state(job)["version"] == 1 and complete(world, device, offer, body) is True


def test_a_job_that_is_stopped_is_not_looked_at_any_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.job(num_rounds=1)
    device = world.device()
    offer = world.poll(device)
    unreadable(monkeypatch, StoreAway("the storage is away"))
    body = body_of(world.manifest, offer)
    put(world, offer.id, body)
    complete(world, device, offer, body)
    world.settle()
    folding = world.coordinator._folding
    assert folding._rechecks
    world.coordinator.set_state(job, "stopped")
    world.later(10)
    world.later(10)
    assert not folding._rechecks and unchecked(world) == [] and world.spool() == []


def test_without_a_worker_the_log_says_what_is_missing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.job(num_rounds=1)
    device = world.device()
    offer = world.poll(device)
    folding = world.coordinator._folding
    folding._folds = False  # as with --workers 0
    body = body_of(world.manifest, offer)
    put(world, offer.id, body)
    with caplog.at_level(logging.WARNING):
        complete(world, device, offer, body)
        world.later(29)
        assert not caplog.records
        for _ in range(2):
            world.later(2)
        assert [record.message for record in caplog.records if "embrace worker" in record.message] != []
        told = len(caplog.records)
        world.later(2)
        assert len(caplog.records) == told == 2, "not with every look"
        world.later(30)
        assert len(caplog.records) == 4
