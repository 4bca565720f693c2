"""Words of a device or of a coordinator on a screen: they are shown, and the terminal obeys none of them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from tests.embrace.cli.conftest import Embrace
from tests.embrace.cli.test_watch import Screen
from tests.live_server import LiveServer, live_server, next_task, send_update
from tests.stock_python import ROOT
from tests.waiting import PATIENCE, wait_until

# The clipboard (OSC 52), clear screen, a colour by C1, reading backwards, a line that was never printed.
HOSTILE = "\x1b]52;c;cm0gLXJm\x07 \x1b[2J \x9b31m \u202eezis \u2066x\r\nround 9: done"
ORDERS = ("\x1b]52", "\x1b[2J", "\x9b", "\u202e", "\u2066", "\x07", "\r\nround 9")
SHOWN = "\\x1b]52;c;cm0gLXJm\\x07 \\x1b[2J \\x9b31m \\u202eezis \\u2066x\\r\\nround 9: done"


def check(text: str, shown: str = SHOWN) -> None:
    assert shown in text, text
    assert not [order for order in ORDERS if order in text], repr(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def job(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job with a task that failed with hostile words, and with names as older programs let them be."""
    made = server.create_job(tmp_path_factory.mktemp("bundle") / "small", num_rounds=1)
    device = server.enrol("kitchen")
    task = next_task(device)["id"]
    told = {"reason": HOSTILE[:60], "message": HOSTILE}
    assert device.post(f"/v1/tasks/{task}/failure", json=told).status_code == 204
    with closing(sqlite3.connect(server._log.parent / "data" / "coordinator.db", timeout=PATIENCE)) as database:
        database.execute("UPDATE devices SET name = ?", [HOSTILE])
        database.execute("UPDATE jobs SET name = ?", [HOSTILE])
        database.commit()
    return made


@pytest.fixture
def admin(embrace: Embrace, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Embrace:
    monkeypatch.setenv("EMBRACE_SERVER", server.url)
    monkeypatch.setenv("EMBRACE_ADMIN_TOKEN", server.admin)
    return embrace


@pytest.mark.parametrize("name", [HOSTILE, "a\nb", "\u202ea", " a", "", "\ud800", "a" * 101], ids=ascii)
def test_a_name_that_cannot_be_shown_is_refused(server: LiveServer, name: str) -> None:
    client = server.client(server.enrolment)
    content = json.dumps({"name": name, "profile": {}})
    answer = client.post("/v1/devices", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["detail"].isprintable()


@pytest.mark.parametrize("command", [("device", "list"), ("job", "list"), ("job", "show")], ids=" ".join)
def test_tables(admin: Embrace, job: str, command: tuple[str, str]) -> None:
    answer = admin(*command, *([job] if command == ("job", "show") else []))
    assert answer.code == 0
    flat = answer.out.replace("│", "").replace("\n", "").replace(" ", "")  # cells are folded
    check(answer.out, "\\x1b")
    assert "\\x1b]52;c;cm0gLXJm\\x07" in flat


def test_json_has_the_words_as_they_are(admin: Embrace, job: str) -> None:
    answer = admin("device", "list", "--json")
    assert answer.out.isascii() and not [order for order in ORDERS if order in answer.out]
    assert HOSTILE in [row["name"] for row in answer.json]


def test_the_live_view(server: LiveServer, job: str) -> None:
    screen = Screen("job", "watch", job, "--server", server.url, "--token", server.admin)
    try:
        screen.wait_for("gave up")
        screen.wait_for("\\x1b]52;c;")
    finally:
        screen.process.kill()
        screen.end()
    assert not [order for order in ORDERS if order in screen.text]


def test_the_id_of_a_job_that_was_created(embrace: Embrace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither orders to the terminal nor colours: the id is the coordinator's word."""
    monkeypatch.setattr("embrace.client.Client.create", lambda *_: f"[bold]{HOSTILE}[/nothing]")
    answer = embrace("job", "create", str(tmp_path / "job.toml"), "--server", "http://127.0.0.1:1", "--token", "t")
    assert answer.code == 0
    check(answer.out, f"[bold]{SHOWN}[/nothing]")


def test_an_error_of_a_server(embrace: Embrace) -> None:
    with hostile_coordinator() as url:
        answer = embrace("job", "list", "--server", url, "--token", "t")
    assert answer.code == 2
    check(answer.error)


def test_the_agents_log(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    with hostile_coordinator() as url:
        command = ["agent", "--server", url, "--token", "t", "--data", tmp_path / "data.npz", "--work", tmp_path / "w"]
        with (tmp_path / "told").open("w+b") as told:
            process = subprocess.Popen(
                [sys.executable, "-m", "embrace", *map(str, command)], cwd=ROOT, stdout=told, stderr=told
            )
            try:
                wait_until(lambda: b"no job can use this device" in (tmp_path / "told").read_bytes())
            finally:
                process.kill()
                process.wait()
    check((tmp_path / "told").read_text())


def test_lines_for_a_pipe_and_tables_for_a_spreadsheet(admin: Embrace, server: LiveServer, job: str) -> None:
    """Last: it brings the job to its end."""
    device = server.enrol("garage")
    task = next_task(device)["id"]
    assert send_update(device, task, {"engine": HOSTILE, "boundary": " =cmd|' /C calc'!A0"}).status_code == 201
    answer = admin("job", "watch", job)
    assert answer.code == 0 and answer.out.splitlines()[-1] == "done, version 1"
    check(answer.out)
    table = server.client(server.admin).get(f"/v1/jobs/{job}/timings.csv").text
    check(table)
    assert "' =cmd|" in table


@contextmanager
def hostile_coordinator() -> Iterator[str]:
    """Answers with orders to a terminal wherever it may say something."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            if self.path.startswith("/v1/devices"):
                self._answer(201, {"device": "d", "token": "own", "name": HOSTILE})
            else:
                self._answer(204, None, **{"Embrace-Unfit": quote(HOSTILE)})

        def do_PUT(self) -> None:
            self._answer(200, {"device": "d", "name": HOSTILE})

        def do_GET(self) -> None:
            self._answer(400, {"title": HOSTILE, "detail": HOSTILE})

        def _answer(self, status: int, body: object, **headers: str) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if body is not None:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
