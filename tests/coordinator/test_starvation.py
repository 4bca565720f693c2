"""Clients without a token hold as many connections as they can get; devices and administrators are served meanwhile."""

from __future__ import annotations

import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.api import admission
from coordinator.api.admission import LOOK_UPS_OF_ADDRESS, UNKNOWN_OF_ADDRESS
from coordinator.api.auth import Identity
from coordinator.registry import Registry
from tests.coordinator.harness import serving
from tests.live_server import LiveServer, live_server, next_task, send_update
from tests.waiting import PATIENCE

HELD = 1100


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    """Both sides of a connection are files; ours are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HELD + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here, this needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def holding(server: LiveServer, count: int, first: bytes, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Connections that have sent the beginning of something, and keep quiet."""
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            made = stack.enter_context(socket.create_connection(server.address, timeout=60, source_address=(source, 0)))
            made.sendall(first)
            held.append(made)
        yield held


def slow(line: str, token: str | None = None, length: int = 4000) -> bytes:
    """The head of a request and the beginning of its body."""
    credential = f"Authorization: Bearer {token}\r\n" if token else ""
    head = (
        f"{line} HTTP/1.1\r\nHost: x\r\n{credential}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    return head.encode() + b"{"


ATTACKS = {
    "bodies of enrolments": slow("POST /v1/devices", "embrace_enrol_" + "x" * 43),
    "bodies without a token": slow("POST /v1/devices"),
    "bodies for the administrator's routes": slow("POST /v1/jobs", "embrace_admin_" + "x" * 43),
    "bodies of updates": slow("PUT /v1/tasks/0-0-0-0/update", "embrace_device_" + "x" * 43, 1 << 20),
    "headers": b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "nothing": b"",
}


QUICK = "bodies of enrolments"
CASES = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS]


@pytest.mark.parametrize("attack", CASES)
def test_devices_and_administrators_are_served_meanwhile(tmp_path: Path, attack: str) -> None:
    """A restart, too: then the coordinator has to look up in its database whose tokens these are."""
    with live_server(tmp_path) as server:
        job = server.create_job(tmp_path / "bundle", num_rounds=100)
        device = server.enrol()
        token = device.headers["Authorization"].removeprefix("Bearer ")
    with live_server(tmp_path) as server, holding(server, HELD, ATTACKS[attack]):
        admin, device = server.client(server.admin), server.client(token)
        for _ in range(3):
            assert admin.get(f"/v1/jobs/{job}").status_code == 200
            task = next_task(device)["id"]
            assert send_update(device, task).status_code == 201
            assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert "traceback" not in server.log


def test_a_body_without_a_token_is_answered_before_it_comes(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        for attack in ("bodies for the administrator's routes", "bodies of updates"):
            with holding(server, 1, ATTACKS[attack]) as [connection]:
                answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()


def test_an_address_has_few_enrolments_at_once_and_seconds_for_each(tmp_path: Path) -> None:
    """While one address is full, a device at another enrols. The first is free again when its time is over."""
    enrolment = slow("POST /v1/devices", "embrace_enrol_" + "x" * 43)
    with live_server(tmp_path) as server, holding(server, UNKNOWN_OF_ADDRESS, enrolment, "127.0.0.2") as held:
        assert server.enrol().get("/healthz").status_code == 200
        for connection in held:
            assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_made_up_tokens_keep_no_administrator_and_few_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups take as long as they like: the administrator needs none, and an address has a bounded number of them."""
    release, asked = threading.Event(), []

    def held(token: str, registry: Registry) -> Identity:
        asked.append(token)
        release.wait(PATIENCE)
        return Identity(token)

    with serving(tmp_path) as site:  # and again: after a restart, too
        admin = site.admin
    monkeypatch.setattr(admission, "look_up", held)
    head = "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer made-up-{}\r\n\r\n"
    with serving(tmp_path) as site, ExitStack() as stack:
        stack.callback(release.set)
        url = httpx.URL(site.url)
        crowd = []
        for number in range(LOOK_UPS_OF_ADDRESS + 20):
            made = stack.enter_context(socket.create_connection((url.host, url.port or 0), timeout=PATIENCE))
            made.sendall(head.format(number).encode())
            crowd.append(made)
        refused = []
        while len(refused) < 20:
            ready, _, _ = select.select([known for known in crowd if known not in refused], [], [], PATIENCE)
            assert ready, "no more than the bound may wait"
            refused += ready
        assert all(read_all(known).startswith(b"HTTP/1.1 503 ") for known in refused)
        with site.http(admin) as client:
            assert client.get("/v1/jobs").status_code == 200
        assert len(asked) == admission.LOOK_UPS and admin not in asked
        release.set()
        assert {read_all(known)[:13] for known in crowd if known not in refused} == {b"HTTP/1.1 401 "}


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    while piece := connection.recv(4096):
        answer += piece
    return answer
