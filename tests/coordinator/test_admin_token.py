"""The administrator's token from a file, with real `embrace serve` processes: what counts, and where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.credentials import MOST, read_token
from federation.errors import InputError
from tests.coordinator.databases import about_postgresql, database_url
from tests.live_server import LiveServer, live_server
from tests.waiting import wait_until

OLD, NEW = "0123456789abcdef" * 4, "a_token.of~our+own/with-all=" * 2
ENDED = "the administrator's token is the one that was given; the one from before has ended"


def write(file: Path, token: str) -> Path:
    file.write_text(f"{token}\n")
    return file


def status(server: LiveServer, token: str) -> int:
    return httpx.get(f"{server.url}/v1/devices", headers={"Authorization": f"Bearer {token}"}).status_code


def endings(server: LiveServer) -> int:
    return [line["message"] for line in server.lines].count(ENDED)


def test_the_given_token_counts_and_is_kept_nowhere(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        made = server.admin
        assert status(server, made) == 200
    for token, before, changes in ((OLD, made, 1), (OLD, NEW, 0), (NEW, OLD, 1)):
        file = write(tmp_path / "secret", token)
        with live_server(tmp_path, admin_token_file=file, log_level="debug") as server:
            assert (status(server, token), status(server, before)) == (200, 401)
            assert f"administrator's token, as given: {file}\n" in server.printed
        assert endings(server) == changes
        assert token not in server.log and token not in server.printed
        files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        assert not any(token.encode() in path.read_bytes() for path in files)
    with live_server(tmp_path) as server:  # the file in the directory is of the first start
        assert (status(server, NEW), status(server, made)) == (200, 401)
        assert "as before; it is not in" in server.printed


@about_postgresql
def test_processes_on_one_database_agree(tmp_path: Path) -> None:
    """The second has another token: the first, which knew the old one and a page that used it, learns of it."""
    shared: dict[str, Any] = {"database": database_url(tmp_path), "blobs": tmp_path / "blobs"}
    old, new = write(tmp_path / "old", OLD), write(tmp_path / "new", NEW)
    with live_server(tmp_path / "one", admin_token_file=old, **shared) as one:
        with httpx.Client(base_url=one.url, headers={"Sec-Fetch-Site": "same-origin"}) as page:
            page.post("/v1/session", headers={"Authorization": f"Bearer {OLD}"}).raise_for_status()
            assert page.get("/v1/session").status_code == status(one, OLD) == 200
            with live_server(tmp_path / "two", admin_token_file=new, **shared) as two:
                wait_until(lambda: status(one, OLD) == 401)
                assert page.get("/v1/session").status_code == status(two, OLD) == 401
                assert status(one, NEW) == status(two, NEW) == 200
            with live_server(tmp_path / "three", admin_token_file=new, **shared) as three:
                assert status(three, NEW) == 200
        assert (endings(one), endings(two), endings(three)) == (0, 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "too short",
        "x" * 31,
        "x" * (MOST + 1),
        "x" * 1_000_000,
        f"{OLD}\n{NEW}",
        f"{OLD} {NEW}",
        "ü" * 40,
        "\x00" * 40,
        f"embrace_enrol_{OLD}",
        f"embrace_device_{OLD}",
    ],
    ids=lambda text: f"{text[:16]!a}-{len(text)}",
)
def test_what_is_no_token_is_refused_in_a_line_without_it(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "secret", text)
    with pytest.raises(InputError, match=r"^admin_token_file: .*; make one: openssl rand -hex 32$") as refused:
        read_token(file)
    assert "\n" not in str(refused.value) and not (text and text[:16] in str(refused.value))


def test_blanks_around_a_token_do_not_count(tmp_path: Path) -> None:
    assert read_token(write(tmp_path / "secret", f"  {OLD}\r\n")) == OLD
    with pytest.raises(InputError, match="cannot read"):
        read_token(tmp_path)
