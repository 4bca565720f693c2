"""What a person who joins meets: the page, what is trained here, and being forgotten."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from coordinator.api import pages
from federation.job import plan_from
from federation.manifest import dumps, loads
from tests.coordinator.harness import Site


class Pages:
    """The pages of a folder, in this process."""

    def __init__(self, folder: Path) -> None:
        self._app = FastAPI()
        pages.install(self._app, folder)

    def get(self, path: str, **options: object) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.get(path, **options)  # type: ignore[arg-type]

        return asyncio.run(ask())


@pytest.fixture
def built(tmp_path: Path) -> Pages:
    (tmp_path / "web" / "assets").mkdir(parents=True)
    (tmp_path / "secret").write_text("not for the web")
    (tmp_path / "web" / "join.html").write_text("<!doctype html><title>Join</title>")
    (tmp_path / "web" / "index.html").write_text("<!doctype html><title>Fleet</title>")
    (tmp_path / "web" / "assets" / "join-1.js").write_text("1")
    (tmp_path / "web" / "assets" / "runtime-2.wasm.gz").write_bytes(gzip.compress(b"wasm"))
    return Pages(tmp_path / "web")


def test_an_installation_without_the_page_says_how_to_get_it(tmp_path: Path) -> None:
    for path in ("/", "/join"):
        answer = Pages(tmp_path / "web").get(path)
        assert answer.status_code == 503
        assert "make web" in answer.text and answer.text.count("\n") == 1


def test_the_page_may_load_nothing_from_elsewhere_and_is_isolated(built: Pages) -> None:
    for path in ("/", "/join", "/web/assets/join-1.js", "/web/nothing"):
        headers = built.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert not [source for source in policy.values() if ":" in source.replace("blob:", "")]
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-embedder-policy"] == "require-corp"


def test_a_compressed_file_comes_as_what_it_is(built: Pages) -> None:
    answer = built.get("/web/assets/runtime-2.wasm")
    assert (answer.content, answer.headers["content-type"]) == (b"wasm", "application/wasm")
    assert "immutable" in answer.headers["cache-control"]
    assert built.get("/web/assets/runtime-2.wasm", headers={"Accept-Encoding": "identity"}).status_code == 406


@pytest.mark.parametrize("path", ["../secret", "assets/../../secret", "%2e%2e/secret", "join.html", "assets/", ""])
def test_no_other_file_can_be_asked_for(built: Pages, path: str) -> None:
    assert built.get(f"/web/{path}").status_code == 404


def test_an_invited_person_sees_what_is_trained_and_takes_no_use(site: Site) -> None:
    service, registry = site.server.coordinator, site.server.registry
    job = service.create_job(plan_from({"bundle": "x", "name": "house", "num_rounds": 7}), site.bundle)  # type: ignore[attr-defined]
    token = registry.invite(1, 60)
    with site.http(token) as client:
        for _ in range(3):
            jobs = {found["id"]: found for found in client.get("/v1/jobs/open").raise_for_status().json()["jobs"]}
    found = jobs[job]
    assert (found["name"], found["round"], found["rounds"]) == ("house", 0, 7)
    assert loads(dumps(site.manifest)).layers == site.manifest.layers  # type: ignore[attr-defined]
    assert [layer["name"] for layer in found["manifest"]["layers"]] == [
        layer.name
        for layer in site.manifest.layers  # type: ignore[attr-defined]
    ]
    with site.http(site.enrol()[1]) as device:
        assert job in [each["id"] for each in device.get("/v1/jobs/open").json()["jobs"]]
    service.set_state(job, "stopped")
    with site.http(token) as client:
        assert job not in [each["id"] for each in client.get("/v1/jobs/open").json()["jobs"]]
        client.post("/v1/devices", json={"name": "last use"}).raise_for_status()
        assert client.get("/v1/jobs/open").status_code == 401


def test_a_stranger_sees_nothing(site: Site) -> None:
    for token in (None, "embrace_enrol_wrong"):
        with site.http(token) as client:
            assert client.get("/v1/jobs/open").status_code == 401


def test_a_device_can_have_itself_forgotten(site: Site) -> None:
    device, token = site.enrol(name="Ada's phone")
    with site.http(token) as client:
        client.delete("/v1/devices/me").raise_for_status()
        assert client.get("/v1/jobs/open").status_code == 401
        assert client.post("/v1/tasks/next?wait=0").status_code == 401
    row = next(row for row in site.server.coordinator.devices() if row["id"] == device)
    assert row["revoked"] and "Ada" not in str(row) and row["profile"]["tier"] is None
