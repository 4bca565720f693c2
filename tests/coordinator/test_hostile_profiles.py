"""What a device says about itself is checked when it arrives; what was stored before hurts that device alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import text

from federation.job import plan_from
from tests.coordinator.harness import Site, World

HOSTILE: list[dict[str, Any]] = [
    *({"memory": value} for value in (2**62, 2**50 + 1, 2**4000, 0, -1, 1.5, "64MB", [], 1e300)),
    *({"threads": value} for value in (0, 4097, 2**62, None, "many")),
    *({"engines": value} for value in ([], ["portable"] * 9, ["x" * 201], ["\x1b[2J"], [None], "portable", [["a"]])),
    *({name: value} for name in ("tier", "boundary", "runtime") for value in ("x" * 201, "\x00", "a\nb", "\ud800", 7)),
    {"unknown": 1},
]


@pytest.mark.parametrize("profile", HOSTILE, ids=lambda profile: str(profile)[:40])
def test_a_profile_out_of_bounds_is_refused_when_it_arrives(site: Site, profile: dict[str, Any]) -> None:
    body = {"headers": {"Content-Type": "application/json"}, "content": json.dumps(profile)}
    with site.http(site.enrol()[1]) as device:
        assert device.put("/v1/devices/me/profile", **body).status_code in (400, 422)
    token = site.server.registry.invite(1, 60)
    with site.http(token) as newcomer:
        enrolment = {**body, "content": json.dumps({"name": "x", "profile": profile})}
        assert newcomer.post("/v1/devices", **enrolment).status_code in (400, 422)
        assert newcomer.post("/v1/devices", json={"name": "x"}).status_code == 201  # the token is not spent


STORED = [{"memory": 2**62}, {"memory": "much"}, {"engines": []}, {"colour": "red"}, [], {"tier": "x" * 300}]


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_stored_profile_that_cannot_be_read_hurts_its_device_alone(world: World, stored: Any) -> None:
    job = world.job(num_rounds=4)
    bad, good = world.fleet("strong", "strong")
    with world.sessions.begin() as session:
        values = {"told": json.dumps(stored), "device": bad}
        session.execute(text("UPDATE devices SET profile = :told WHERE id = :device"), values)
    for _ in range(2):
        for number in range(2):
            assert world.poll(bad) is None
            offer = world.poll(good)
            assert offer is not None
            assert "profile" in world.coordinator.unfit(bad) and world.coordinator.unfit(good) == ""
            if number:
                world.send(good, offer)
                world.settle()
        world.restart()
    assert world.state(job)["version"] == 2
    assert {row["id"] for row in world.coordinator.devices()} == {bad, good}


def test_a_job_that_cannot_be_read_stops_no_other(world: World) -> None:
    broken, whole = world.job(num_rounds=1), world.job(num_rounds=1)
    device = world.device()
    assert world.poll(device) is not None
    world.end()
    with world.sessions.begin() as session:
        session.execute(text("UPDATE seats SET body = '{}' WHERE job = :job"), {"job": broken})
    world.coordinator.repository.close()
    world.begin()
    assert world.state(broken)["state"] == "failed" and "this is no round" in world.state(broken)["message"]
    world.round([device])
    assert world.state(whole)["state"] == "done"


def test_a_defect_in_one_job_leaves_devices_to_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = world.job(num_rounds=1), world.job(num_rounds=1)
    engine = world.coordinator._jobs[broken].engine
    monkeypatch.setattr(engine, "assign", lambda *_: 1 // 0)
    device = world.device()
    world.round([device])
    assert world.state(whole)["state"] == "done" and world.state(broken)["version"] == 0
    monkeypatch.undo()
    monkeypatch.setattr(engine, "task", lambda *_, **__: 1 // 0)
    other = world.job(num_rounds=1)
    world.round([device])
    assert world.state(other)["state"] == "done"


def test_over_the_network_one_device_stops_no_other(site: Site) -> None:
    """As an attacker does it: a device with a huge memory, then every other asks for a task."""
    service = site.server.coordinator
    job = service.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    with site.http(site.enrol()[1]) as attacker, site.http(site.enrol()[1]) as honest:
        refused = attacker.put("/v1/devices/me/profile", json={"memory": 2**62})
        assert refused.status_code == 422 and "memory" in refused.json()["detail"]
        attacker.post("/v1/tasks/next?wait=0")
        assert honest.post("/v1/tasks/next?wait=0").status_code == 200
    service.set_state(job, "stopped")
