"""Names: a second device with a name gets a number, and commands take names as well as ids, and say what they did."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import pytest

from tests.embrace.cli.conftest import Embrace
from tests.embrace.cli.test_watch import Screen
from tests.live_server import LiveServer, live_server, next_task, send_update
from tests.stock_python import ROOT
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def admin(embrace: Embrace, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Embrace:
    monkeypatch.setenv("EMBRACE_SERVER", server.url)
    monkeypatch.setenv("EMBRACE_ADMIN_TOKEN", server.admin)
    return embrace


def enrol(server: LiveServer, name: str) -> dict[str, Any]:
    answer = server.client(server.enrolment).post("/v1/devices", json={"name": name})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_a_name_that_is_taken_gets_a_number_until_its_device_is_revoked(server: LiveServer, admin: Embrace) -> None:
    found = [enrol(server, name)["name"] for name in ("kitchen", "kitchen", "kitchen", "kitchen-2", "kit")]
    assert found == ["kitchen", "kitchen-2", "kitchen-3", "kitchen-2-2", "kit"]
    answer = admin("device", "revoke", "kitchen-2")
    assert answer.code == 0 and answer.out.startswith("kitchen-2 ") and "is revoked: its token is void" in answer.out
    assert enrol(server, "kitchen")["name"] == "kitchen-2"
    assert "nothing changed" not in admin("device", "revoke", "kitchen-2").out  # the name is the newer device's
    own = httpx.put(
        f"{server.url}/v1/devices/me/profile",
        json={},
        headers={"Authorization": f"Bearer {enrol(server, 'kit')['token']}"},
    )
    assert own.json()["name"] == "kit-2"


def test_commands_take_a_name_an_id_or_its_beginning(server: LiveServer, admin: Embrace, tmp_path: Path) -> None:
    first = server.create_job(tmp_path / "bundle", name="digits")
    second = server.create_job(tmp_path / "bundle", name="letters")
    for text in (first, "digits", first[:10]):
        assert admin("job", "show", text, "--json").json["id"] == first
    third = server.create_job(tmp_path / "bundle", name="digits")
    answer = admin("job", "pause", "digits")
    assert answer.code == 2 and answer.error.startswith("'digits' may be one of several jobs; give an id: ")
    assert sorted(answer.error.partition("give an id: ")[2].split("), ")) == sorted(
        [f"{first} (digits, running", f"{third} (digits, running)"]
    )
    assert second not in answer.error
    device = enrol(server, "a/b c%")["device"]
    assert admin("device", "revoke", "a/b c%", "--json").json == {
        "id": device,
        "name": "a/b c%",
        "before": False,
        "freed": 0,
    }
    assert admin("device", "revoke", device).out.endswith("is revoked already: nothing changed\n")
    answer = admin("device", "revoke", "_%")  # no wildcards
    assert answer.code == 2 and answer.error == "there is no device '_%'"


def test_pause_resume_and_stop_say_what_they_did(server: LiveServer, admin: Embrace, tmp_path: Path) -> None:
    job = server.create_job(tmp_path / "bundle", name="digits")
    device = server.enrol("kitchen")
    next_task(device)
    name = f"digits {job}"
    paused = admin("job", "pause", "digits").out
    assert paused == (
        f"{name}: running -> paused at version 0; no task is handed out; 1 task under way may still be answered\n"
    )
    assert admin("job", "pause", "digits").out == f"{name} is paused already: nothing changed\n"
    assert admin("job", "resume", "digits").out == (
        f"{name}: paused -> running at version 0; it goes on with round 0, 1 task under way\n"
    )
    assert [row["state"] for row in admin("device", "list", "--json").json] == ["working"]
    assert "; 1 task that it held can go to other devices" in admin("device", "revoke", "kitchen").out
    stopped = admin("job", "stop", "digits", "--json").json
    assert {key: stopped[key] for key in ("before", "state", "under_way", "arrived", "closing")} == {
        "before": "running",
        "state": "stopped",
        "under_way": 0,
        "arrived": 0,
        "closing": False,
    }
    assert admin("job", "stop", "digits").error == f"job {job} is stopped"


class Piped:
    """A command whose output goes to a file."""

    def __init__(self, out: Path, *words: str) -> None:
        self._out = out
        with out.open("wb") as file:
            command = [sys.executable, "-m", "embrace", *words]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self._out.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text, lambda: self.text)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def agent(server: LiveServer, out: Path, *options: str) -> Piped:
    data = out.with_suffix(".npz")
    np.savez(data, x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    return Piped(out, "agent", "--server", server.url, "--token", server.enrolment, "--data", str(data), *options)


def test_an_agent_says_its_other_name_and_keeps_others_out_of_its_folder(server: LiveServer, tmp_path: Path) -> None:
    enrol(server, "kitchen")
    work = str(tmp_path / "work")
    first = agent(server, tmp_path / "first", "--name", "kitchen", "--work", work)
    try:
        first.wait_for("enrolled as kitchen-2: the name kitchen is taken\n")
        second = agent(server, tmp_path / "second", "--name", "other", "--work", work)
        assert second.process.wait(PATIENCE) == 2
        in_use = f"give each agent its own --work: {work} is in use by another, process {first.process.pid}"
        assert second.text == f"error: {in_use}\n"
    finally:
        first.kill()
    third = agent(server, tmp_path / "third", "--work", work)  # the killed one holds nothing
    try:
        third.wait_for("enrolled as kitchen-2, waiting: there is no job\n")
    finally:
        third.kill()


@contextlib.contextmanager
def staying(device: httpx.Client) -> Iterator[None]:
    """Ask for a task every second: a device that is silent no longer counts as there, however busy the machine is."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(1.0):
            device.post("/v1/tasks/next", params={"wait": 0})

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


def test_where_people_look_they_see_what_a_job_waits_for(server: LiveServer, admin: Embrace, tmp_path: Path) -> None:
    job = server.create_job(tmp_path / "bundle", name="digits", participate={"min_available": 3}, num_rounds=1)
    device = server.enrol("kitchen")
    answer = device.post("/v1/tasks/next", params={"wait": 0})
    assert (answer.status_code, answer.headers["Embrace-Waiting"]) == (204, "job digits needs 2 more devices")
    words = ("job", "watch", job, "--server", server.url, "--token", server.admin)
    with staying(device):
        assert "\nwaiting: needs 2 more devices\n" in admin("job", "show", "digits").out
        told = admin("job", "show", "digits", "--json").json["waiting"]
        assert told == {"on": "devices", "text": "needs 2 more devices", "count": 2, "devices": []}
        piped = Piped(tmp_path / "piped", *words)
        as_json = Piped(tmp_path / "json", *words, "--json")
        live = Screen(*words)
        for watching in (live, piped, as_json):
            watching.wait_for("needs 2 more devices")
        attic = agent(server, tmp_path / "attic", "--name", "attic", "--work", str(tmp_path / "work"))
        try:
            attic.wait_for("enrolled as attic, waiting: job digits needs 1 more device\n")
            for watching in (live, piped, as_json):
                watching.wait_for("needs 1 more device")
        finally:
            attic.kill()
    kinds = [json.loads(line)["kind"] for line in as_json.text.splitlines()]
    assert "Waiting" in kinds
    admin("job", "pause", job)
    live.wait_for("waiting: paused until it is resumed")
    assert "is paused" in device.post("/v1/tasks/next", params={"wait": 0}).headers["Embrace-Waiting"]
    admin("job", "stop", job)
    assert live.end() == piped.process.wait(PATIENCE) == as_json.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("profile", "words"),
    [({}, "tier by memory"), ({"tier": "weak"}, "tier weak"), ({"boundary": "b"}, "from b, as its owner decided")],
)
def test_a_device_shows_where_it_trains_from(
    server: LiveServer, admin: Embrace, profile: dict[str, str], words: str
) -> None:
    told = {"name": f"cellar-{len(words)}", "profile": profile}
    assert server.client(server.enrolment).post("/v1/devices", json=told).status_code == 201
    assert f", {words}\n" in admin("device", "show", told["name"]).out


def test_a_device_in_one_page(server: LiveServer, admin: Embrace, tmp_path: Path) -> None:
    """What it does, what it did, what went wrong last, and where its time goes."""
    job = server.create_job(tmp_path / "bundle", name="digits", num_rounds=4)
    device = server.enrol("kitchen", tier="strong")
    for wall in (1.0, 9.0, 2.0):
        seconds = {"wall": wall, "download": 0.5, "forward": {"first": 0.25}, "training": wall / 2}
        answer = send_update(device, next_task(device)["id"], {"seconds": seconds, "boundary": "first"})
        assert answer.status_code == 201
    task = next_task(device)["id"]
    assert admin("device", "show", "kitchen", "--json").json["state"] == "working"
    told = {"reason": "out_of_memory", "message": "12 MB are not enough"}
    assert device.post(f"/v1/tasks/{task}/failure", json=told).status_code == 204
    found = admin("device", "show", "kitchen", "--json").json
    assert (found["name"], found["tasks_done"], found["tasks_failed"]) == ("kitchen", 3, 1)
    assert found["state"] == "benched" and found["benched_until"] > found["last_error"]["at"]
    assert "kitchen is benched: out_of_memory: 12 MB are not enough" in admin("job", "show", "digits").out
    told_device = device.post("/v1/tasks/next", params={"wait": 0}).headers["Embrace-Waiting"]
    assert "job digits gives this device no task for now: benched for " in unquote(told_device)
    assert found["seconds"] == {"wall": 2.0, "download": 0.5, "forward": 0.25, "training": 1.0}
    assert {key: found["last_error"][key] for key in ("job", "reason")} == {"job": job, "reason": "out_of_memory"}
    assert "12 MB are not enough" in found["last_error"]["message"]
    (row,) = found["jobs"]
    assert (row["job"], row["name"], row["boundary"], row["done"]) == (job, "digits", "first", 3)
    text = admin("device", "show", found["id"][:6]).out
    assert f"kitchen {found['id']}: " in text and "tasks: 3 done, " in text
    assert "last error: out_of_memory: " in text and "│ wall     │   2.000 │" in text
    assert admin("device", "show", "attic").error == "there is no device 'attic'"
    assert server.client(server.admin).get("/v1/devices/attic").status_code == 404
