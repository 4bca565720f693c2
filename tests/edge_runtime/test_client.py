"""The device's side of the interface, against real little servers that lose connections."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edge_runtime.client import FIRST_PAUSE, LONGEST_PAUSE, Declined, DeviceClient, Unreachable
from federation.errors import BundleError, InputError
from federation.messages import Report, TaskOffer

REPORT = Report("done", "stem", "portable", "fast", 0, 1, 1, 5, 1.0, 1.0)
CONTENT = bytes(range(256)) * 4096  # a megabyte
Answer = Callable[[BaseHTTPRequestHandler, int], None]  # the request, and how many there were before


class Little:
    """A server whose answers are a function of the request and its number."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("range") for _, _, headers, _ in self.seen]


@contextmanager
def little(answer: Answer) -> Iterator[Little]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            known.seen.append((self.command, self.path, headers, body))
            answer(self, len(known.seen) - 1)

        do_GET = do_PUT = do_POST = any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known = Little(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


def hang_up(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)


def problem(status: int, **more: object) -> bytes:
    return json.dumps({"title": "No", "status": status, "detail": "because", **more}).encode()


@contextmanager
def client(url: str, **options: object) -> Iterator[tuple[DeviceClient, list[float]]]:
    pauses: list[float] = []
    made = DeviceClient(url, "token", sleep=pauses.append, **options)  # type: ignore[arg-type]
    yield made, pauses
    made.close()


# --- repeating -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [500, 502, 503, 507, 429, "hang up"])
def test_trouble_is_waited_out_with_growing_pauses(trouble: int | str) -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        if number >= 8:
            reply(request, 204)
        elif trouble == "hang up":
            hang_up(request)
        else:
            reply(request, int(trouble), problem(int(trouble)))

    with little(answer) as server, client(server.url) as (device, pauses):
        assert device.next_task(0.0) is None
        assert len(server.seen) == 9 and len(pauses) == 8
        for number, pause in enumerate(pauses):
            middle = min(FIRST_PAUSE * 2**number, LONGEST_PAUSE)
            assert 0.5 * middle <= pause <= 1.5 * middle  # around it, so that a fleet does not come back at once
        assert all(headers["authorization"] == "Bearer token" for _, _, headers, _ in server.seen)


def test_patience_ends() -> None:
    with little(lambda request, number: reply(request, 503)) as server, client(server.url, patience=20.0) as both:
        device, pauses = both
        with pytest.raises(Unreachable, match="503"):
            device.next_task(0.0)
        assert sum(pauses[:-1]) < 20 <= sum(pauses) and len(server.seen) == len(pauses) + 1
        again = len(pauses)
        with pytest.raises(Unreachable):  # a new call has new patience
            list(device.weights("job", 1, 0, 10))
        assert len(pauses) > again + 1


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        client(f"http://127.0.0.1:{port}", patience=5.0) as (device, pauses),
        pytest.raises(Unreachable, match="refused"),
    ):
        device.set_profile({})
    assert sum(pauses) >= 5
    for wrong in ("http://[::", "nonsense", "127.0.0.1:8470", "ftp://host", "http://", "http://a\0"):
        with pytest.raises(InputError, match="address"):
            DeviceClient(wrong, "token")


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422])
def test_a_refusal_is_not_repeated(status: int) -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        reply(request, status, problem(status, reason="late"))

    with little(answer) as server, client(server.url) as (device, pauses):
        with pytest.raises(Declined, match="because") as refusal:
            device.fail("task", "failed", "x" * 5000)
        assert (refusal.value.answer, refusal.value.reason, pauses, len(server.seen)) == (status, "late", [], 1)
        assert len(json.loads(server.seen[0][3])["message"]) == 2000


def test_a_refusal_without_words() -> None:
    with (
        little(lambda request, number: reply(request, 418, b"teapot")) as server,
        client(server.url) as (device, _),
        pytest.raises(Declined, match="teapot"),
    ):
        device.next_task()


# --- uploads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["the answer", "the answer, and it had arrived"])
def test_an_update_whose_answer_was_lost_is_sent_again_and_a_duplicate_is_a_success(lost: str) -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        if number == 0:
            hang_up(request)
        elif lost == "the answer":
            reply(request, 201, b"{}")
        else:
            reply(request, 409, problem(409, reason="duplicate"))

    made = []

    def body() -> Iterator[bytes]:
        made.append(1)
        yield CONTENT[:1000]
        yield CONTENT[1000:3000]

    with little(answer) as server, client(server.url) as (device, pauses):
        assert device.send_update("job-0-0-1", body, REPORT) is None
    assert len(made) == 3 and len(pauses) == 1  # once for the digest
    digest = base64.b64encode(hashlib.sha256(CONTENT[:3000]).digest()).decode()
    for method, path, headers, sent in server.seen:
        assert (method, path, sent) == ("PUT", "/v1/tasks/job-0-0-1/update", CONTENT[:3000])
        assert headers["content-digest"] == f"sha-256=:{digest}:" and headers["content-length"] == "3000"
        assert json.loads(headers["embrace-report"])["samples"] == 5


OFFER = {"id": "job-1-0-1", "job": "job", "bundle": "b", "version": 1, "lease_until": 2.0, "work": {}}


@pytest.mark.parametrize("following", [OFFER, None, "an older coordinator"])
def test_the_next_task_comes_with_the_answer_to_an_update(following: object) -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        told = {"status": "accepted"} if following == "an older coordinator" else {"next": following}
        reply(request, 201, json.dumps(told).encode())

    with little(answer) as server, client(server.url) as (device, _):
        found = device.send_update("job-0-0-1", lambda: [b"x"], REPORT, following=True)
    assert found == (TaskOffer(**OFFER) if following is OFFER else None)
    assert server.seen[0][1] == "/v1/tasks/job-0-0-1/update?next=1&storage=1"


def test_an_update_that_is_late_is_declined() -> None:
    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        reply(request, 409, problem(409, reason="late"))

    with little(answer) as server, client(server.url) as (device, _), pytest.raises(Declined) as refusal:
        device.send_update("task", lambda: [b"x"], REPORT)
    assert refusal.value.reason == "late"


# --- downloads -------------------------------------------------------------------------------------


def send_part(request: BaseHTTPRequestHandler, most: int | None) -> None:
    """The range that was asked for; the connection breaks after `most` bytes of it."""
    asked = request.headers.get("Range")
    first, last = 0, len(CONTENT) - 1
    if asked:
        start, _, stop = asked.removeprefix("bytes=").partition("-")
        first, last = int(start), int(stop) if stop else last
    part = CONTENT[first : last + 1]
    request.send_response(206 if asked else 200)
    request.send_header("Content-Length", str(len(part)))
    request.end_headers()
    request.wfile.write(part[:most])
    if most is not None:
        hang_up(request)


def test_a_download_goes_on_at_the_right_byte() -> None:
    cuts = [300_000, 0, 400_000, None]
    with (
        little(lambda request, number: send_part(request, cuts[number])) as server,
        client(server.url) as (device, pauses),
    ):
        assert b"".join(device.weights("job", 3, 1000, 1_000_000)) == CONTENT[1000:1_000_000]
    starts = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in server.ranges if asked]
    assert starts[0] == 1000 and starts[1] == starts[2] > 1000 and starts[3] > starts[2] and len(pauses) == 3
    assert all(asked and asked.endswith("-999999") for asked in server.ranges)


def test_a_server_that_ignores_the_range_is_not_believed() -> None:
    with (
        little(lambda request, number: reply(request, 200, CONTENT)) as server,
        client(server.url) as (device, _),
        pytest.raises(Declined, match="instead of a part"),
    ):
        list(device.weights("job", 3, 1000, 2000))


def test_a_graph_goes_on_too_and_is_compared_with_its_hash(tmp_path: Path) -> None:
    cuts = [500_000, None]
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    with little(lambda request, number: send_part(request, cuts[number])) as server, client(server.url) as (device, _):
        device.save_graph(sha256, tmp_path / sha256, len(CONTENT))
    assert (tmp_path / sha256).read_bytes() == CONTENT
    assert server.ranges[0] is None and server.ranges[1] is not None


def test_a_tampered_graph_or_manifest_is_refused(tmp_path: Path) -> None:
    with little(lambda request, number: reply(request, 200, b"evil")) as server, client(server.url) as (device, _):
        with pytest.raises(BundleError, match="sha256"):
            device.save_graph("0" * 64, tmp_path / "graph", len(CONTENT))
        with pytest.raises(BundleError, match="sha256"):
            device.manifest("0" * 64)
    assert list(tmp_path.iterdir()) == []
