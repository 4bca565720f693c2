"""Odd requests to the routes of a device: each is answered with the right kind of refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from federation.job import plan_from
from tests.coordinator.harness import Offer, Site, body_of, report_header

WEIGHTS, NEXT, UPDATE = "GET /v1/jobs/{job}/versions/0/weights", "POST /v1/tasks/next", "PUT /v1/tasks/{task}/update"
REPORTS = [
    "",
    "no json",
    "[]",
    "{}",
    '{"samples": 0}',
    '{"samples": true}',
    '{"samples": 1, "x": NaN}',
    "[" * 9000,
    "x" * 16_385,
]
BODIES = {
    "good": lambda body: body,
    "empty": lambda body: b"",
    "short": lambda body: body[:-1],
    "long": lambda body: body + b"x",
    "nan": lambda body: body[:-4] + b"\xff\xff\xff\xff",
    "noise": lambda body: b"\xff" * 300,
    "far too long": lambda body: bytes(100_000),
}


@dataclass(frozen=True)
class Asked:
    """A request; `who` has the task, or is another client."""

    line: str
    who: str = "holder"
    headers: tuple[tuple[str, str], ...] = ()
    body: str = ""
    reported: bool = True  # an update with a report that is in order


NO_TASKS = [
    "x",
    "next",
    "{job}",
    "{job}-0-0-2",
    "{job}-0-0-01",
    "{job}-0-9-1",
    "{job}-7-0-1",
    "{job}-0-0-1%0A",
    "%2e%2e",
    "a%2fb",
    "{job}-0-%D9%A0-1",
    "%00",
    "%FF",
    "a" * 500,
]
WAITS = [
    "wait=61",
    "wait=-1",
    "wait=",
    "wait=.",
    "wait=nan",
    "wait=1e9",
    "wait=%D9%A3",
    "wait=x&wait=0",
    "wait=0&wait=x",
    "wait=0&wait=99",
    "x=1&wait=0",
    "wait=00000000000",
    "wait=0.00001",
    "wait=0.",
    "WAIT=x&wait=0",
]
ODD = [
    "GET /v1/tasks/next",
    "POST /v1/tasks/next/",
    "POST /v1/tasks/%6eext?wait=0",
    "POST /v1//tasks/next",
    "POST /v1/tasks/next%0A?wait=0",
    "POST /V1/tasks/next",
]
VERSIONS = [
    "{job}/versions/1",
    "{job}/versions/-1",
    "{job}/versions/00",
    "{job}/versions/x",
    "{job}/versions/%D9%A0",
    "{job}/versions/9999999999",
    "{job}/versions/0%0A",
    "x/versions/0",
    "%2e%2e/versions/0",
    "a%2fb/versions/0",
]
REQUESTS = [
    *(Asked(line, who) for line in (WEIGHTS, NEXT, UPDATE) for who in ("admin", "enrolment", "stranger", "")),
    *(Asked(line, "revoked", body="good") for line in (WEIGHTS, NEXT, UPDATE)),
    *(Asked(UPDATE, body=body) for body in BODIES if body != "good"),
    *(Asked(UPDATE, body="good", headers=(("Embrace-Report", report),), reported=False) for report in REPORTS),
    Asked(UPDATE, body="good", reported=False),
    Asked(UPDATE, body="good", headers=(("Content-Digest", "sha-256=:AAAA:"),)),
    Asked(UPDATE, body="good", headers=(("Content-Digest", ""),)),
    Asked(UPDATE, "other", body="good"),
    Asked(UPDATE + "?x=1", body="short"),
    *(Asked(f"PUT /v1/tasks/{task}/update", body="good") for task in NO_TASKS),
    *(Asked(f"{NEXT}?{query}", "other") for query in WAITS),
    *(Asked(f"{method} {line.split()[1]}") for method in ("HEAD", "PATCH", "OPTIONS") for line in (WEIGHTS, UPDATE)),
    *(Asked(line, "other") for line in ODD),
    *(Asked(f"GET /v1/jobs/{path}/weights") for path in VERSIONS),
    *(Asked(f"{WEIGHTS}?{query}") for query in ("from_layer=9", "from_layer=x", "to_layer=0", "x=1", "from_layer=")),
    *(Asked(WEIGHTS, headers=(("Range", given),)) for given in ("bytes=0-9", "bytes=9999-", "bytes=x", "lines=0-1")),
]


@pytest.fixture(scope="module")
def people(site: Site) -> Iterator[dict[str, Any]]:
    """Tokens, and a task that the holder has and goes on having: no request here is a good update."""
    service, known = site.server.coordinator, site.server.registry
    revoked, old = site.enrol()
    service.revoke(revoked)
    holder = site.enrol()[1]
    plan = plan_from({"bundle": "x", "participate": {"count": 1}})
    with site.http(holder) as client:
        job = service.create_job(plan, site.bundle)  # type: ignore[attr-defined]
        offer = Offer(client.post("/v1/tasks/next?wait=5").json())
    tokens = {
        "holder": holder,
        "other": site.enrol()[1],
        "revoked": old,
        "admin": site.admin,
        "stranger": "embrace_device_x",
        "enrolment": known.invite(1, 60),
        "": "",
    }
    yield {"tokens": tokens, "offer": offer}
    service.set_state(job, "stopped")


def ask(site: Site, people: dict[str, Any], asked: Asked) -> tuple[int, dict[str, str], bytes]:
    offer, token = people["offer"], people["tokens"][asked.who]
    method, path = asked.line.replace("{job}", offer.job).replace("{task}", offer.id).split(" ", 1)
    headers = {**(report_header() if asked.reported else {}), **dict(asked.headers)}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    manifest = site.manifest  # type: ignore[attr-defined]
    size = manifest.space.size
    body = BODIES[asked.body](body_of(manifest, offer, np.ones(size, np.float32))) if asked.body else None
    with site.http() as client:
        url = httpx.URL(site.url).copy_with(raw_path=path.encode())
        answer = client.send(client.build_request(method, url, headers=headers, content=body))
    told = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return answer.status_code, told, answer.content


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: f"{asked.who} {asked.line} {asked.body}"[:80])
def test_a_request_that_is_not_in_order_is_refused_and_leaves_nothing(
    site: Site, people: dict[str, Any], asked: Asked
) -> None:
    spool = site.spool()
    status, headers, content = ask(site, people, asked)
    fine = status in (200, 204, 206, 307) and not asked.body
    assert fine or 400 <= status < 500, (status, content)
    if asked.who in ("admin", "enrolment", "stranger", "", "revoked"):
        assert status == 401
    if asked.body and asked.who == "holder" and asked.line == UPDATE:
        assert status in (400, 413, 422)
    if status >= 400 and content and status != 416:
        assert headers["content-type"] in ("application/problem+json", "text/plain; charset=utf-8")
    assert site.spool() == spool


def test_where_no_device_can_upload_none_waits_for_a_verdict(site: Site, people: dict[str, Any]) -> None:
    """The answer comes at once, and says what to do."""
    told = {"name": "a" * 48, "bytes": 9, "sha256": "b" * 64}
    place = f"/v1/tasks/{people['offer'].id}/complete?wait=60"
    with site.http(people["tokens"]["holder"]) as client:
        answer = client.post(place, json=told, headers=report_header())
    assert answer.status_code == 409 and "send the update to this coordinator" in answer.json()["detail"]
