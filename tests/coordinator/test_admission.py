"""Admission: places are passed on, and slow clients keep no other client waiting, seen from real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from coordinator.api import admission
from coordinator.api.admission import PLACES, Admission, Place, Places
from coordinator.api.auth import Identity
from coordinator.api.limits import ClientLimits, Transfer
from tests.live_server import LiveServer, live_server, make_bundle, next_task, zero_update
from tests.waiting import PATIENCE

WIDTH = 100_000  # of the model: 3.2 MB, more than the buffers on the way to a client hold
MANY = 10 * PLACES
REPORT = {"Embrace-Report": '{"samples": 1}'}


# --- places --------------------------------------------------------------------------------------------------------


def moving(count: int = 0) -> Transfer:
    return SimpleNamespace(moved=count)  # type: ignore[return-value]


def test_places_are_taken_in_order_and_left_once() -> None:
    async def play() -> list[int]:
        places, begun, held = Places(2), [], {}

        async def work(number: int) -> None:
            held[number] = await places.take(moving())
            begun.append(number)

        tasks = [asyncio.ensure_future(work(number)) for number in range(4)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert begun == [0, 1]
        held[1].leave()
        held[1].leave()
        await tasks[2]
        assert begun == [0, 1, 2]
        held[0].leave()
        await tasks[3]
        return begun

    assert asyncio.run(play()) == [0, 1, 2, 3]


def test_a_request_that_moves_too_little_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PATIENCE", 0.01)

    async def play() -> None:
        places = Places(1)
        idle = moving()
        assert await places.take(idle) is not None
        assert isinstance(await places.take(moving()), Place)  # once the first has lost it

    asyncio.run(play())


def test_a_request_that_moves_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PATIENCE", 0.01)
    monkeypatch.setattr(admission, "LEAST_MOVED", -1)  # whatever it moves is enough
    monkeypatch.setattr(admission, "LONGEST_WAIT", 0.2)

    async def play() -> None:
        places = Places(1)
        held = await places.take(moving())
        assert held is not None
        assert await places.take(moving()) is None  # and the next goes on without one
        held.leave()
        assert await places.take(moving()) is not None

    asyncio.run(play())


# --- a real server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("admission")
    make_bundle(folder / "bundle", WIDTH)
    with live_server(folder, requests_per_second=10_000) as running:
        # However busy the machine is, no device is late: what is tested is whether its request is served.
        running.create_job(folder / "bundle", num_rounds=1000, participate={"lateness": 1000.0, "grace": 60.0})
        yield running


@pytest.fixture
def slow(server: LiveServer) -> Iterator[ExitStack]:
    """Connections that are held until the test ends."""
    with ExitStack() as held:
        yield held
    server.retire_devices()


def authorised(device: httpx.Client, line: str, *headers: str) -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: x", f"Authorization: {device.headers['Authorization']}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def begin(server: LiveServer, held: ExitStack, request: bytes) -> None:
    """Send the beginning of a request, many times, and read nothing."""
    for _ in range(MANY):
        made = held.enter_context(socket.socket())
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(server.address)
        made.sendall(request)


def is_served(server: LiveServer, device: httpx.Client, task: str) -> None:
    """Health and a device's whole update, within the ten seconds of its client."""
    assert httpx.get(f"{server.url}/healthz", timeout=10).status_code == 200
    answer = device.put(f"/v1/tasks/{task}/update", content=zero_update(width=WIDTH), headers=REPORT)
    assert answer.status_code == 201, answer.text


def test_slow_bodies_without_a_token(server: LiveServer, slow: ExitStack) -> None:
    device = server.enrol()
    task = next_task(device)["id"]
    begin(server, slow, b"POST /v1/devices HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    is_served(server, device, task)


def test_slow_bodies_of_a_device(server: LiveServer, slow: ExitStack) -> None:
    device, other = server.enrol(), server.enrol()
    task, held = next_task(device)["id"], next_task(other)["id"]
    length = f"Content-Length: {len(zero_update(width=WIDTH))}"
    begin(server, slow, authorised(other, f"PUT /v1/tasks/{held}/update", length, 'Embrace-Report: {"samples": 1}'))
    is_served(server, device, task)


def test_slow_readers_of_a_large_file(server: LiveServer, slow: ExitStack) -> None:
    device, other = server.enrol(), server.enrol()
    task = next_task(device)
    begin(server, slow, authorised(other, f"GET /v1/jobs/{task['job']}/versions/{task['version']}/weights"))
    is_served(server, device, task["id"])


def test_half_headers(server: LiveServer, slow: ExitStack) -> None:
    device = server.enrol()
    task = next_task(device)["id"]
    begin(server, slow, b"GET /healthz HTTP/1.1\r\nHost: ")
    is_served(server, device, task)


def test_long_polls(server: LiveServer, slow: ExitStack) -> None:
    device, other = server.enrol(), server.enrol()
    task = next_task(device)["id"]
    next_task(other)
    begin(server, slow, authorised(other, "POST /v1/tasks/next?wait=30", "Content-Length: 0"))
    is_served(server, device, task)


def test_a_body_that_is_not_wanted_is_not_read(server: LiveServer) -> None:
    """A device that may not send is refused before its body has come."""
    device = server.enrol()
    with server.connect() as connection:
        length = f"Content-Length: {1 << 30}"
        connection.sendall(authorised(device, "PUT /v1/tasks/x-0-0-1/update", length, 'Embrace-Report: {"samples": 1}'))
        assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")


def test_requests_that_waited_too_long_together_do_not_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(admission, "BETWEEN", 3600.0)
    monkeypatch.setattr(admission, "PATIENCE", 3600.0)

    async def play() -> None:
        places = Places(1)
        first = await places.take(moving())
        waiting = [asyncio.ensure_future(places.take(moving())) for _ in range(3)]
        assert await waiting[0] is None
        await asyncio.sleep(0.2)
        assert not waiting[1].done() and not waiting[2].done()
        waiting[1].cancel()
        assert first is not None
        first.leave()
        assert isinstance(await waiting[2], Place)

    asyncio.run(play())


def test_a_place_that_is_offered_to_a_cancelled_request_goes_to_the_next() -> None:
    async def play() -> None:
        places = Places(1)
        first = await places.take(moving())
        waiting = [asyncio.ensure_future(places.take(moving())) for _ in range(2)]
        await asyncio.sleep(0)
        assert first is not None
        first.leave()  # offered to the first that waits, which is cancelled before it hears of it
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert await waiting[1] is not None

    asyncio.run(play())


def test_tokens_that_no_client_has_are_looked_up_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database answers slowly, wrong tokens take two threads and no more, and a known device passes them."""
    asked, most, release = [0], [0], threading.Event()

    def slow(token: str, registry: object) -> Identity:
        asked[0] += 1
        most[0] = max(most[0], asked[0])
        release.wait(PATIENCE)
        asked[0] -= 1
        return Identity(token)

    def sender(scope: Scope, registry: object, coordinator: object) -> Identity | str:
        known = dict(scope["headers"]).get(b"authorization") == b"known"
        return Identity("known", "known", "device") if known else "wrong"

    monkeypatch.setattr(admission, "look_up", slow)
    monkeypatch.setattr(admission, "recognise", sender)

    async def play() -> list[int]:
        served: list[int] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(len(served))

        async def ask(authorization: bytes) -> None:
            scope = {"type": "http", "method": "GET", "path": "/v1/jobs", "query_string": b""}
            headers, app = [(b"authorization", authorization)], SimpleNamespace(state=state)
            await gate({**scope, "headers": headers, "app": app}, _never, _ignore)

        state = SimpleNamespace(registry=None, coordinator=None)
        gate = Admission(application, ClientLimits())
        crowd = [asyncio.ensure_future(ask(b"wrong")) for _ in range(50)]
        while asked[0] < 2:
            await asyncio.sleep(0.01)
        await ask(b"known")
        assert served == [0] and most[0] == 2
        release.set()
        await asyncio.gather(*crowd)
        return served

    assert len(asyncio.run(play())) == 51
    assert most[0] <= 2


async def _never() -> Message:
    raise AssertionError("no body is read")


async def _ignore(message: Message) -> None:
    """Send the answer to no client."""
