"""Object storage as a device meets it: servers that differ, fail or lie, and a coordinator that is not trusted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from edge_runtime import object_storage
from edge_runtime.client import DeviceClient
from edge_runtime.object_storage import ATTEMPTS, REST, ObjectStorage, StorageFailed
from edge_runtime.own_limits import Deadline
from federation.errors import OverLimit

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SECRET = "X-Amz-Signature=abcdef"


class Storage:
    """A server with one object, which answers as its `mood` says."""

    def __init__(self) -> None:
        self.mood = "range"
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.body = b""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append(("GET", self.path, dict(self.headers)))
                start, stop = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
                part, headers, status = CONTENT[start : stop + 1], {"Content-Range": f"bytes {start}-{stop}/1"}, 206
                if outer.mood == "whole":
                    part, headers, status = CONTENT, {}, 200
                elif outer.mood == "range called whole":
                    status = 200
                elif outer.mood == "another range":
                    headers = {"Content-Range": f"bytes {start + 1}-{stop}/1"}
                elif outer.mood == "unnamed range":
                    headers = {}
                elif outer.mood == "elsewhere":
                    part, headers, status = b"", {"Location": "http://127.0.0.1:1/"}, 302
                elif outer.mood == "forbidden":
                    part, headers, status = b"<Error/>", {}, 403
                elif outer.mood == "short":
                    part = part[:-7]
                elif outer.mood == "long":
                    part += bytes(1000)
                elif outer.mood == "busy" and len(outer.requests) < ATTEMPTS:
                    part, headers, status = b"", {}, 503
                elif outer.mood == "breaks off":
                    self.answer(status, headers, part[: len(part) // 2], len(part))
                    outer.mood = "range"
                    self.close_connection = True
                    return
                self.answer(status, headers, part, len(part))

            def do_PUT(self) -> None:
                outer.requests.append(("PUT", self.path, dict(self.headers)))
                outer.body = self.rfile.read(int(self.headers["Content-Length"]))
                statuses = {"elsewhere": 307, "forbidden": 403, "broken": 500}
                busy = outer.mood == "busy" and len(outer.requests) < ATTEMPTS
                size = object_storage.MOST_ANSWER + 1 if outer.mood == "long" else 0
                self.answer(503 if busy else statuses.get(outer.mood, 200), {}, bytes(size), size)

            def answer(self, status: int, headers: dict[str, str], body: bytes, size: int) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(size)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a device may hang up
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/bucket/object?{SECRET}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def storage() -> Iterator[Storage]:
    found = Storage()
    yield found
    found.close()


@pytest.fixture
def device() -> Iterator[ObjectStorage]:
    found = ObjectStorage("http://127.0.0.1:8470", Deadline(), sleep=lambda seconds: None)
    yield found
    found.close()


@pytest.mark.parametrize("mood", ["range", "range called whole", "whole", "busy", "breaks off", "long"])
@pytest.mark.parametrize("where", [(0, 10), (1000, 700_000), (len(CONTENT) - 5, len(CONTENT))])
def test_a_range_is_read_however_the_server_sends_it(storage: Storage, device: ObjectStorage, mood: str, where) -> None:
    storage.mood = mood
    assert b"".join(device.read(storage.url, *where)) == CONTENT[slice(*where)]
    assert device.is_usable


def test_what_is_skipped_is_never_in_memory(storage: Storage, device: ObjectStorage) -> None:
    storage.mood = "whole"
    assert [len(part) for part in device.read(storage.url, 1 << 19, 1 << 20)] == [1 << 18, 1 << 18]


@pytest.mark.parametrize("mood", ["another range", "unnamed range", "elsewhere", "forbidden", "short"])
def test_a_server_that_does_something_else_is_given_up(storage: Storage, device: ObjectStorage, mood: str) -> None:
    storage.mood = mood
    with pytest.raises(StorageFailed) as error:
        list(device.read(storage.url, 100, 200))
    assert not device.is_usable and "http" not in str(error.value) and SECRET not in str(error.value)
    assert len(storage.requests) == (ATTEMPTS if mood == "short" else 1)


@pytest.mark.parametrize("mood", ["elsewhere", "forbidden", "broken", "long"])
def test_an_upload_that_fails_is_given_up(storage: Storage, device: ObjectStorage, mood: str) -> None:
    storage.mood = mood
    with pytest.raises(StorageFailed):
        device.write(storage.url, 6, lambda: [b"abc", memoryview(b"def")])
    assert len(storage.requests) == (ATTEMPTS if mood == "broken" else 1)


def test_an_upload_that_the_server_was_too_busy_for_is_repeated(storage: Storage, device: ObjectStorage) -> None:
    storage.mood = "busy"
    device.write(storage.url, 6, lambda: [b"abc", memoryview(b"def")])
    assert storage.body == b"abcdef" and len(storage.requests) == ATTEMPTS
    assert {name.lower() for name in storage.requests[-1][2]} == {"host", "content-length"}, "no token, no cookie"


def test_storage_that_failed_is_tried_again_after_a_while() -> None:
    now = 100.0
    device = ObjectStorage("http://127.0.0.1:8470", Deadline(), clock=lambda: now, sleep=lambda seconds: None)
    with pytest.raises(StorageFailed, match="ConnectError"):
        device.write("http://127.0.0.1:1/x?secret", 1, lambda: [b"x"])
    assert not device.is_usable
    now += REST
    assert device.is_usable
    device.close()


def test_a_task_that_is_over_ends_a_transfer(storage: Storage) -> None:
    deadline = Deadline()
    device = ObjectStorage("http://127.0.0.1:8470", deadline)
    deadline.begin(-1.0)
    for transfer in (
        lambda: list(device.read(storage.url, 0, 100)),
        lambda: device.write(storage.url, 1, lambda: [b"x"]),
    ):
        with pytest.raises(OverLimit):
            transfer()
    device.close()


@pytest.mark.parametrize(
    ("server", "url", "why"),
    [
        ("https://coordinator.example", "http://8.8.8.8/x", "without TLS"),
        ("http://8.8.8.8", "ftp://8.8.4.4/x", "http or https"),
        ("http://8.8.8.8", "file:///etc/passwd", "http or https"),
        ("http://8.8.8.8", "http://user:word@8.8.4.4/x", "http or https"),
        ("http://8.8.8.8", "http://8.8.4.4/\nx", "no URL"),
        ("http://8.8.8.8", "http://8.8.4.4/" + "x" * 10_000, "no URL"),
        ("http://8.8.8.8", "http://192.168.1.1/x", "nearer"),
        ("http://8.8.8.8", "http://[::ffff:10.0.0.1]/x", "nearer"),
        ("http://8.8.8.8", "http://127.0.0.1:22/x", "nearer"),
        ("http://192.168.1.7", "http://169.254.169.254/latest/meta-data", "nearer"),
        ("http://192.168.1.7", "http://localhost:9000/x", "nearer"),
        ("http://192.168.1.7", "http://[fe80::1]/x", "nearer"),
        ("http://8.8.8.8", "http://no.such.host.invalid/x", "gaierror"),
        ("http://8.8.8.8", "http://[", "InvalidURL|gaierror"),
    ],
)
def test_a_coordinator_cannot_send_a_device_anywhere(server: str, url: str, why: str) -> None:
    device = ObjectStorage(server, Deadline(), sleep=lambda seconds: None)
    with pytest.raises(StorageFailed, match=why) as error:
        device.write(url, 1, lambda: [b"x"])
    assert url not in str(error.value)
    device.close()


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("http://192.168.1.7", "http://10.0.0.2:9000/x"),
        ("https://192.168.1.7", "https://8.8.8.8/x"),
        ("http://127.0.0.1:8470", "http://192.168.1.1/x"),
    ],
)
def test_where_storage_may_be(server: str, url: str) -> None:
    assert str(ObjectStorage(server, Deadline())._allowed(url)) == url


def test_a_url_is_in_no_log(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the level, and also if the storage fails; the rest of the weights comes from the coordinator."""
    caplog.set_level(logging.DEBUG)
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        start, stop = (int(n) for n in request.headers["Range"].removeprefix("bytes=").split("-"))
        return httpx.Response(206, content=CONTENT[start : stop + 1])

    with DeviceClient("http://127.0.0.1:8470", "token", transport=httpx.MockTransport(answer)) as client:
        client._storage._sleep = lambda seconds: None
        for mood in ("range", "short"):
            storage.mood = mood
            assert b"".join(client.weights("job", 1, 0, 1000, storage.url)) == CONTENT[:1000]
        assert [request.headers["Range"] for request in asked] == ["bytes=993-999"]
        assert b"".join(client.weights("job", 1, 0, 1000, storage.url)) == CONTENT[:1000], "it rests"
    assert all("Authorization" not in headers for _, _, headers in storage.requests)
    assert "object storage: its answer ended" in caplog.text and SECRET not in caplog.text


def test_a_certificate_that_is_no_file_is_no_way_out(tmp_path: Path) -> None:
    device = ObjectStorage("http://127.0.0.1:8470", Deadline(), tmp_path / "missing.pem")
    with pytest.raises(StorageFailed):
        device.write("https://127.0.0.1:1/x", 1, lambda: [b"x"])
