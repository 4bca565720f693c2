"""TLS, and bodies that are larger than what any buffer on their way holds, with it and without."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from coordinator.body_check import LARGE
from tests.live_server import LiveServer, live_server, make_bundle, next_task, zero_update

WIDTH = 400_000  # of the model: 13 MB
REPORT = {"Embrace-Report": '{"samples": 1}'}


@dataclass
class Place:
    """A server with a large model, and how to reach it."""

    server: LiveServer
    job: str
    folder: Path
    trust: ssl.SSLContext | None

    def connect(self) -> socket.socket:
        """To somebody who reads little at a time."""
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        made.settimeout(10)
        made.connect(self.server.address)
        return made if self.trust is None else self.trust.wrap_socket(made, server_hostname="localhost")

    def spool(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data" / "spool").iterdir())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    made = tmp_path_factory.mktemp("certificate") / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            str(made.with_name("key.pem")),
            "-out",
            str(made),
        ],
        check=True,
        capture_output=True,
    )
    return made


@pytest.fixture(params=["plain", "tls"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    options: list[str] = []
    trust = None
    if request.param == "tls":
        certificate = request.getfixturevalue("certificate")
        options = ["--tls-certificate", str(certificate), "--tls-key", str(certificate.with_name("key.pem"))]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trust = ssl.create_default_context(cafile=str(certificate))
    make_bundle(tmp_path / "bundle", WIDTH)
    with live_server(tmp_path, *options, slow_client=2) as server:
        yield Place(server, server.create_job(tmp_path / "bundle"), tmp_path, trust)


def ask_for_weights(place: Place, device: httpx.Client) -> bytes:
    lines = [f"GET /v1/jobs/{place.job}/versions/0/weights HTTP/1.1", "Host: x"]
    return "\r\n".join([*lines, f"Authorization: {device.headers['Authorization']}", "", ""]).encode()


def test_a_large_model_down_and_up(place: Place) -> None:
    device, body = place.server.enrol(), zero_update(width=WIDTH)
    assert len(body) > LARGE
    task = next_task(device)
    weights = device.get(f"/v1/jobs/{place.job}/versions/0/weights").content
    count = 8 * WIDTH + 27
    expected = np.linspace(-1, 1, count, dtype=np.float32)
    np.testing.assert_array_equal(np.frombuffer(weights[-4 * count :], "<f4"), expected)
    for wrong in (body + b"x", body[:-4] + b"\xff\xff\xff\xff"):
        assert device.put(f"/v1/tasks/{task['id']}/update", content=wrong, headers=REPORT).status_code == 400
        assert place.spool() == []
    assert device.put(f"/v1/tasks/{task['id']}/update", content=body, headers=REPORT).status_code == 201
    assert "traceback" not in place.server.log


def test_the_cookie_of_a_page_stays_on_the_way_that_it_came(place: Place) -> None:
    with place.server.client(place.server.admin) as client:
        cookie = client.post("/v1/session").raise_for_status().headers["set-cookie"].lower()
    assert ("; secure" in cookie) == (place.trust is not None)


def test_who_takes_nothing_of_an_answer_is_cut_off(place: Place) -> None:
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("the system has no such timeout")
    device = place.server.enrol()
    with place.connect() as connection:
        connection.sendall(ask_for_weights(place, device))
        place.server.wait_for_log('/versions/0/weights", "status": 200')
        came = 0
        try:
            while piece := connection.recv(1 << 16):
                came += len(piece)
        except (ConnectionError, ssl.SSLError):
            pass
    assert 0 < came < 4 * 8 * WIDTH
    assert "traceback" not in place.server.log


def test_who_takes_little_at_a_time_gets_everything(place: Place) -> None:
    device = place.server.enrol()
    with place.connect() as connection:
        connection.sendall(ask_for_weights(place, device))
        came, began = 0, time.monotonic()
        while came < 4 * 8 * WIDTH:
            piece = connection.recv(1 << 16)
            assert piece, came
            came += len(piece)
            if time.monotonic() - began < 6:  # for longer than a client may take nothing
                time.sleep(0.2)


def test_who_never_finishes_a_handshake_is_cut_off(place: Place) -> None:
    """Two seconds are allowed here; asyncio's own limit is a minute, and without TLS there is no handshake."""
    connection = socket.create_connection(place.server.address, timeout=45)
    with connection, contextlib.suppress(ConnectionError):  # which is to be cut off, too
        assert connection.recv(1) == b""
    assert place.server.enrol().get("/healthz").status_code == 200


def test_the_process_ends_although_somebody_keeps_a_connection(place: Place) -> None:
    device = place.server.enrol()
    assert device.get("/healthz").status_code == 200
    began = time.monotonic()
    assert place.server.stop() == 0
    assert time.monotonic() - began < 15  # not as long as asyncio waits for a goodbye: 30 seconds


def test_only_who_trusts_the_certificate_connects(certificate: Path, tmp_path: Path) -> None:
    key = certificate.with_name("key.pem")
    with live_server(tmp_path, "--tls-certificate", str(certificate), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{server.url}/healthz", verify=trusting).json()["status"] == "ok"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/healthz")
