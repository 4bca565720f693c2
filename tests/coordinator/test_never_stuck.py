"""No round is closing for ever: neither by what devices do, nor by a defect, nor as an earlier program left it."""

from __future__ import annotations

import errno
import json

import pytest
from sqlalchemy import text

from coordinator.coordinator import REMIND
from coordinator.jobs import FinishRound
from coordinator.standings import FIRST_BENCH
from coordinator.store.versions import Versions
from federation.rounds import MOST_TRIES
from tests.coordinator.harness import World
from tests.waiting import wait_until

RULE = {"min_available": 4, "quorum": 2, "deadline": 12.0}


def test_devices_that_come_back_in_another_order_do_not_stop_the_round(world: World) -> None:
    """Two of four let their leases run out; the one with the higher seat comes back first, and gets the lower one."""
    job = world.job(num_rounds=2, participate=RULE, bounds={"lease": 3.0})
    offers = world.offers(world.fleet(*["strong"] * 4))
    by_seat = sorted(offers, key=lambda device: int(offers[device].id.split("-")[2]))
    for device in by_seat[2:]:
        world.send(device, offers[device])
    world.later(3)
    assert world.poll(by_seat[1]) is not None
    world.later(9)
    found = world.state(job)
    assert (found["version"], found["round"]["number"]) == (1, 1)
    world.restart()
    world.later(FIRST_BENCH)  # of the one that let two leases run out: four have to be fit
    world.round(by_seat)
    assert world.state(job)["state"] == "done"


def test_a_round_that_an_earlier_program_left_with_a_device_in_two_seats_is_closed(world: World) -> None:
    job = world.job(num_rounds=2, participate=RULE, bounds={"lease": 3.0})
    devices = world.fleet(*["strong"] * 4)
    offers = world.offers(devices)
    for device in devices[:2]:
        world.send(device, offers[device])
    world.later(3)
    with world.sessions.begin() as session:
        rows = session.execute(text("SELECT number, body FROM seats")).all()
        seats = {number: body if isinstance(body, dict) else json.loads(body) for number, body in rows}
        for number, seat in seats.items():
            if seat["state"] == "expired":
                seat["member"]["device"] = devices[0]
                session.execute(
                    text("UPDATE seats SET body = :body WHERE number = :number"),
                    {"body": json.dumps(seat), "number": number},
                )
    world.restart()
    world.later(12)
    assert world.state(job)["version"] == 1


def fail(*_: object) -> None:
    raise RuntimeError("a defect")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_round_that_a_defect_keeps_open_is_given_up_with_its_reason(
    world: World, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    other = world.job(num_rounds=1, participate={"min_available": 3})
    job = world.job()
    monkeypatch.setattr(Versions, "write_next", fail)
    before = world.weights(job)
    world.round([world.device()])
    for tries in range(2, MOST_TRIES + 1):
        assert world.state(job)["state"] == "running"
        if restarts:  # which tries again at once
            world.restart()
            world.settle()
        else:
            world.later(60)
        assert world.kinds(job).count("CloseFailed") == tries
    found = world.state(job)
    assert found["state"] == "failed" and found["round"]["state"] == "abandoned"
    assert found["message"] == "round 0 could not be closed: RuntimeError: a defect"
    assert world.kinds(job)[-3:] == ["CloseFailed", "RoundAbandoned", "JobState"]
    assert world.weights(job).tobytes() == before.tobytes() and world.spool() == []
    monkeypatch.undo()
    world.later(60)
    world.restart()
    assert world.state(other)["state"] == "running" and world.state(job)["state"] == "failed"


def test_a_full_disk_is_waited_for_however_long_it_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = world.job(num_rounds=1)
    monkeypatch.setattr(Versions, "write_next", full)
    world.round([world.device()])
    for _ in range(2 * MOST_TRIES):
        world.later(60)
    assert world.state(job)["round"]["state"] == "closing"
    monkeypatch.undo()
    world.later(60)
    assert world.state(job)["state"] == "done"


def test_a_round_whose_worker_was_not_told_closes_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job, device = world.job(num_rounds=1), world.device()
    put = world.coordinator._folding.put
    monkeypatch.setattr(
        world.coordinator._folding, "put", lambda item: None if isinstance(item, FinishRound) else put(item)
    )
    world.round([device])
    assert world.state(job)["round"]["state"] == "closing"
    wait_until(lambda: (world.later(REMIND), world.state(job)["version"] == 1)[1])
