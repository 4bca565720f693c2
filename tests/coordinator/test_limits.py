"""What one client may take, seen from real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.admission import kind_of
from coordinator.api.limits import HEADER_COUNT, LEAST_BYTES, UNKNOWN_BYTES, Buckets, ClientLimits, body_bound
from tests.live_server import LiveServer, live_server, next_task, send_update, zero_update
from tests.waiting import PATIENCE, wait_until

LIMITS = ClientLimits()


# --- pure --------------------------------------------------------------------------------------------------------


def test_a_bucket_empties_and_fills() -> None:
    buckets = Buckets(rate=2.0, burst=3.0)
    assert [buckets.take("a", 10.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert buckets.take("a", 10.0) == 0.5
    assert buckets.take("a", 10.25) == 0.25
    assert buckets.take("a", 10.5) == 0.0
    assert [buckets.take("a", 1e6) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_bucket_is_nobody_else_s() -> None:
    buckets = Buckets(rate=1.0, burst=1.0)
    assert buckets.take("a", 0.0) == 0.0
    assert buckets.take("a", 0.0) > 0
    assert buckets.take("b", 0.0) == 0.0


def test_strangers_do_not_fill_the_memory() -> None:
    buckets = Buckets(rate=1.0, burst=1.0, most_keys=10)
    for number in range(1000):
        buckets.take(str(number), 0.0)
    assert len(buckets._left) == 10
    assert buckets.take("999", 0.0) > 0  # the newest are remembered


@given(rate=st.floats(0.1, 100), burst=st.floats(1, 50), pauses=st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_never_more_than_burst_and_rate(rate: float, burst: float, pauses: list[float]) -> None:
    buckets, now, taken = Buckets(rate, burst), 0.0, 0
    for pause in pauses:
        now += pause
        taken += buckets.take("a", now) == 0.0
        assert taken <= burst + rate * now + 1e-6


@pytest.mark.parametrize(
    ("request_line", "kind", "bound"),
    [
        ("PUT /v1/tasks/1-0-0-1/update", "working", None),
        ("PUT /v1/bundles/abc/files/graphs/a.onnx", "working", None),
        ("POST /v1/tasks/next", "waiting", LIMITS.json_bytes),
        ("GET /v1/jobs/1/events", "waiting", LIMITS.json_bytes),
        ("POST /v1/devices", "working", LIMITS.json_bytes),
        ("POST /v1/tasks/1-0-0-1/heartbeat", "brief", LIMITS.json_bytes),
        ("GET /v1/jobs/1/state", "brief", LIMITS.json_bytes),
        ("GET /v1/jobs/1/timings", "working", LIMITS.json_bytes),
        ("POST /v1/tasks/x/update", "working", LIMITS.json_bytes),
        ("PUT /v1/tasks/a/b/update", "working", LIMITS.json_bytes),
        ("GET /healthz", "operations", LIMITS.json_bytes),
    ],
)
def test_every_route_has_a_bound(request_line: str, kind: str, bound: int | None) -> None:
    method, path = request_line.split()
    assert kind_of(method, path, known=True) == kind
    assert kind_of(method, path, known=False) == ("operations" if kind == "operations" else "unknown")
    assert body_bound(method, path, LIMITS, known=True) == bound
    assert body_bound(method, path, LIMITS, known=False) == (None if bound is None else UNKNOWN_BYTES)


# --- a real server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("limits")
    with live_server(folder, slow_client=1, requests_per_second=5, concurrent_requests=2) as running:
        running.create_job(folder / "bundle", num_rounds=100)
        yield running


@pytest.fixture
def server(process: LiveServer) -> Iterator[LiveServer]:
    yield process
    process.retire_devices()


def head(request_line: str, token: str, length: int, **headers: object) -> bytes:
    given = {"Host": "test", "Authorization": f"Bearer {token}", "Content-Length": length, **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join([f"{request_line} HTTP/1.1", *lines, "", ""]).encode()


def announced(device: httpx.Client, task: str, length: int) -> bytes:
    """The beginning of a request with an update."""
    token = device.headers["Authorization"].removeprefix("Bearer ")
    return head(f"PUT /v1/tasks/{task}/update", token, length, Embrace_Report='{"samples": 1}')


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and what has come of the body."""
    data = b""
    while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
        data += piece
    top, _, body = data.partition(b"\r\n\r\n")
    first, *rest = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    while len(body) < int(headers["content-length"]) and (piece := connection.recv(65536)):
        body += piece
    return int(first.split()[1]), headers, body


def is_closed(connection: socket.socket, within: float) -> bool:
    connection.settimeout(within)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("route", "who", "most"), [("jobs", "admin", 1 << 20), ("devices", "enrolment", 4096), ("jobs", "", 4096)]
)
def test_a_json_body_that_is_announced_too_long_is_not_read(
    server: LiveServer, route: str, who: str, most: int
) -> None:
    """Of a client that is neither a device nor the administrator, no more is read than an enrolment needs."""
    token = getattr(server, who) if who else "unknown"
    with server.connect() as connection:
        connection.sendall(head(f"POST /v1/{route}", token, most + 1, Content_Type="application/json"))
        status, headers, body = answer_of(connection)
    assert (status, headers["content-type"]) == (413, "application/problem+json")
    assert json.loads(body)["detail"] == f"{most + 1} bytes are announced; expected at most {most}"


@pytest.mark.parametrize(("route", "who"), [("jobs", "admin"), ("devices", "enrolment")])
def test_a_json_body_that_is_not_announced_is_counted(server: LiveServer, route: str, who: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    answer = httpx.post(
        f"{server.url}/v1/{route}",
        content=endless(),
        headers={"Authorization": f"Bearer {getattr(server, who)}", "Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()["title"]) == (413, "Body too large")


def test_an_update_that_is_announced_too_long_is_not_read(server: LiveServer) -> None:
    device = server.enrol()
    task = next_task(device)["id"]
    with server.connect() as connection:
        connection.sendall(announced(device, task, 1 << 30))
        status, _, body = answer_of(connection)
    assert status == 413
    assert "expected at most" in json.loads(body)["detail"]
    assert send_update(device, task).status_code == 201


def test_too_many_headers(server: LiveServer) -> None:
    answer = httpx.get(f"{server.url}/v1/jobs", headers={f"x-{i}": "a" for i in range(HEADER_COUNT)})
    assert (answer.status_code, answer.headers["content-type"]) == (431, "application/problem+json")


@pytest.mark.parametrize("path", ["/v1/tasks/next%0A?wait=0", "/v1/tasks/next%0a"])
def test_a_line_break_leads_around_no_bound(server: LiveServer, path: str) -> None:
    answer = server.enrol().post(httpx.URL(server.url).copy_with(raw_path=path.encode()))
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_headers_without_an_end(server: LiveServer) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: test\r\n" + b"x: " + b"a" * 400_000)
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        except ConnectionError:
            pass  # it has hung up before all was sent


def test_a_device_that_asks_too_often(server: LiveServer) -> None:
    eager, other = server.enrol(), server.enrol()
    began = time.monotonic()
    answers = [eager.get(f"/v1/graphs/{'0' * 64}")]
    while answers[-1].status_code == 404 and len(answers) < 2000:  # more arrive per second than are allowed
        answers.append(eager.get(f"/v1/graphs/{'0' * 64}"))
    assert [answer.status_code for answer in answers[:20]] == [404] * 20  # four seconds' worth at once
    assert answers[-1].status_code == 429
    assert len(answers) <= 22 + 5 * (time.monotonic() - began)  # and five more for every second that passed
    assert answers[-1].headers["Retry-After"] == "1"
    assert answers[-1].headers["content-type"] == "application/problem+json"
    assert other.get(f"/v1/graphs/{'0' * 64}").status_code == 404
    time.sleep(0.4)
    assert eager.get(f"/v1/graphs/{'0' * 64}").status_code == 404


def test_a_request_is_counted_once(server: LiveServer) -> None:
    device = server.enrol()
    path = f"/v1/jobs/{next_task(device)['job']}/versions/0/weights"
    answers = [device.get(path).status_code for _ in range(19)]  # four seconds' worth at once, and one is used up
    assert answers == [200] * 19


def test_a_body_that_trickles_is_dropped(server: LiveServer) -> None:
    device = server.enrol()
    task = next_task(device)["id"]
    began = time.monotonic()
    with server.connect() as connection:
        body = zero_update()
        connection.sendall(announced(device, task, len(body)))
        connection.setblocking(False)
        answer, sent = b"", 0
        for byte in body:  # ten bytes per second would take half a minute
            try:
                sent += connection.send(bytes([byte]))
                answer += connection.recv(4096)
            except BlockingIOError:
                pass
            except ConnectionError:
                break
            if b"\r\n\r\n" in answer:
                break
            time.sleep(0.1)
        assert answer or is_closed(connection, PATIENCE)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"Too slow" in answer
    assert time.monotonic() - began > 0.9 and sent < len(body) / 2
    assert send_update(device, task).status_code == 201  # nothing is left of the attempt


def test_a_client_that_is_slow_but_steady_is_served(server: LiveServer) -> None:
    text = json.dumps({"name": "steady", "profile": {"tier": "strong"}}).encode().ljust(4 * LEAST_BYTES)

    def is_served() -> bool:
        times = [time.monotonic()]
        with server.connect() as connection, contextlib.suppress(ConnectionError, KeyError):
            connection.sendall(head("POST /v1/devices", server.enrolment, len(text), Content_Type="application/json"))
            for start in range(0, len(text), LEAST_BYTES):
                time.sleep(0.4)  # longer in all than the window
                connection.sendall(text[start : start + LEAST_BYTES])
                times.append(time.monotonic())
            if answer_of(connection)[0] == 201:
                return True
        assert max(later - earlier for earlier, later in pairwise(times)) > 0.7, "it was steady"
        return False

    wait_until(is_served)  # a busy machine may keep this client from being steady


def test_headers_that_trickle_are_dropped(server: LiveServer) -> None:
    began = time.monotonic()
    with server.connect() as connection:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: t\r\nX-Very-Long: " + b"x" * 600:  # a minute
            try:
                connection.sendall(bytes([byte]))
            except ConnectionError:
                break
            if is_closed(connection, 0.1):
                break
        else:
            raise AssertionError("it was not dropped")
    assert time.monotonic() - began > 0.9


def test_a_connection_that_says_nothing_is_dropped(server: LiveServer) -> None:
    began = time.monotonic()
    with server.connect() as connection:
        assert is_closed(connection, PATIENCE)
    assert time.monotonic() - began > 0.9


def test_a_kept_connection_whose_next_headers_trickle_is_dropped(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n")
        assert answer_of(connection)[0] == 200
        began = time.monotonic()
        connection.sendall(b"GET /heal")
        assert is_closed(connection, PATIENCE)
    assert time.monotonic() - began > 0.5


def test_more_requests_at_once_than_allowed(tmp_path: Path) -> None:
    with live_server(tmp_path, concurrent_requests=2) as server:
        server.create_job(tmp_path / "bundle")
        try_too_many(server)


def try_too_many(server: LiveServer) -> None:
    devices = [server.enrol() for _ in range(2)]
    tasks = [next_task(device)["id"] for device in devices]
    body = zero_update()
    held = [server.connect() for _ in devices]
    for device, task, connection in zip(devices, tasks, held):
        connection.sendall(announced(device, task, len(body)))
        connection.sendall(body[:100])
    admin = server.client(server.admin)
    wait_until(lambda: admin.get("/v1/jobs").status_code == 503)
    busy = admin.get("/v1/jobs")
    assert (busy.status_code, busy.headers["Retry-After"]) == (503, "1")
    assert httpx.get(f"{server.url}/v1/jobs").status_code == 401  # those without a token are counted by themselves
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    waiting = devices[0].post("/v1/tasks/next", params={"wait": 0})
    assert waiting.status_code in (200, 204)
    for connection in held:
        connection.sendall(body[100:])
        assert answer_of(connection)[0] == 201
        connection.close()
    assert server.client(server.admin).get("/v1/jobs").status_code == 200


def test_a_client_that_hangs_up_leaves_nothing_behind(server: LiveServer) -> None:
    device = server.enrol()
    task = next_task(device)["id"]
    with server.connect() as connection:
        connection.sendall(announced(device, task, len(zero_update())) + zero_update()[:200])
    server.wait_for_log(f'/v1/tasks/{task}/update", "status": 400')
    assert "traceback" not in server.log
    assert send_update(device, task).status_code == 201
