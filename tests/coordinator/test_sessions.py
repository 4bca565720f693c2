"""Sessions of pages, attacked over real sockets: what a browser would send, and what a stranger would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator import sessions
from coordinator.api import live_routes
from coordinator.api.limits import TRIES_AT_ONCE
from coordinator.credentials import new_token
from coordinator.store.schema import META, SESSIONS
from federation.job import plan_from
from tests.coordinator.harness import Site, place_bundle, serving
from tests.coordinator.test_benchmarks import told

OWN = {"Embrace-Request": "dashboard", "Sec-Fetch-Site": "same-origin"}  # what the coordinator's own page sends


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """A server of a test's own."""
    with serving(tmp_path) as found:
        yield found


@contextmanager
def page(site: Site, **headers: str) -> Iterator[httpx.Client]:
    """A browser that signed in: it has the cookie, and no token."""
    with site.http() as client:
        sign_in(client, site.admin).raise_for_status()
        client.headers.update({**OWN, **headers})
        yield client


def sign_in(client: httpx.Client, token: str, **headers: str) -> httpx.Response:
    return client.post("/v1/session", headers={"Authorization": f"Bearer {token}", **headers})


def cookie_of(answer: httpx.Response) -> dict[str, str]:
    """The cookie that an answer sets; attributes that have no value are empty."""
    parts = [part.strip().partition("=") for part in answer.headers["set-cookie"].split(";")]
    return {name.lower(): value for name, _, value in parts[1:]} | {"value": parts[0][2]}


def test_the_cookie_is_out_of_reach_of_scripts_other_sites_and_logs(site: Site, caplog: Any) -> None:
    with caplog.at_level("DEBUG"), site.http() as client:
        answer = sign_in(client, site.admin)
        cookie = cookie_of(answer)
        client.get("/v1/session").raise_for_status()
    assert answer.status_code == 201
    assert "httponly" in cookie and cookie["samesite"] == "strict" and cookie["path"] == "/v1"
    assert 0 < int(cookie["max-age"]) <= 24 * 3600
    assert "secure" not in cookie  # a browser would not send it back over http
    logged = str([vars(record) for record in caplog.records if not record.name.startswith("httpcore")])  # the client's
    assert "/v1/session" in logged and cookie["value"] not in logged and site.admin not in logged
    assert cookie["value"] not in answer.text


def test_over_tls_that_a_proxy_ends_the_cookie_is_secure(site: Site) -> None:
    with site.http() as client:
        assert "secure" in cookie_of(sign_in(client, site.admin, Origin="https://fleet.example"))


def test_a_page_that_signed_in_reads_and_changes(site: Site) -> None:
    with page(site) as client:
        assert client.get("/v1/session").json()["expires_at"] > 0
        assert isinstance(client.get("/v1/fleet").json()["devices"], list)
        assert client.post("/v1/enrolments", json={"uses": 2}).status_code == 201


@pytest.mark.parametrize("token", ["wrong", "embrace_admin_wrong"])
def test_no_other_token_signs_in(site: Site, token: str) -> None:
    site.server.app.state.tries = type(site.server.app.state.tries)(1000.0, 1000.0)
    with site.http() as client:
        assert sign_in(client, token).status_code == 401
        assert not client.cookies


def test_the_tokens_of_devices_and_invitations_do_not_sign_in(site: Site) -> None:
    with site.http() as client:
        for token in (site.enrol()[1], site.server.registry.invite(1, 60), new_token("session")):
            assert sign_in(client, token).status_code == 401
        assert not client.cookies


def test_a_session_opens_no_longer_one(site: Site) -> None:
    with page(site) as client:
        assert client.post("/v1/session").status_code == 401


def test_without_a_cookie_or_with_a_forged_one_nothing_is_served(site: Site) -> None:
    with page(site) as client:
        (cookie,) = client.cookies.jar
    made_up = [None, "", "x", new_token("session"), f"{cookie.value}x", site.admin, site.enrol()[1]]
    for value in made_up:
        with site.http() as client:
            if value is not None:
                client.cookies.set(cookie.name, value)
            for method, path in (("GET", "/v1/session"), ("GET", "/v1/jobs"), ("DELETE", "/v1/session")):
                assert client.request(method, path, headers=OWN).status_code == 401, (value, path)


def test_the_token_of_a_session_is_none_in_the_header(site: Site) -> None:
    with page(site) as client:
        (cookie,) = client.cookies.jar
    with site.http(cookie.value) as client:
        assert client.get("/v1/jobs").status_code == 401


def test_a_session_is_no_device_and_no_invitation(site: Site) -> None:
    with page(site) as client:
        assert client.post("/v1/tasks/next?wait=0").status_code == 401
        assert client.post("/v1/devices", json={"name": "page"}).status_code == 401


# What the browser tells about a request that another page makes, with the cookie: same site, but another port; another
# site (which SameSite keeps the cookie from, in browsers); an older browser, which sends Origin alone; a form.
FOREIGN = (
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "none"},
    {},
)


@pytest.mark.parametrize("told", FOREIGN)
def test_another_page_changes_nothing_with_the_cookie(site: Site, told: dict[str, str]) -> None:
    job = site.server.coordinator.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    with site.http() as client:
        sign_in(client, site.admin).raise_for_status()
        for more in ({}, {"Embrace-Request": "dashboard"}):
            headers = {**told, **more}
            assert client.post(f"/v1/jobs/{job}/stop", headers=headers).status_code == 401
            assert client.delete(f"/v1/jobs/{job}?force=1", headers=headers).status_code == 401
            assert client.post("/v1/enrolments", json={}, headers=headers).status_code == 401
            assert client.delete("/v1/session", headers=headers).status_code == 401
        client.get("/v1/session").raise_for_status()  # it is still open
    assert site.server.coordinator.job_state(job) == "running"
    site.server.coordinator.set_state(job, "stopped")


def test_another_page_reads_nothing_with_the_cookie(site: Site) -> None:
    with page(site) as client:
        for told in ("same-site", "cross-site"):
            assert client.get("/v1/jobs", headers={"Sec-Fetch-Site": told}).status_code == 401


def test_the_own_page_needs_its_header(site: Site) -> None:
    with page(site) as client:
        del client.headers["Embrace-Request"]
        assert client.post("/v1/enrolments", json={}).status_code == 401


def test_an_older_browser_is_believed_by_its_origin(site: Site) -> None:
    with page(site, Origin=site.url) as client:
        del client.headers["Sec-Fetch-Site"]
        assert client.post("/v1/enrolments", json={}).status_code == 201


def test_the_token_in_the_header_needs_none_of_this(site: Site) -> None:
    with site.http(site.admin) as client:
        assert client.post("/v1/enrolments", json={}, headers={"Origin": "https://else.example"}).status_code == 201


def test_a_wrong_token_in_the_header_is_not_made_good_by_a_cookie(site: Site) -> None:
    with page(site) as client:
        assert client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_after_signing_out_the_cookie_is_worth_nothing(site: Site) -> None:
    with page(site) as client:
        (cookie,) = client.cookies.jar
        answer = client.delete("/v1/session")
        assert answer.status_code == 204 and cookie_of(answer)["max-age"] == "0"
        assert not client.cookies
        client.cookies.set(cookie.name, cookie.value)  # a thief kept it
        assert client.get("/v1/session").status_code == 401
    site.server.registry.sessions._known.clear()  # as after a restart
    with site.http() as client:
        client.cookies.set(cookie.name, cookie.value)
        assert client.get("/v1/session", headers=OWN).status_code == 401


def test_a_session_ends_by_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    known = site.server.registry.sessions
    with page(site) as client:
        client.get("/v1/session").raise_for_status()
        later = known._clock() + sessions.LIFE
        monkeypatch.setattr(known, "_clock", lambda: later)
        assert client.get("/v1/session").status_code == 401
        known._known.clear()
        assert client.get("/v1/session").status_code == 401  # by the database, too


def test_sessions_survive_a_restart_and_end_with_the_token(tmp_path: Path) -> None:
    with serving(tmp_path) as before, page(before) as client:
        (cookie,) = client.cookies.jar
    value = cookie.value
    with serving(tmp_path) as after:
        headers = {"Cookie": f"embrace_session_{httpx.URL(after.url).port}={value}"}
        with after.http() as client:
            client.get("/v1/session", headers=headers).raise_for_status()
        with after.server.coordinator.repository.begin() as session:
            session.execute(META.delete().where(META.c.key == sessions.ADMIN_KEY))
    with serving(tmp_path) as replaced, replaced.http() as client:
        headers = {"Cookie": f"embrace_session_{httpx.URL(replaced.url).port}={value}"}
        assert replaced.admin
        assert client.get("/v1/session", headers=headers).status_code == 401


def test_the_database_has_no_token_and_not_endlessly_many(own_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    with page(own_site) as first, own_site.http() as client:
        for _ in range(4):
            sign_in(client, own_site.admin).raise_for_status()
        assert first.get("/v1/session").status_code == 401  # the oldest had to go
        token = next(iter(client.cookies.jar)).value
        client.get("/v1/session").raise_for_status()
    with own_site.server.coordinator.repository.reading() as session:
        rows = session.execute(SESSIONS.select()).all()
    assert len(rows) == 3
    assert not [row for row in rows if token in map(str, row)]


def test_wrong_tries_are_slowed_and_the_right_token_is_not(own_site: Site) -> None:
    with own_site.http() as client:
        answers = [sign_in(client, f"wrong {number}") for number in range(int(TRIES_AT_ONCE) + 3)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and all(answer.status_code in (401, 429) for answer in answers)
        assert int(refused[0].headers["retry-after"]) >= 1
        assert sign_in(client, own_site.admin).status_code == 201


# --- what a page streams ---------------------------------------------------------------------------------------------


def messages(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The messages of a stream as they come; comments are left out."""
    found: dict[str, Any] = {}
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if line == "" and "data" in found:
            yield {**found, "data": json.loads(found["data"])}
        found = {} if line == "" else {**found, name: value}


def a_job(site: Site) -> str:
    return site.server.coordinator.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]


def test_a_page_sees_what_happens_in_all_jobs_and_goes_on_where_it_was(site: Site) -> None:
    with page(site) as client:
        with client.stream("GET", "/v1/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            seen = messages(answer)
            assert next(seen)["event"] == "fleet"
            first = a_job(site)
            told = next(found for found in seen if found["data"].get("kind") == "JobCreated")
            assert told["data"]["job"] == first and int(told["id"]) == told["data"]["id"]
        second = a_job(site)  # while the page was away
        site.server.coordinator.set_state(second, "stopped")
        with client.stream("GET", "/v1/events?seconds=0", headers={"Last-Event-ID": told["id"]}) as answer:
            missed = [found for found in messages(answer) if "id" in found]
        assert [found["data"]["job"] for found in missed] == [second] * len(missed)
        assert {"JobCreated", "JobState"} <= {found["data"]["kind"] for found in missed}


def test_a_page_hears_of_devices_that_come(site: Site) -> None:
    with page(site) as client, client.stream("GET", "/v1/events") as answer:
        seen = messages(answer)
        before = sum(next(seen)["data"].values())
        site.enrol()
        after = next(found for found in seen if found.get("event") == "fleet")
        assert sum(after["data"].values()) == before + 1


def test_a_page_hears_of_benchmarks(site: Site) -> None:
    _, token = site.enrol()
    with page(site) as client, client.stream("GET", "/v1/events") as answer:
        seen = (found["data"] for found in messages(answer) if found.get("event") == "benchmarks")
        before = next(seen)
        with site.http(token) as device:
            document = told(site.bundle)  # type: ignore[attr-defined]
            device.put("/v1/devices/me/benchmark", json=document).raise_for_status()
        assert next(seen)["at"] > (before["at"] or 0.0)


@pytest.mark.parametrize("number", ["x", "-1", "1e3", "9" * 30, "²"])
def test_a_number_of_an_event_that_is_none_is_refused(site: Site, number: str) -> None:
    with page(site) as client:
        headers = {"Last-Event-ID": number.encode()}
        assert client.get("/v1/events?seconds=0", headers=headers).status_code == 400  # type: ignore[arg-type]


def test_a_stream_ends_when_its_page_signs_out(site: Site) -> None:
    with page(site) as client, client.stream("GET", "/v1/events") as answer:
        seen = messages(answer)
        next(seen)
        with site.http() as other:
            other.cookies.update(client.cookies)
            other.delete("/v1/session", headers=OWN).raise_for_status()
        assert not [found for found in seen if "id" in found]  # which ends


def test_streams_are_bounded_and_take_no_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_routes, "MOST_STREAMS", 12)
    with page(site) as client, ExitStack() as stack:
        before = threading.active_count()
        seen = [messages(stack.enter_context(client.stream("GET", "/v1/events"))) for _ in range(12)]
        assert [next(found)["event"] for found in seen] == ["fleet"] * 12
        assert threading.active_count() <= before + 8  # the threads that all requests share
        refused = client.get("/v1/events?seconds=0")
        assert refused.status_code == 503 and "12 streams" in refused.json()["detail"]
        client.get("/v1/fleet").raise_for_status()  # all else goes on


def test_two_coordinators_of_a_host_do_not_share_a_cookie(site: Site, own_site: Site) -> None:
    place_bundle(own_site.directory)
    with site.http() as one, own_site.http() as other:
        names = [
            next(iter(client.cookies.jar)).name
            for client in (one, other)
            if sign_in(client, _admin(client, site, own_site))
        ]
    assert len(set(names)) == 2


def _admin(client: httpx.Client, *sites: Site) -> str:
    return next(site.admin for site in sites if httpx.URL(site.url).port == client.base_url.port)
