"""Time: deadlines, quorums, and pauses and outages that are held against nobody."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import Refused
from tests.coordinator.harness import World, mean_oracle, scripted


def test_a_deadline_with_a_quorum_closes_without_the_straggler(world: World) -> None:
    job = world.job(participate={"min_available": 3, "quorum": 2, "deadline": 60})
    devices = world.fleet("strong", "strong", "strong")
    before = world.weights(job)
    offers = world.offers(devices)
    sent = list(offers.items())[:2]
    for device, offer in sent:
        world.send(device, offer)
    world.later(59)
    assert world.state(job)["version"] == 0
    world.later(1)
    assert world.state(job)["version"] == 1
    mean, _ = mean_oracle(world.manifest, [(0, 1, scripted(world.manifest, offer)) for _, offer in sent])
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)


@pytest.mark.parametrize("what", ["poll", "fail", "revoke", "late update"])
def test_a_round_that_is_due_closes_whoever_looks_at_the_clock_first(world: World, what: str) -> None:
    """Not only a tick lets time pass."""
    job = world.job(participate={"min_available": 3, "quorum": 1, "deadline": 60}, bounds={"lease": 50})
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.now += 60
    if what == "poll":
        assert world.poll(devices[1]) is None
    elif what == "fail":
        world.coordinator.fail_task(devices[1], offers[devices[1]].id, "failed", "")
    elif what == "revoke":
        world.coordinator.revoke(devices[1])
    else:
        with pytest.raises(Refused):
            world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(job)["version"] == 1 and world.spool() == []


def test_without_a_quorum_the_round_waits_visibly(world: World) -> None:
    job = world.job(participate={"min_available": 2, "quorum": 1.0, "deadline": 60}, bounds={"lease": 3600})
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.later(1000)
    assert world.state(job)["state"] == "running" and world.state(job)["version"] == 0
    assert "WaitForUpdates" in world.kinds(job)
    world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(job)["version"] == 1


def test_without_a_quorum_the_job_fails_visibly(world: World) -> None:
    job = world.job(participate={"min_available": 2, "quorum": 1.0, "deadline": 60, "on_missing_quorum": "fail"})
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    before = world.weights(job)
    world.later(60)
    found = world.state(job)
    assert found["state"] == "failed" and found["message"] == "1 of 2 at the deadline" and found["version"] == 0
    assert world.kinds(job)[-2:] == ["RoundAbandoned", "JobState"]
    assert world.weights(job).tobytes() == before.tobytes() and world.spool() == []
    assert world.poll(devices[1]) is None
    with pytest.raises(Refused, match="failed"):
        world.coordinator.set_state(job, "running")


def test_a_pause_is_held_against_nobody(world: World) -> None:
    job = world.job(
        participate={"min_available": 2, "quorum": 1.0, "deadline": 60, "on_missing_quorum": "fail"},
        bounds={"lease": 50},
    )
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.now += 10
    world.coordinator.set_state(job, "paused")
    world.later(1000)
    world.send(devices[0], offers[devices[0]])  # what is under way still counts
    world.restart()
    world.later(1000)
    assert world.state(job)["state"] == "paused" and world.poll(devices[1]) is None
    world.coordinator.set_state(job, "running")
    world.later(39)  # 49 of the lease's 50 seconds have passed
    again = world.poll(devices[1])
    assert again is not None and again.id == offers[devices[1]].id
    world.send(devices[1], again)
    world.settle()
    assert world.state(job)["version"] == 1


def test_an_outage_is_held_against_nobody(world: World) -> None:
    job = world.job(
        participate={"min_available": 2, "quorum": 1.0, "deadline": 60, "on_missing_quorum": "fail"},
        bounds={"lease": 50},
    )
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.end()
    world.now += 10_000
    world.begin()
    world.later(49)
    world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(job)["version"] == 1
