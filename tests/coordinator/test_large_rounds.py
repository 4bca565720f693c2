"""A fleet that gathers for a round is counted; profiles are read of the devices that come, and once for the draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.coordinator.harness import World

DEVICES = 24


@pytest.fixture
def read(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many profiles each query read."""
    repository, counts = world.coordinator.repository, []
    profiles: Callable[..., Any] = repository.profiles

    def counted(session: Any, devices: Any) -> Any:
        counts.append(len(devices))
        return profiles(session, devices)

    monkeypatch.setattr(repository, "profiles", counted)
    return counts


def test_a_fleet_that_gathers_is_not_read_again_for_every_device(world: World, read: list[int]) -> None:
    job = world.job(participate={"count": DEVICES})
    devices = world.fleet(*["strong"] * DEVICES)
    world.now += 40.0  # none of them was heard of lately
    for number, device in enumerate(devices[:-1]):
        for other in devices[number + 1 :]:
            world.coordinator.presence.left(other)
        assert world.poll(device) is None
    assert world.state(job)["round"]["state"] == "selecting" and sum(read) == DEVICES - 1
    assert world.poll(devices[-1]) is not None
    assert sum(read) == 2 * DEVICES, "the last one to come, and the draw"


def test_devices_that_do_not_fit_are_not_counted(world: World) -> None:
    job = world.job(participate={"count": 2})
    small, first, second = world.device(None, memory=1), world.device(), world.device()
    for device in (first, second):
        world.coordinator.presence.left(device)
    assert world.poll(small) is None
    assert list(world.state(job)["unfit"]) == [small]
    assert world.poll(first) is None, "of two devices that are there one is unfit"
    assert world.coordinator.waiting(first).endswith("needs 1 more device")
    assert world.poll(second) is not None
