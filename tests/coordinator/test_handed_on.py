"""Bodies that the next cohort goes on from: there for as long as somebody may ask for them, and no longer."""

from __future__ import annotations

import hashlib

import pytest

from coordinator.errors import Refused
from tests.coordinator.harness import World, body_of

WINDOW = 10  # rounds, of partial averaging in one part


def almost(world: World) -> tuple[str, list[str]]:
    """A job in the last round of its first window, and its devices."""
    job = world.job(num_rounds=100, participate={"count": 2, "min_available": 3}, sync={"rule": "rotating", "parts": 1})
    devices = world.fleet("strong", "strong", "strong")
    for _ in range(WINDOW - 1):
        world.round(devices)
        assert world.spool() == []
    return job, devices


def begun(world: World) -> tuple[str, list[str]]:
    """A job in the first round of its second window, and its devices."""
    job, devices = almost(world)
    world.round(devices)
    assert world.state(job)["version"] == WINDOW and len(world.spool()) == 2
    return job, devices


def test_they_survive_a_restart_and_go_with_the_round(world: World) -> None:
    job, devices = begun(world)
    handed_on = world.spool()
    world.restart()
    assert world.spool() == handed_on
    world.round(devices)
    assert world.state(job)["version"] == WINDOW + 1 and world.spool() == []


def test_they_go_with_a_job_that_is_stopped(world: World) -> None:
    job, devices = begun(world)
    offers = world.offers(devices)
    device = next(iter(offers))
    world.send(device, offers[device])
    assert len(world.spool()) == 3
    world.coordinator.set_state(job, "stopped")
    world.settle()
    assert world.spool() == []


def test_one_that_was_sent_twice_stays(world: World) -> None:
    """The second is whole only when the round is over. It does not count, but it has the name of the first."""
    _, devices = almost(world)
    offers = world.offers(devices)
    device, offer = next(iter(offers.items()))
    body = body_of(world.manifest, offer)
    twice = world.coordinator.receive(device, offer.id)
    twice.path.write_bytes(body)
    twice.decoder.feed(body)
    for other, theirs in offers.items():
        world.send(other, theirs)
    world.settle()
    handed_on = world.spool()
    sha256 = hashlib.sha256(body).hexdigest()
    with pytest.raises(Refused, match="round 9 is over"):
        world.accept(device, twice, twice.decoder.finish(), sha256, {"samples": 1})
    assert any(name.startswith(f"{offer.id}.") and name.endswith(".body") for name in handed_on)
    assert world.spool() == [name for name in handed_on if not name.endswith(".part")]
