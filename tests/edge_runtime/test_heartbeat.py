"""Heartbeats of an agent at work: a long task is kept, and one that is of no use any more ends."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from edge_runtime.agent import Agent, Device
from edge_runtime.client import DeviceClient
from edge_runtime.heartbeat import Heartbeat
from tests.coordinator.harness import Site
from tests.edge_runtime.test_client import OFFER, little, reply
from tests.waiting import wait_until


class Beating(DeviceClient):
    """Counts its heartbeats."""

    beats = 0

    def heartbeat(self, task: str) -> float | None:
        try:
            return super().heartbeat(task)
        finally:
            self.beats += 1


def test_a_task_that_takes_longer_than_its_lease_is_kept_by_heartbeats(
    site: Site, make_job, connect, data: Path, tmp_path: Path
) -> None:
    lease = 6.0
    job = make_job(num_rounds=1, bounds={"lease": lease})
    client = connect(Beating, site.enrol()[1])
    began = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        wait_until(lambda: client.beats >= 4)

    agent = Agent(client, Device(str(data), tmp_path / "work", tier="weak"), progress=progress)
    assert agent.run(most_tasks=1, wait=5.0) == 1
    assert time.monotonic() - began > lease
    site.settle()
    assert site.server.coordinator.job(job)["state"] == "done"


def test_work_that_is_of_no_use_any_more_ends_between_two_steps(
    site: Site, make_job, connect, data: Path, tmp_path: Path
) -> None:
    local = {"steps": 1_000_000, "batch": 16, "rate": "0.1"}
    job = make_job(num_rounds=1, local=local, bounds={"lease": 2.0})
    client = connect(Beating, site.enrol()[1])
    steps: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "train":
            steps.append(done)
            if done == 1:
                site.server.coordinator.set_state(job, "stopped")
            if done >= 1:
                wait_until(lambda: client.beats >= 1)

    agent = Agent(client, Device(str(data), tmp_path / "work", tier="weak"), progress=progress)
    offer = client.next_task(5.0)
    assert offer is not None and agent.answer(offer) is False
    assert 1 in steps and len(steps) < 1000
    agent.progress = lambda what, done, total: None
    second = make_job(num_rounds=1)
    assert agent.run(most_tasks=1, wait=5.0) == 1
    site.settle()
    assert site.server.coordinator.job(second)["state"] == "done"


@pytest.mark.parametrize("told", [None, "soon", "-1", "nan", "1e300"])
def test_a_coordinator_without_heartbeats_gets_none(told: str | None, tmp_path: Path) -> None:
    headers = {} if told is None else {"Embrace_Lease": told}

    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        reply(request, 200, json.dumps(OFFER).encode(), **headers)

    with little(answer) as server, DeviceClient(server.url, "t") as client:
        assert client.next_task() is not None and client.lease is None
        with Heartbeat(client, "task", client.lease) as heartbeat:
            heartbeat.check()
    assert [path for _, path, _, _ in server.seen] == ["/v1/tasks/next?wait=30.0&storage=1"]


def test_a_device_that_is_benched_says_so_once(
    site: Site, make_job, connect, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(num_rounds=1)
    client = connect(DeviceClient, site.enrol()[1])
    agent = Agent(client, Device(str(data), tmp_path / "work", tier="weak"))
    offer = client.next_task(5.0)
    assert offer is not None
    client.fail(offer.id, "data", "no such file")
    seen: set[str] = set()  # until the seconds that are left have gone down
    agent.run(wait=0.1, until=lambda: seen.add(client.unfit) or len(seen - {""}) > 2)  # type: ignore[func-returns-value]
    told = [line for line in caplog.messages if "benched for" in line]
    assert len(told) == 1 and told[0].startswith(f"no job can use this device: job {job}: benched for 10 s: data: ")
