"""A real server with room for few long polls, and devices over sockets: they are told to come back, do so, and rounds
complete; also if the server is killed while most of them are away."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_runtime.client import Declined, DeviceClient
from edge_runtime.connection import Unreachable
from federation.messages import Report
from tests.live_server import LiveServer, live_server, zero_update
from tests.waiting import PATIENCE, wait_until

DEVICES = 10
LONG_POLLS = 2
SEATS = 2
ROUNDS = 8
# Rounds without training are over in a moment: devices come back as fast as they may.
REPORT = Report("done", "first", "portable", "fast", 0, 1, 1, 10, 1.0, 1.0)
SETTINGS = {"long_polls": LONG_POLLS, "check_ins_per_second": 2, "longest_away": 10}


@dataclass
class Scripted:
    """A device that sends zeros, and heeds what it is told."""

    client: DeviceClient
    over: Callable[[], bool]
    sent_away: list[float] = field(default_factory=list)
    done: int = 0
    away: bool = False
    errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            while not self.over():
                self._ask()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.client.close()

    def _ask(self) -> None:
        try:
            offer = self.client.next_task(2.0)
            if offer is not None:
                time.sleep(0.3)  # it trains; the others check in meanwhile
                self.client.send_update(offer.id, lambda: [zero_update()], REPORT)
                self.done += 1
        except (Declined, Unreachable):  # the round is over without it
            return
        if offer is None and self.client.come_back is not None:
            self.sent_away.append(self.client.come_back)
            self.away = True
            until = time.monotonic() + self.client.come_back
            while time.monotonic() < until and not self.over():
                time.sleep(0.1)
            self.away = False


def test_a_fleet_is_steered_and_rounds_complete_over_a_kill(tmp_path: Path) -> None:
    over = threading.Event()
    with live_server(tmp_path, **SETTINGS) as server:
        port = str(server.address[1])
        fleet = [Scripted(_client(server, f"device {number}"), over.is_set) for number in range(DEVICES)]
        job = server.create_job(tmp_path / "bundle", num_rounds=ROUNDS, participate={"count": SEATS})
        threads = [threading.Thread(target=device.run, daemon=True) for device in fleet]
        try:
            for thread in threads:
                thread.start()
            wait_until(lambda: _version(server, job) >= 2 and sum(device.away for device in fleet) > DEVICES // 2)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            with live_server(tmp_path, "--port", port, **SETTINGS) as again:
                wait_until(lambda: _version(again, job) == ROUNDS)
                steered = [device for device in fleet if device.sent_away]
                assert len(steered) > DEVICES // 2 and all(told >= 5.0 for device in fleet for told in device.sent_away)
                admin = again.client(again.admin)
                states = {row["state"] for row in admin.get("/v1/devices").json()}
                assert "gone" not in states, "those that are away are there"
                over.set()
        finally:
            over.set()
            for thread in threads:
                thread.join(PATIENCE)
    assert [device.errors for device in fleet] == [[]] * DEVICES


def _client(server: LiveServer, name: str) -> DeviceClient:
    token = server.enrol(name).headers["Authorization"].removeprefix("Bearer ")
    return DeviceClient(server.url, token, patience=300.0, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))


def _version(server: LiveServer, job: str) -> int:
    return int(server.client(server.admin).get(f"/v1/jobs/{job}").json()["version"])


@pytest.mark.parametrize("wait", [0, 30])
def test_the_answer_says_when_and_why_and_ends_the_connection(wait: int, tmp_path: Path) -> None:
    with live_server(tmp_path, **SETTINGS) as server:
        devices = [server.enrol(f"device {number}") for number in range(5)]
        for device in devices[:LONG_POLLS]:
            assert "Retry-After" not in device.post("/v1/tasks/next", params={"wait": 0}).headers
        for device in devices[LONG_POLLS:]:
            answer = device.post("/v1/tasks/next", params={"wait": wait})
            assert answer.status_code == 204 and 5 <= int(answer.headers["Retry-After"]) <= 15
            assert answer.headers["Connection"] == "close"
            assert answer.headers["Embrace-Waiting"] == "there is no job%3B enough devices wait for the next round"
