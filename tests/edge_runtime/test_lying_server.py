"""An agent and a server that answers anything: the agent says so, waits a little longer each time, and lives."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.agent import Agent, Device
from edge_runtime.client import MOST_ANSWER, Declined, DeviceClient
from tests.edge_runtime.conftest import ROOT
from tests.edge_runtime.test_client import OFFER, hang_up, little, problem, reply
from tests.waiting import PATIENCE

Lie = Callable[[BaseHTTPRequestHandler], None]


def endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    try:
        for _ in range(4 * MOST_ANSWER // 65536):
            request.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")
    except OSError:
        pass
    request.close_connection = True


def says(status: int, body: bytes = b"", **headers: str) -> Lie:
    return lambda request: reply(request, status, body, **headers)


LIES: dict[str, Lie] = {
    **{str(status): says(status, problem(status)) for status in (400, 402, 404, 405, 409, 410, 413, 418, 422, 501)},
    "500 for ever": says(500, problem(500)),
    "redirect": says(307, Location="http://elsewhere.invalid/"),
    "nonsense": says(200, b"<html>hello</html>"),
    "no bytes": says(200),
    "a list": says(200, b"[1, 2]"),
    "nested": says(200, b"[" * 100_000),
    "not utf-8": says(200, b"\xff\xfe{"),
    "compressed": says(200, gzip.compress(bytes(10 << 20)), Content_Encoding="gzip"),
    "no offer": says(200, b"{}"),
    "another kind": says(200, json.dumps({**OFFER, "version": "newest"}).encode()),
    "a path": says(200, json.dumps({**OFFER, "id": "../../etc/passwd"}).encode()),
    "no work": says(200, json.dumps({**OFFER, "work": {"boundary": 7}}).encode()),
    "huge": endless,
    "cut off": lambda request: (request.send_response(200), request.end_headers(), hang_up(request))[0],
}


@pytest.mark.parametrize("lie", LIES)
def test_no_answer_ends_an_agent(lie: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        if number < 5 and "tasks/next" in request.path:
            LIES[lie](request)
        else:
            reply(request, 204)

    with little(answer) as server, DeviceClient(server.url, "t", patience=3.0, sleep=lambda seconds: None) as client:
        agent = Agent(client, Device((np.zeros((2, 1)), np.zeros(2)), tmp_path), sleep=lambda _: None)
        assert agent.run(wait=5.0, until=lambda: len(server.seen) > 9) == 0
    assert caplog.messages


def test_pauses_grow(tmp_path: Path) -> None:
    pauses: list[float] = []
    with (
        little(lambda request, number: reply(request, 404, problem(404))) as server,
        DeviceClient(server.url, "t") as client,
    ):
        agent = Agent(client, Device((np.zeros((2, 1)), np.zeros(2)), tmp_path), sleep=pauses.append)
        agent.run(until=lambda: sum(pauses) > 100)
    assert len(server.seen) < 12, "1 + 2 + 4 + 8 + 16 + 30 ... seconds"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_ends_it(status: int, tmp_path: Path) -> None:
    with (
        little(lambda request, number: reply(request, status, problem(status))) as server,
        DeviceClient(server.url, "t") as client,
        pytest.raises(Declined, match="because"),
    ):
        Agent(client, Device((np.zeros((2, 1)), np.zeros(2)), tmp_path)).run()


def test_the_command_lives_too_until_its_credential_is_refused(tmp_path: Path) -> None:
    """From its first request on, which says what the device can do."""
    lies = ["422", "nonsense", "redirect"]

    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        if number < len(lies):
            LIES[lies[number]](request)
        else:
            reply(request, 401, problem(401))

    np.savez(tmp_path / "data.npz", x=np.zeros((2, 1)), y=np.arange(2))
    with little(answer) as server:
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "credentials.json").write_text(json.dumps({server.url: "embrace_device_x"}))
        command = [sys.executable, "-m", "embrace", "agent", "--server", server.url, "--data", "data.npz"]
        done = subprocess.run(
            [*command, "--work", "work"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            text=True,
            capture_output=True,
            timeout=PATIENCE,
        )
    assert len(server.seen) == len(lies) + 1
    assert done.returncode == 2 and "because" in done.stderr and "Traceback" not in done.stderr
