"""Every route of the OpenAPI document, with odd values in its path, its query and its body: no answer is a defect's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import DataError

from federation.job import plan_from
from tests.coordinator.harness import Site

NUMBERS = [-1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1, 10**30, 10**400]
# As they stand in an address.
WORDS = [
    *("%00", "a%00b", "%0A", "%0D%0A", "%1B%5B2J", "%FF", "%ED%A0%80", "%F0%9F%92%A9", "%2E%2E", "%2E", "..%2F..%2Fx"),
    *("%20", "a" * 300, "a" * 5000, "NaN", "1e999", "0x10", "%D9%A3", "null", "%25s", "%27%22%3B--", "0" * 64, "-"),
    *("{job}-2147483648-0-1", "{job}-9223372036854775808-0-1", "{job}-0-9223372036854775808-1", "{job}%00-0-0-1"),
]
ODD = [*map(str, NUMBERS), *WORDS]
# JSON that a document may have anywhere.
VALUES = [
    '"\\u0000"',
    '"\\ud800"',
    '"a\\u0000b"',
    '"\\u001b[2J"',
    "1e999",
    "-1e999",
    "1" * 5000,
    *map(str, NUMBERS[:-1]),
]
VALUES += ["[]", "{}", "null", "[" * 2000 + "]" * 2000, "true", '""']


@pytest.fixture(scope="module")
def known(site: Site) -> dict[str, str]:
    """Values of parameters that lead somewhere."""
    service = site.server.coordinator
    job = service.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    found = {"job": job, "version": "0", "digest": site.bundle, "name": "model", "boundary": "stem"}  # type: ignore[attr-defined]
    return {**found, "sha256": "0" * 64, "task": f"{job}-0-0-1", "device": site.enrol()[0]}


def routes(site: Site) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in httpx.get(f"{site.url}/openapi.json").json()["paths"].items():
        for method, described in methods.items():
            yield path, method, described


def wishes(path: str, described: dict[str, Any], known: dict[str, str]) -> Iterator[str]:
    """Addresses that have one odd value each; the other parameters have values that lead somewhere."""
    parameters = [p for p in described.get("parameters", []) if p["in"] in ("path", "query")]
    needed = {p["name"]: known.get(p["name"], "0") for p in parameters if p["in"] == "path" or p.get("required")}
    for odd in parameters:
        for value in ODD:
            given = {**needed, odd["name"]: value.replace("{job}", known["job"])}
            filled, query = path, []
            for parameter in parameters:
                if (name := parameter["name"]) in given and parameter["in"] == "path":
                    filled = filled.replace("{" + name + "}", given[name])
                elif name in given:
                    query.append(f"{name}={given[name]}")
            yield f"{filled}?{'&'.join(query)}" if query else filled


def test_odd_values_in_addresses(site: Site, known: dict[str, str]) -> None:
    wrong, count = [], 0
    headers = {"Embrace-Report": '{"samples": 1}', "Content-Type": "application/json"}
    with site.http(site.admin) as admin, site.http(site.enrol()[1]) as device:
        for path, method, described in routes(site):
            client = device if "device" in described["tags"] else admin
            if path.endswith("/events"):
                known = {**known, "job": "none"}  # a stream that goes on
            for wish in wishes(path, described, known):
                target = httpx.URL(site.url).copy_with(raw_path=wish.encode())
                content = b"{}" if method in ("put", "post") else None
                with client.stream(method, target, headers=headers, content=content) as answer:
                    if not path.endswith("/events"):
                        answer.read()
                count += 1
                if answer.status_code >= 500 or ("%00" in wish and answer.status_code < 400):
                    wrong.append((method, wish[:200], answer.status_code))
    assert count > 500
    assert wrong == []


def test_every_number_in_an_address_is_one_that_a_database_can_count_to(site: Site) -> None:
    """PostgreSQL counts in 32 bits here; SQLite, which these tests use, would take more."""
    numbers = [
        (path, parameter["name"], kind.get("maximum"))
        for path, _, described in routes(site)
        for parameter in described.get("parameters", [])
        for kind in parameter["schema"].get("anyOf", [parameter["schema"]])
        if kind.get("type") == "integer"
    ]
    assert len(numbers) >= 6
    assert [found for found in numbers if found[2] is None or found[2] > 2**31 - 1] == []


def test_a_value_that_the_database_refuses_is_the_client_s_mistake(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PostgreSQL's driver says of a NUL in a text."""

    def refuse(*_: object) -> None:
        raise DataError("INSERT", {}, ValueError("PostgreSQL text fields cannot contain NUL (0x00) bytes"))

    monkeypatch.setattr(site.server.registry, "invite", refuse)
    with site.http(site.admin) as admin:
        answer = admin.post("/v1/enrolments", json={})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")


def test_odd_values_in_bodies(site: Site, known: dict[str, str]) -> None:
    plan = {"bundle": "x", "num_rounds": 1, "participate": {"count": 1}}
    bodies: dict[tuple[str, str], dict[str, Any]] = {
        ("post", "/v1/devices"): {"name": "n", "profile": {"memory": 1, "tier": "weak", "threads": 1, "runtime": "r"}},
        ("put", "/v1/devices/me/profile"): {"memory": 1, "tier": "weak", "threads": 1, "runtime": "r", "boundary": "b"},
        ("post", f"/v1/tasks/{known['task']}/failure"): {"reason": "r", "message": "m"},
        ("post", "/v1/enrolments"): {"uses": 1, "seconds": 1.0},
        ("post", "/v1/jobs"): {"bundle": "0" * 64, "plan": plan},
    }
    wrong = []
    invitation = site.server.registry.invite(1000, 600)
    with site.http(site.admin) as admin, site.http(site.enrol()[1]) as device, site.http(invitation) as enrolling:
        clients = {"/v1/devices": enrolling, "/v1/enrolments": admin, "/v1/jobs": admin}
        for (method, path), body in bodies.items():
            for text in spoiled(body):
                headers = {"Content-Type": "application/json"}
                answer = clients.get(path, device).request(method, path, content=text, headers=headers)
                if answer.status_code >= 500:
                    wrong.append((method, path, text[:100], answer.status_code))
        assert admin.get("/v1/devices").status_code == 200  # nothing that was stored is in the way
        assert admin.get("/v1/jobs").status_code == 200
        assert device.post("/v1/tasks/next?wait=0").status_code in (200, 204)
    assert wrong == []


def spoiled(body: dict[str, Any]) -> Iterator[str]:
    """The document with one value replaced, at every place."""
    for name, value in body.items():
        inner = list(spoiled(value)) if isinstance(value, dict) else []
        for odd in [*VALUES, *inner]:
            yield json.dumps({**body, name: "ODD"}).replace('"ODD"', odd)
