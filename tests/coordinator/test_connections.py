"""What connections alone may take: descriptors, and patience with addresses from which enrolments fail."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from coordinator.api import app
from coordinator.api.limits import FAILED_AT_ONCE, Buckets
from coordinator.connections import PAUSE, RESERVED, Connections, parse_networks
from coordinator.settings import Settings
from federation.errors import FieldError
from tests.coordinator.harness import serving
from tests.live_server import live_server, next_task, send_update
from tests.waiting import PATIENCE, wait_until

HELD = 300


def test_an_address_has_half_of_all_connections_and_a_proxy_all() -> None:
    doors = Connections(1000 + RESERVED, 990, "10.1.0.0/16, ::1")
    assert doors.most == 628, "half of the descriptors at least"
    doors = Connections(1010 + RESERVED, 10, "10.1.0.0/16, ::1")
    assert doors.most == 1000
    assert sum(doors.enter("192.0.2.1") for _ in range(600)) == 500
    assert sum(doors.enter("192.0.2.2") for _ in range(100)) == 100
    assert sum(doors.enter("10.1.2.3") for _ in range(600)) == 400
    assert not doors.enter("192.0.2.3"), "all are taken"
    doors.leave("192.0.2.1")
    assert doors.enter("192.0.2.3") and not doors.enter("192.0.2.3")
    for _ in range(400):
        doors.leave("10.1.2.3")
    assert sum(doors.enter("::1") for _ in range(600)) == 400
    unbounded = Connections(None, 10)
    assert all(unbounded.enter("192.0.2.1") for _ in range(5000))


def test_connections_that_are_refused_make_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    doors = Connections(4, 0, clock=lambda: now[0])
    for _ in range(9):
        doors.enter("192.0.2.1")
    assert [record.facts["address"] for record in caplog.records] == ["192.0.2.1"]  # type: ignore[attr-defined]
    now[0] += PAUSE
    doors.enter("192.0.2.1")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("bad", ["*", "proxy.example", "10.0.0.0/33", "10.0.0.1/8", "", ",", "10.0.0.1;10.0.0.2"])
def test_a_proxy_is_an_address_or_a_network(bad: str) -> None:
    with pytest.raises(FieldError, match="proxy: expected addresses such as"):
        Settings(proxy=bad)
    assert parse_networks(" 10.0.0.1 ,fd00::/8") == ["10.0.0.1", "fd00::/8"]


def test_a_crowd_of_connections_leaves_descriptors_for_updates(tmp_path: Path) -> None:
    """The process may open 512 files; hundreds of clients connect from one address, and a device works at another."""
    bounded = ("sh", "-c", 'ulimit -n 512 && exec "$@"', "sh", sys.executable, "-m", "embrace")
    with live_server(tmp_path, command=bounded) as server, ExitStack() as stack:
        server.create_job(tmp_path / "bundle", num_rounds=100)
        device = server.enrol()
        crowd = []
        for _ in range(HELD):
            made = stack.enter_context(socket.socket())
            made.settimeout(PATIENCE)
            made.bind(("127.0.0.2", 0))
            made.connect(server.address)
            crowd.append(made)
        refused = sum(is_refused(connection) for connection in crowd)
        assert HELD - refused == 128, "half of half of the descriptors"
        for _ in range(3):
            assert send_update(device, next_task(device)["id"]).status_code == 201
        server.wait_for_log("connections are refused")
        assert "traceback" not in server.log.lower()


def is_refused(connection: socket.socket) -> bool:
    """Whether a server closed a connection before anything was asked; one that is served answers."""
    try:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection.recv(12) != b"HTTP/1.1 200"
    except ConnectionError:
        return True


def test_what_is_left_can_be_asked_for_without_taking_it() -> None:
    buckets = Buckets(rate=1.0, burst=2.0)
    assert [buckets.until_next("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [buckets.take("a", 0.0) for _ in range(2)] == [0.0, 0.0]
    assert (buckets.until_next("a", 0.0), buckets.until_next("a", 0.5), buckets.until_next("b", 0.0)) == (1.0, 0.5, 0.0)


def enrol(client: httpx.Client, token: str, **headers: str) -> httpx.Response:
    given = {"Authorization": f"Bearer {token}", **headers}
    return client.post("/v1/devices", json={"name": "a", "profile": {}}, headers=given)


@pytest.mark.parametrize("route", ["devices", "jobs/open"])
def test_an_address_from_which_enrolments_fail_has_to_wait_and_others_have_not(tmp_path: Path, route: str) -> None:
    with live_server(tmp_path) as server, guessing(server.url) as bad, httpx.Client(base_url=server.url) as good:
        device = enrol(bad, server.enrolment).json()["token"]
        assert guess(bad, route) == {401, 429}
        refused = enrol(bad, server.enrolment)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert "too many enrolments from this address have failed" in refused.text
        assert enrol(good, server.enrolment).status_code == 201, "another address"
        bad.headers["Authorization"] = f"Bearer {device}"
        assert bad.get("/v1/jobs/open").status_code == 200, "a device that is known is not slowed down"


def guess(client: httpx.Client, route: str, **headers: str) -> set[int]:
    """Try made-up tokens until something else is answered; one more may fail with each second that this takes."""
    told: set[int] = set()
    for number in range(int(FAILED_AT_ONCE + PATIENCE)):
        given = {"Authorization": f"Bearer made-up-{number}", **headers}
        if route == "devices":
            told.add(enrol(client, f"made-up-{number}", **headers).status_code)
        else:
            told.add(client.get(f"/v1/{route}", headers=given).status_code)
        if len(told) > 1:
            break
    return told


def guessing(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, transport=httpx.HTTPTransport(local_address="127.0.0.2"))


def test_behind_a_proxy_limits_are_those_of_its_clients_and_no_other_machine_can_claim_that(tmp_path: Path) -> None:
    with live_server(tmp_path, proxy="127.0.0.2") as server, guessing(server.url) as proxy:
        assert guess(proxy, "devices", **{"X-Forwarded-For": "192.0.2.7"}) == {401, 429}
        assert enrol(proxy, server.enrolment, **{"X-Forwarded-For": "192.0.2.7"}).status_code == 429
        assert enrol(proxy, server.enrolment, **{"X-Forwarded-For": "192.0.2.8"}).status_code == 201
        # What a client writes itself stands to the left of what the proxy adds.
        forged = {"X-Forwarded-For": "192.0.2.9, 192.0.2.7"}
        assert enrol(proxy, server.enrolment, **forged).status_code == 429
        with httpx.Client(base_url=server.url) as direct:
            claimed = {"X-Forwarded-For": "192.0.2.7"}
            assert enrol(direct, server.enrolment, **claimed).status_code == 201, "not from the proxy: not believed"


def test_however_many_clients_ask_whether_it_is_ready_the_database_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(app, "READY", PATIENCE)
    with serving(tmp_path) as site, site.http() as client:
        fails = [True]

        def check(session: object) -> None:
            asked.append(1)
            if fails:
                raise OperationalError("SELECT", None, OSError("the database is gone"))

        monkeypatch.setattr(site.server.coordinator.repository, "ping", check)
        assert client.get("/readyz").status_code == 503
        fails.clear()
        wait_until(lambda: client.get("/readyz").status_code == 200)  # what failed is not kept
        before = len(asked)
        with ThreadPoolExecutor(20) as crowd:
            answers = list(crowd.map(lambda _: client.get("/readyz").status_code, range(100)))
        assert set(answers) == {200} and len(asked) == before
