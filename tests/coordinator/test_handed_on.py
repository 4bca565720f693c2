"""Bodies that the next cohort goes on from: there for as long as somebody may ask for them, and no longer."""

from __future__ import annotations

from tests.coordinator.harness import World

WINDOW = 10  # rounds, of partial averaging in one part


def begun(world: World) -> tuple[str, list[str]]:
    """A job in the first round of its second window, and its devices."""
    job = world.job(
        num_rounds=100, participate={"count": 2, "min_available": 3}, sync={"rule": "rotating", "parts": 1}
    )
    devices = world.fleet("strong", "strong", "strong")
    for number in range(WINDOW):
        assert world.spool() == [], number
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
