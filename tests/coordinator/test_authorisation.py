"""Every route with every kind of credential. A route that is not in the table fails the first test."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from coordinator.server import Server
from coordinator.settings import Settings
from federation import rounds
from federation.cohort import Cohort, LeaseTaken, Member, Seat
from federation.job import plan_from
from federation.safetensors_codec import encode_header
from federation.signature import SIGNATURE_NAME, SigningKey
from federation.wire import encode_layers
from tests.coordinator.harness import Site, report_header

_TYPES = {"x": "F32", "y": "I64"}
BENCHMARK = {
    **{"bundle": 64 * "0", "model": "x", "batch": 1, "iterations": 1, "runtime": "x", "threads": 1},
    "costs": [{"boundary": "x", "problem": "none"}],
}
SAMPLES = encode_header([("x", (1, 2)), ("y", (1,))], 8, dtypes=_TYPES) + bytes(16)


@dataclass
class Cast:
    """Everybody who could ask, and what there is to ask for."""

    site: Site
    tokens: dict[str, str]
    bundle: str
    graph: str
    job: str
    task: str
    body: bytes
    inheriting: str = ""  # a task that goes on with what another one sent
    spool: Sequence[str] = ()  # what that was


Example = Callable[[Cast], tuple[str, dict[str, Any]]]  # path and options of a request that is right
# operation -> who may do it, and an example
ROUTES: dict[str, tuple[str, Example]] = {
    "GET /healthz": ("anybody", lambda c: ("/healthz", {})),
    "GET /readyz": ("anybody", lambda c: ("/readyz", {})),
    "GET /metrics": ("anybody", lambda c: ("/metrics", {})),
    "POST /v1/devices": ("enrolment", lambda c: ("/v1/devices", {"json": {"name": "new"}})),
    "PUT /v1/devices/me/profile": ("device", lambda c: ("/v1/devices/me/profile", {"json": {"tier": "strong"}})),
    "POST /v1/tasks/next": ("device", lambda c: ("/v1/tasks/next?wait=0", {})),
    "PUT /v1/tasks/{task}/update": (
        "device",
        lambda c: (f"/v1/tasks/{c.task}/update", {"content": c.body, "headers": report_header()}),
    ),
    "POST /v1/tasks/{task}/upload": ("device", lambda c: (f"/v1/tasks/{c.task}/upload", {"json": {"bytes": 1}})),
    "POST /v1/tasks/{task}/complete": (
        "device",
        lambda c: (
            f"/v1/tasks/{c.task}/complete?wait=0",
            {"json": {"name": "0" * 48, "bytes": 1, "sha256": "0" * 64}, "headers": report_header()},
        ),
    ),
    "POST /v1/tasks/{task}/heartbeat": ("device", lambda c: (f"/v1/tasks/{c.task}/heartbeat", {})),
    "POST /v1/tasks/{task}/failure": (
        "device",
        lambda c: (f"/v1/tasks/{c.task}/failure", {"json": {"reason": "failed"}}),
    ),
    "GET /v1/bundles/{digest}/manifest": ("device", lambda c: (f"/v1/bundles/{c.bundle}/manifest", {})),
    "GET /v1/bundles/{digest}/signature": ("device", lambda c: (f"/v1/bundles/{c.bundle}/signature", {})),
    "GET /v1/graphs/{sha256}": ("device", lambda c: (f"/v1/graphs/{c.graph}", {})),
    "GET /v1/jobs/{job}/versions/{version}/weights": ("device", lambda c: (f"/v1/jobs/{c.job}/versions/0/weights", {})),
    "GET /v1/jobs/{job}/versions/{version}/parts/{name}": (
        "device",
        lambda c: (f"/v1/jobs/{c.job}/versions/0/parts/model?boundary=stem&unit=0", {}),
    ),
    "GET /v1/jobs/open": ("enrolment", lambda c: ("/v1/jobs/open", {})),
    "DELETE /v1/devices/me": ("leaving device", lambda c: ("/v1/devices/me", {})),
    "PUT /v1/devices/me/benchmark": ("device", lambda c: ("/v1/devices/me/benchmark", {"json": BENCHMARK})),
    "GET /v1/benchmarks": ("admin", lambda c: (f"/v1/benchmarks?bundle={c.bundle}", {})),
    "GET /v1/jobs/{job}/state": ("device", lambda c: (f"/v1/jobs/{c.job}/state", {})),
    "GET /v1/tasks/{task}/inherited": ("device", lambda c: (f"/v1/tasks/{c.inheriting}/inherited", {})),
    "POST /v1/enrolments": ("admin", lambda c: ("/v1/enrolments", {"json": {}})),
    "GET /v1/devices": ("admin", lambda c: ("/v1/devices", {})),
    "GET /v1/devices/{device}": ("admin", lambda c: (f"/v1/devices/{c.site.enrol()[0]}", {})),
    "DELETE /v1/devices/{device}": ("admin", lambda c: (f"/v1/devices/{c.site.enrol()[0]}", {})),
    "PUT /v1/bundles/{digest}/files/{name}": (
        "admin",
        lambda c: (f"/v1/bundles/{c.bundle}/files/weights.safetensors", {"content": b"weights"}),
    ),
    "GET /v1/evaluation-data": ("admin", lambda c: ("/v1/evaluation-data", {})),
    "PUT /v1/evaluation-data/{sha256}": (
        "admin",
        lambda c: (f"/v1/evaluation-data/{hashlib.sha256(SAMPLES).hexdigest()}", {"content": SAMPLES}),
    ),
    "POST /v1/bundles/{digest}": ("admin", lambda c: (f"/v1/bundles/{c.bundle}", {})),
    "GET /v1/jobs": ("admin", lambda c: ("/v1/jobs", {})),
    "POST /v1/jobs": ("admin", lambda c: ("/v1/jobs", {"json": {"bundle": c.bundle, "plan": {"bundle": "x"}}})),
    "GET /v1/jobs/{job}": ("admin", lambda c: (f"/v1/jobs/{c.job}", {})),
    "POST /v1/jobs/{job}/pause": ("admin", lambda c: (f"/v1/jobs/{another_job(c)}/pause", {})),
    "POST /v1/jobs/{job}/resume": ("admin", lambda c: (f"/v1/jobs/{another_job(c)}/resume", {})),
    "POST /v1/jobs/{job}/stop": ("admin", lambda c: (f"/v1/jobs/{another_job(c)}/stop", {})),
    "DELETE /v1/jobs/{job}": ("admin", lambda c: (f"/v1/jobs/{another_job(c)}?force=1", {})),
    "GET /v1/jobs/{job}/versions/{version}/file": ("admin", lambda c: (f"/v1/jobs/{c.job}/versions/0/file", {})),
    "GET /v1/jobs/{job}/rounds": ("admin", lambda c: (f"/v1/jobs/{c.job}/rounds", {})),
    "GET /v1/jobs/{job}/rounds.csv": ("admin", lambda c: (f"/v1/jobs/{c.job}/rounds.csv", {})),
    "GET /v1/jobs/{job}/metrics": ("admin", lambda c: (f"/v1/jobs/{c.job}/metrics", {})),
    "GET /v1/jobs/{job}/metrics.csv": ("admin", lambda c: (f"/v1/jobs/{c.job}/metrics.csv", {})),
    "GET /v1/jobs/{job}/timings": ("admin", lambda c: (f"/v1/jobs/{c.job}/timings", {})),
    "GET /v1/jobs/{job}/timings.csv": ("admin", lambda c: (f"/v1/jobs/{c.job}/timings.csv", {})),
    "GET /v1/events": ("admin", lambda c: ("/v1/events?seconds=0", {})),
    "GET /v1/fleet": ("admin", lambda c: ("/v1/fleet", {})),
    "GET /v1/choices": ("admin", lambda c: ("/v1/choices", {})),
    "POST /v1/plans": ("admin", lambda c: ("/v1/plans", {"json": {"toml": 'bundle = "x"'}})),
    "GET /v1/jobs/{job}/seats": ("admin", lambda c: (f"/v1/jobs/{c.job}/seats", {})),
    "GET /v1/jobs/{job}/versions": ("admin", lambda c: (f"/v1/jobs/{c.job}/versions", {})),
    "GET /v1/jobs/{job}/versions/{version}/bundle.zip": (
        "admin",
        lambda c: (f"/v1/jobs/{c.job}/versions/0/bundle.zip", {}),
    ),
    "POST /v1/session": ("admin", lambda c: ("/v1/session", {})),
    "GET /v1/session": ("admin", lambda c: ("/v1/session", {})),
    "DELETE /v1/session": ("admin", lambda c: ("/v1/session", {})),
    "GET /v1/jobs/{job}/events": ("admin", lambda c: (f"/v1/jobs/{stopped_job(c)}/events", {})),
}
# Others that may, too, and are not tried: a device that is forgotten takes part in no other test.
ALSO = {
    "GET /v1/jobs/open": {"admin", "device", "other device"},
    "DELETE /v1/devices/me": {"device", "other device"},
}
KINDS = ("admin", "device", "enrolment", "other device", "revoked device", "stranger", "nobody", "wrong scheme")


def another_job(cast: Cast) -> str:
    return cast.site.server.coordinator.create_job(plan_from({"bundle": "x"}), cast.bundle)


def stopped_job(cast: Cast) -> str:
    job = another_job(cast)
    cast.site.server.coordinator.set_state(job, "stopped")
    return job


def another_task(cast: Cast) -> str:
    """A task that the device holds, of a job of its own; whoever else is there plays no part."""
    job = another_job(cast)
    lease(cast, job)
    return f"{job}-0-0-1"


def lease(cast: Cast, job: str) -> None:
    """The device alone takes part in the next round, and holds its task."""
    service = cast.site.server.coordinator
    device = cast.site.server.registry.device_of(cast.tokens["device"])
    seat = Seat(0, Member(device, "stem", 3))
    with service._units.begin() as work:
        work.advance(service._jobs[job], rounds.DevicesAvailable(cohort=Cohort((seat,), 1, 1)))
        work.advance(service._jobs[job], LeaseTaken(device, 0))


def inheriting_task(cast: Cast) -> str:
    """The first task of a window: with one part that is ten rounds later."""
    plan = {"bundle": "x", "num_rounds": 30, "participate": {"count": 1}, "sync": {"rule": "rotating", "parts": 1}}
    job = cast.site.server.coordinator.create_job(plan_from(plan), cast.bundle)
    with cast.site.http(cast.tokens["device"]) as client:
        for number in range(10):
            lease(cast, job)
            answer = client.put(f"/v1/tasks/{job}-{number}-0-1/update", content=cast.body, headers=report_header())
            assert answer.status_code == 201, answer.text
            cast.site.settle()
    lease(cast, job)
    return f"{job}-10-0-1"


@pytest.fixture(scope="module")
def cast(site: Site) -> Cast:
    service, known = site.server.coordinator, site.server.registry
    bundle, manifest = site.bundle, site.manifest  # type: ignore[attr-defined]
    (site.directory / "bundles" / bundle / SIGNATURE_NAME).write_text(SigningKey(bytes(32)).sign(bundle))
    revoked, old = site.enrol()
    service.revoke(revoked)
    tokens = {
        "admin": site.admin,
        "device": site.enrol()[1],
        "other device": site.enrol()[1],
        "leaving device": site.enrol()[1],
        "revoked device": old,
        "enrolment": known.invite(10, 60),
        "stranger": "embrace_admin_" + secrets.token_urlsafe(32),
    }
    body = b"".join(bytes(part) for part in encode_layers(manifest.space, 0, np.zeros(manifest.space.size, np.float32)))
    found = Cast(site, tokens, bundle, manifest.boundaries[0].train.sha256, "", "", body)
    found.task = another_task(found)
    found.job = found.task.partition("-")[0]
    found.inheriting = inheriting_task(found)
    found.spool = site.spool()
    assert len(found.spool) == 1
    return found


def ask(cast: Cast, route: str, kind: str) -> httpx.Response:
    path, options = ROUTES[route][1](cast)
    headers = dict(options.pop("headers", {}))
    if kind == "wrong scheme":
        headers["Authorization"] = f"Basic {cast.tokens[ROUTES[route][0]]}"
    elif kind != "nobody":
        headers["Authorization"] = f"Bearer {cast.tokens[kind]}"
    with cast.site.http() as client:
        return client.request(route.partition(" ")[0], path, headers=headers, **options)


def test_the_table_has_every_route(tmp_path) -> None:
    server = Server(tmp_path, Settings())
    described = server.app.openapi()["paths"]
    found = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert found == ROUTES.keys()
    secured = {
        f"{m.upper()} {path}" for path, all_ in described.items() for m, one in all_.items() if "security" in one
    }
    assert secured == {route for route, (who, _) in ROUTES.items() if who != "anybody"}
    server.coordinator.repository.close()


# What a coordinator without object storage answers to a device.
STORED_HERE = {
    "POST /v1/tasks/{task}/upload": "there is no object storage that devices reach",
    "POST /v1/tasks/{task}/complete": "devices upload nothing here",
}


@pytest.mark.parametrize("route", ROUTES)
def test_who_may_is_served(cast: Cast, route: str) -> None:
    who = ROUTES[route][0]
    held, cast.task = cast.task, another_task(cast) if "{task}" in route else cast.task
    try:
        answer = ask(cast, route, "nobody" if who == "anybody" else who)
    finally:
        cast.task = held
    assert answer.is_success or STORED_HERE.get(route, answer.text + "?") in answer.text, answer.text


@pytest.mark.parametrize("route", [route for route, (who, _) in ROUTES.items() if who != "anybody"])
def test_nobody_else_is(cast: Cast, route: str) -> None:
    who = ROUTES[route][0]
    refused = [kind for kind in KINDS if kind != who and kind not in ALSO.get(route, ())]
    if who == "device" and "{task}" not in route:
        refused.remove("other device")
    for kind in refused:
        answer = ask(cast, route, kind)
        foreign = who == "device" and kind == "other device"
        hidden = 409 if route.endswith("/complete") else 404  # whose task it is, is nobody's business
        assert answer.status_code == (hidden if foreign else 401), kind
        assert foreign or answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code and answer.json()["title"] and answer.json()["detail"]
        assert not [token for token in cast.tokens.values() if token in answer.text]
    found = cast.site.server.coordinator.job(cast.job)
    assert found["state"] == "running" and found["version"] == 0  # and nothing has changed
    assert found["round"]["body"]["slots"][0]["state"] == "leased"
    assert cast.site.spool() == cast.spool
