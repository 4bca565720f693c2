"""rest.md and operations.md say what is true: the device in curl takes part, the tables are complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from coordinator.api import openapi
from coordinator.api.app import create_app
from coordinator.api.metrics import Metrics
from coordinator.coordinator import Coordinator
from coordinator.registry import Registry
from coordinator.settings import Settings
from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.repository import Repository
from tests.docs import rest_page
from tests.live_server import LiveServer, live_server
from tests.stock_python import ROOT
from tests.waiting import PATIENCE, wait_until

API = (ROOT / "docs" / "reference" / "rest.md").read_text()
OPERATIONS = (ROOT / "docs" / "guides" / "operations.md").read_text()


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = page.split(f"| {head}", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("app")
    sessions = open_database(sqlite_url(folder))
    repository = Repository(sessions)
    yield create_app(Coordinator(repository, DirectoryBlobs(folder)), Registry(repository, time.time))
    sessions.kw["bind"].dispose()


def operations(app: FastAPI) -> dict[tuple[str, str], dict[str, Any]]:
    paths = app.openapi()["paths"]
    return {(method.upper(), path): what for path, known in paths.items() for method, what in known.items()}


def test_every_route_is_in_the_table(app: FastAPI) -> None:
    known = {key: what["tags"][0] for key, what in operations(app).items()}
    shown = {(method, path): token for method, path, token, _ in rows(API, "method | path | token")}
    assert set(shown) == set(known)
    for key, token in shown.items():
        expected = {"admin": ("admin",), "device": ("device", "enrolment"), "operations": ("none",)}[known[key]]
        assert token in expected, key


def test_the_page_of_operations_is_current(app: FastAPI) -> None:
    assert rest_page.PAGE.read_text("utf-8") == rest_page.page(app.openapi()), "run python -m tests.docs.rest_page"


def test_every_operation_is_described(app: FastAPI) -> None:
    plain = {("GET", "/v1/devices"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/{job}"), ("PUT", "/v1/devices/me/profile")}
    plain |= {("POST", "/v1/tasks/{task}/failure")}
    for key, what in operations(app).items():
        assert what["summary"], key
        assert what.get("description") or key in plain, key
        for status, answer in what["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"], (key, status)
                assert answer["content"]["application/problem+json"]["example"]["status"] == int(status)
        if "security" in what:
            assert "401" in what["responses"], key
    described = {tag["name"] for tag in app.openapi()["tags"]}
    assert {what["tags"][0] for what in operations(app).values()} == described


def test_every_reference_of_the_description_leads_somewhere(app: FastAPI) -> None:
    document = app.openapi()
    used = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert used <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in str(document)


def test_every_problem_is_explained() -> None:
    assert [int(row[0]) for row in rows(API, "status | what it means")] == sorted(openapi._PROBLEMS)


def test_every_setting_is_in_the_table() -> None:
    def shown(value: object) -> str:
        return "none" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)

    expected = [[field.name, shown(field.default)] for field in fields(Settings)]
    assert [row[:2] for row in rows(OPERATIONS, "setting | default")] == expected


def test_every_metric_is_in_the_table() -> None:
    nothing = {"jobs": {}, "devices": 0, "devices_present": 0, "rounds_committed": 0}
    figures: dict[str, Any] = {"jobs": [], "missing": {}, "states": {}, "failing": []}
    text = Metrics(lambda: nothing, lambda: figures).text().decode()
    names = set(re.findall(r"^# HELP (embrace_\w+)", text, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    shown = {row[0] for row in rows(OPERATIONS, "name | labels")}
    assert {name for name in shown if name.startswith("embrace_")} == names
    assert "process_resident_memory_bytes" in shown


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def test_what_can_be_read_in_the_browser(server: LiveServer) -> None:
    assert "swagger-ui" in httpx.get(f"{server.url}/docs").text
    assert httpx.get(f"{server.url}/openapi.json").json()["info"]["title"] == "embrace coordinator"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_device_in_curl_takes_part_in_a_round(server: LiveServer, tmp_path: Path) -> None:
    script = re.search(r"## A device in curl\n.*?```sh\n(.*?)```", API, re.DOTALL)
    assert script
    job = server.create_job(tmp_path / "bundle", num_rounds=1)
    work = tmp_path / "work"
    work.mkdir()
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["sh", "-c", script[1]],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **own, "SERVER": server.url, "ENROLMENT": server.enrolment},
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert '"status":"accepted"' in ended.stdout
    admin = server.client(server.admin)
    wait_until(lambda: admin.get(f"/v1/jobs/{job}").json()["state"] == "done")
    assert admin.get(f"/v1/jobs/{job}").json()["version"] == 1
    before, after = (admin.get(f"/v1/jobs/{job}/versions/{number}/file").content for number in (0, 1))
    assert before == after  # its update was zero
