"""Pages of other origins: an exact list, empty by default, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coordinator.settings import MOST_ORIGINS, Settings, load_settings
from federation.errors import InputError
from tests.live_server import LiveServer, live_server

LAB, OTHER = "https://lab.example", "http://192.168.1.7:8080"
PREFLIGHT = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "authorization,embrace-report"}
STRANGERS = [
    "https://evil.example",
    "http://lab.example",
    "https://lab.example:444",
    "https://lab.example.evil.example",
    "https://sub.lab.example",
    "https://LAB.example",
    "https://lab.example/",
    "null",
    "*",
    "",
    f"{LAB} {OTHER}",
    f"{LAB},{OTHER}",
    "https://lab.example\x7f",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    options = ("--allow-origin", LAB, "--allow-origin", OTHER)
    with live_server(tmp_path_factory.mktemp("listed"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("closed")) as running:
        yield running


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origin", [LAB, OTHER])
def test_a_listed_page_may_ask_with_a_token(server: LiveServer, origin: str) -> None:
    asked = httpx.options(f"{server.url}/v1/tasks/1/update", headers={"Origin": origin, **PREFLIGHT})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == origin
    assert "PUT" in asked.headers["access-control-allow-methods"]
    allowed = asked.headers["access-control-allow-headers"].lower()
    assert {"authorization", "embrace-report", "content-digest", "range"} <= {
        each.strip() for each in allowed.split(",")
    }
    assert "access-control-allow-credentials" not in asked.headers and "origin" in asked.headers["vary"].lower()
    headers = {"Origin": origin, "Authorization": f"Bearer {server.enrolment}"}
    answer = httpx.get(f"{server.url}/v1/jobs/open", headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert "embrace-lease" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("path", ["/v1/jobs/open", "/v1/nothing", "/v1/devices"])
def test_a_listed_page_can_read_why_it_was_refused(server: LiveServer, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}", headers={"Origin": LAB, "Authorization": "Bearer embrace_wrong"})
    assert answer.status_code in (401, 404)
    assert answer.headers["access-control-allow-origin"] == LAB


@pytest.mark.parametrize("origin", STRANGERS)
def test_any_other_origin_gets_no_leave(server: LiveServer, origin: str) -> None:
    headers = {"Origin": origin, "Authorization": f"Bearer {server.enrolment}"}
    asked = httpx.options(f"{server.url}/v1/jobs/open", headers={"Origin": origin, **PREFLIGHT})
    assert asked.status_code in (400, 405) and "access-control-allow-origin" not in asked.headers
    answer = httpx.get(f"{server.url}/v1/jobs/open", headers=headers)
    assert "access-control-allow-origin" not in answer.headers  # so no browser hands it to the page


@pytest.mark.parametrize("name", ["X-Secret", "Cookie", "authorization,x-own"])
def test_other_headers_are_refused_beforehand(server: LiveServer, name: str) -> None:
    headers = {"Origin": LAB, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": name}
    assert httpx.options(f"{server.url}/v1/jobs/open", headers=headers).status_code == 400


def test_by_default_no_other_origin_gets_leave(closed: LiveServer) -> None:
    for origin in (LAB, "null", closed.url):
        headers = {"Origin": origin}
        assert cors_headers(httpx.options(f"{closed.url}/v1/jobs/open", headers={**headers, **PREFLIGHT})) == {}
        assert cors_headers(httpx.get(f"{closed.url}/healthz", headers=headers)) == {}


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "",
        "lab.example",
        "https://",
        "https://lab.example/",
        "https://lab.example/page",
        "https://*.lab.example",
        "https://Lab.example",
        "https://lab.example:443",
        "http://lab.example:80",
        "https://me@lab.example",
        "https://lab.example:",
        "ftp://lab.example",
        "https://lab.example https://other.example",
        "https://lab.example\n",
        "https://läb.example",
    ],
)
def test_what_no_browser_would_send_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(InputError, match=r"allow_origin.*: expected one origin as browsers write it"):
        Settings(allow_origin=(origin,))


def test_the_list_comes_from_every_source(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(f'allow_origin = ["{LAB}"]')
    assert load_settings(tmp_path, {}, {}).allow_origin == (LAB,)
    assert load_settings(tmp_path, {"EMBRACE_ALLOW_ORIGIN": f"{LAB} {OTHER}"}, {}).allow_origin == (LAB, OTHER)
    assert (
        load_settings(tmp_path, {}, {"allow_origin": ("https://[fd00::2]:8470",)}).allow_origin[0].startswith("https")
    )
    with pytest.raises(InputError, match="at most"):
        Settings(allow_origin=(LAB,) * (MOST_ORIGINS + 1))
