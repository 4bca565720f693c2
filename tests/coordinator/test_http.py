"""HTTP as bytes on real sockets: requests in pieces, one behind the other, in chunks; files and ranges."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.live_server import LiveServer, live_server, next_task, zero_update


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("http"), slow_client=1) as running:
        yield running


@pytest.fixture
def server(process: LiveServer, tmp_path: Path) -> Iterator[LiveServer]:
    process.create_job(tmp_path / "bundle", num_rounds=1)
    yield process
    process.retire_devices()


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of one answer, not a byte more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        assert piece, head
        head += piece
    lines = head.decode().lower().split("\r\n")
    size = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
    body = b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return int(head.split()[1]), body


def put_head(device: httpx.Client, task: str, framing: str) -> bytes:
    token = device.headers["Authorization"]
    lines = [f"PUT /v1/tasks/{task}/update HTTP/1.1", "Host: x", f"Authorization: {token}", framing]
    return "\r\n".join([*lines, 'Embrace-Report: {"samples": 1}', "", ""]).encode()


def test_headers_that_come_in_pieces(process: LiveServer) -> None:
    with process.connect() as connection:
        for piece in (b"GET /hea", b"lthz HTTP/1.1\r\nHo", b"st: x\r\n", b"\r\n"):
            connection.sendall(piece)
            time.sleep(0.05)
        assert read_answer(connection)[0] == 200
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")  # the connection goes on
        assert read_answer(connection)[0] == 200


def test_requests_one_behind_the_other_are_answered_in_order(process: LiveServer) -> None:
    ask = "GET {} HTTP/1.1\r\nHost: x\r\n\r\n"
    with process.connect() as connection:
        connection.sendall("".join(ask.format(path) for path in ("/healthz", "/nowhere", "/healthz")).encode())
        assert [read_answer(connection)[0] for _ in range(3)] == [200, 404, 200]


def test_an_update_in_chunks_and_the_next_request_behind_it(server: LiveServer) -> None:
    device = server.enrol()
    task, body = next_task(device)["id"], zero_update()
    cuts = [0, 7, 100, len(body)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (b - a, body[a:b]) for a, b in pairwise(cuts)) + b"0\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(put_head(device, task, "Transfer-Encoding: chunked") + chunks)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(connection)[0] == 201
        assert read_answer(connection)[0] == 200


def test_a_client_that_asks_first_is_told_to_go_on(server: LiveServer) -> None:
    device = server.enrol()
    task, body = next_task(device)["id"], zero_update()
    with server.connect() as connection:
        connection.sendall(put_head(device, task, f"Content-Length: {len(body)}\r\nExpect: 100-continue"))
        assert read_answer(connection)[0] == 100
        connection.sendall(body)
        assert read_answer(connection)[0] == 201


def test_a_client_that_asks_first_and_is_refused_is_not_waited_for(server: LiveServer) -> None:
    """It may send its body all the same: what follows could be that, or the next request."""
    device = server.enrol()
    task = next_task(device)["id"]
    with server.connect() as connection:
        connection.sendall(put_head(device, task, "Content-Length: 1000000\r\nExpect: 100-continue"))
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close\r\n" in answer.lower()


def test_after_a_refused_body_the_connection_goes_on(server: LiveServer) -> None:
    device = server.enrol()
    task = next_task(device)["id"]
    wrong = b"\xff" * 3000
    with server.connect() as connection:
        connection.sendall(put_head(device, task, f"Content-Length: {len(wrong)}") + wrong)
        assert read_answer(connection)[0] == 400
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(connection)[0] == 200


def test_what_is_no_http_is_refused(process: LiveServer) -> None:
    with process.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = b""
        while piece := connection.recv(4096):  # it is closed
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_weights_whole_and_in_part(server: LiveServer) -> None:
    device = server.enrol()
    task = next_task(device)
    path = f"/v1/jobs/{task['job']}/versions/{task['version']}/weights"
    whole = device.get(path)
    values = np.frombuffer(whole.content[-4 * 59 :], "<f4")
    np.testing.assert_array_equal(values, np.linspace(-1, 1, 59, dtype=np.float32))
    part = device.get(path, headers={"Range": "bytes=16-99"})
    assert (part.status_code, part.content) == (206, whole.content[16:100])
    assert int(whole.headers["Content-Length"]) == len(whole.content)
