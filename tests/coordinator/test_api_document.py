"""What the OpenAPI document promises is what is answered; each of these was found by `make fuzz`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from federation.job import plan_from
from tests.coordinator.harness import Site

TOO_LARGE = 2**31  # for a database


@pytest.fixture
def job(site: Site) -> str:
    """A job that is over."""
    service = site.server.coordinator
    made = service.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    service.set_state(made, "stopped")
    return made


def documented(site: Site, method: str, route: str) -> dict[str, Any]:
    return dict(httpx.get(f"{site.url}/openapi.json").json()["paths"][route][method]["responses"])


@pytest.mark.parametrize("table", ["timings", "timings.csv"])
def test_a_round_that_no_database_can_count_to(site: Site, job: str, table: str) -> None:
    with site.http(site.admin) as admin:
        assert admin.get(f"/v1/jobs/{job}/{table}?first_round={TOO_LARGE}").status_code == 422
        assert admin.get(f"/v1/jobs/{job}/{table}?first_round={2**31 - 1}").status_code == 200


def test_an_event_that_no_database_can_count_to(site: Site, job: str) -> None:
    with site.http(site.admin) as admin:
        assert admin.get(f"/v1/jobs/{job}/events?after={TOO_LARGE}").status_code == 422
        refused = admin.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": str(TOO_LARGE)})
    assert refused.status_code == 400
    assert {"400", "422"} <= documented(site, "get", "/v1/jobs/{job}/events").keys()


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/jobs", {"GET", "POST"}),
        ("/v1/devices", {"GET", "POST"}),
        ("/v1/devices/d", {"DELETE", "GET"}),
        ("/v1/jobs/j/events", {"GET"}),
        ("/v1/jobs/j/pause", {"POST"}),
        ("/healthz", {"GET"}),
    ],
)
def test_another_method_is_told_which_there_are(site: Site, path: str, methods: set[str]) -> None:
    for method in {"DELETE", "GET", "OPTIONS", "POST", "PUT"} - methods:
        answer = httpx.request(method, f"{site.url}{path}")
        assert answer.status_code == 405 and set(answer.headers["allow"].split(", ")) == methods, method


def test_a_name_that_cannot_be_a_job(site: Site) -> None:
    with site.http(site.admin) as admin:
        assert admin.get("/v1/jobs/%C3%BB..%C2%B5/versions/0/file").status_code == 404


def test_the_manifest_is_json(site: Site) -> None:
    with site.http(site.enrol()[1]) as device:
        answer = device.get(f"/v1/bundles/{site.bundle}/manifest")  # type: ignore[attr-defined]
        assert answer.headers["content-type"] == "application/json" and answer.json()["layers"]
        assert device.get("/v1/bundles/%C3%97/manifest").status_code == 400
    assert {"400", "404"} <= documented(site, "get", "/v1/bundles/{digest}/manifest").keys()


@pytest.mark.parametrize("route", ["/v1/enrolments", "/v1/jobs"])
def test_a_body_that_is_not_even_text(site: Site, route: str) -> None:
    with site.http(site.admin) as admin:
        answer = admin.post(route, content=b"\xf7\xff", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/problem+json"
    assert "400" in documented(site, "post", route)
