"""Settings from a file, the environment and the command line; how the process starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from coordinator.server import Server
from coordinator.settings import Settings, is_exposed, load_settings, without_secrets
from federation.errors import InputError
from tests.live_server import live_server, next_task, zero_update
from tests.stock_python import ROOT
from tests.waiting import PATIENCE, wait_until


def test_defaults(tmp_path: Path) -> None:
    assert load_settings(tmp_path, {}, {}) == Settings()


def test_later_sources_win(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('port = 1\nlog_level = "debug"\nslow_client = 5.0\n')
    environment = {"EMBRACE_PORT": "2", "EMBRACE_SLOW_CLIENT": "7", "EMBRACE_UNRELATED": "x", "PORT": "9"}
    found = load_settings(tmp_path, environment, {"port": 3, "log_level": None})
    assert (found.port, found.log_level, found.slow_client) == (3, "debug", 7.0)


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_every_setting_can_come_from_the_environment(name: str, tmp_path: Path) -> None:
    given: dict[str, str] = {
        "host": "::1",
        "port": "8000",
        "public_url": "https://fleet.example",
        "tls": "auto",
        "tls_certificate": "a.pem",
        "tls_key": "a.key",
        "insecure": "true",
        "allow_origin": "https://lab.example http://192.168.1.7",
        "proxy": "10.0.0.1,fd00::/8",
        "database": "sqlite:///x.db",
        "blobs": "s3://bucket/x",
        "workers": "0",
        "storage_url": "https://objects.example",
        "admin_token_file": "admin.secret",
        "requests_per_second": "2.5",
        "concurrent_requests": "7",
        "waiting_requests": "8",
        "long_polls": "11",
        "check_ins_per_second": "12.5",
        "longest_away": "13",
        "slow_client": "3",
        "evaluation_data": str(tmp_path),
        "evaluation_bytes": "9",
        "evaluation_memory": "10",
        "evaluation_seconds": "1.5",
        "keep_versions": "3",
        "keep_events": "0",
        "keep_days": "7.5",
        "log_level": "error",
    }
    both = ("tls_certificate", "tls_key") if name.startswith("tls_") else (name,)
    found = load_settings(tmp_path, {f"EMBRACE_{key.upper()}": given[key] for key in both}, {})
    value = getattr(found, name)
    assert value == (tuple(given[name].split()) if isinstance(value, tuple) else type(value)(given[name]))
    assert getattr(found, name) != getattr(Settings(), name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "prot"),
        ('port = "http"', "port"),
        ("port = 70000", "port: expected a number from 0 to 65535"),
        ("port =", "is no TOML"),
        ('tls_key = "a"', "TLS needs both a certificate and a key"),
        ('host = "0.0.0.0"', "is visible to other machines"),
        ('log_level = "loud"', "expected debug, info, warning or error"),
        ("requests_per_second = 0.0", "requests_per_second: expected a number above 0"),
        ("slow_client = nan", "slow_client: expected a number above 0"),
        ("evaluation_bytes = 0", "evaluation_bytes: expected a number of bytes from 1"),
        ('evaluation_data = "nowhere"', "evaluation_data: expected a folder"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_settings(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("PORT", "http", "EMBRACE_PORT: expected a number"), ("INSECURE", "yes please", "expected true or false")],
)
def test_a_wrong_environment_says_what_is_wrong(name: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_settings(tmp_path, {f"EMBRACE_{name}": value}, {})


def test_who_is_exposed() -> None:
    assert not is_exposed(Settings())
    assert not is_exposed(Settings(host="0.0.0.0", tls_certificate="a", tls_key="b"))
    assert is_exposed(Settings(host="0.0.0.0", insecure=True))


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in str(without_secrets(Settings(database="postgresql://u:hunter2@db/x")))


# --- the process -------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = subprocess.run(
            [sys.executable, "-m", "embrace", "serve", "--data", str(tmp_path)],
            cwd=ROOT,
            timeout=30,
            env={**os.environ, "EMBRACE_PORT": str(other.getsockname()[1])},
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 2
    assert "cannot listen on 127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_insecure_is_warned_about_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "serve.toml").write_text('host = "0.0.0.0"\nlog_level = "debug"\n')
    with live_server(tmp_path, "--insecure", log_level="info") as server:
        assert "warning: 0.0.0.0 is visible to other machines" in server.printed
        assert [line for line in server.lines if line["level"] == "warning" and "without TLS" in line["message"]]
        assert server.lines[0]["log_level"] == "info"
        assert server.stop(signal.SIGINT) == 0
    assert "Traceback" not in server.log


def test_sigterm_finishes_what_is_under_way(tmp_path: Path) -> None:
    """An upload is finished and recorded; a device that waits for a task and a watcher are sent home at once."""
    with live_server(tmp_path) as server:
        job = server.create_job(tmp_path / "bundle", num_rounds=5)
        device, idle = server.enrol(), server.enrol()
        task = next_task(device)["id"]
        body = zero_update()
        answers: dict[str, Any] = {}

        def wait() -> None:
            idle.post("/v1/tasks/next", params={"wait": 0})
            answers["waiting"] = idle.post("/v1/tasks/next", params={"wait": 9}).status_code

        def watch() -> None:
            answers["events"] = ""
            with server.client(server.admin).stream("GET", f"/v1/jobs/{job}/events") as events:
                for text in events.iter_text():
                    answers["events"] += text
                    watching.set()
            answers["watched"] = True

        watching = threading.Event()
        waiters = [threading.Thread(target=wait), threading.Thread(target=watch)]
        with server.connect() as connection:
            token = device.headers["Authorization"]
            head = f"PUT /v1/tasks/{task}/update HTTP/1.1\r\nHost: t\r\nAuthorization: {token}\r\n"
            head += f'Content-Length: {len(body)}\r\nEmbrace-Report: {{"samples": 3}}\r\n\r\n'
            connection.sendall(head.encode() + body[:150])
            for thread in waiters:
                thread.start()
            spool = tmp_path / "data" / "spool"
            wait_until(lambda: list(spool.glob("*.part")))
            assert watching.wait(PATIENCE)
            time.sleep(0.2)  # for the other one to wait, too
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("Shutting down")
            for thread in waiters:
                thread.join(PATIENCE)
            assert server.process.poll() is None
            connection.sendall(body[150:])
            assert connection.recv(4096).startswith(b"HTTP/1.1 201 ")
        assert server.process.wait(PATIENCE) == 0
    assert answers["waiting"] in (200, 204)
    assert "event: JobCreated" in answers["events"]
    assert answers["watched"]  # to the proper end of the stream
    assert "Traceback" not in server.log
    assert _updates(tmp_path) == [(task, 3)]


def _updates(folder: Path) -> list[tuple[str, int]]:
    import sqlite3

    connection = sqlite3.connect(folder / "data" / "coordinator.db")
    try:
        return [tuple(row) for row in connection.execute("SELECT task, samples FROM updates")]  # type: ignore[misc]
    finally:
        connection.close()


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nothing")
    wrong = str(tmp_path / "a.pem")
    server = Server(tmp_path / "data", Settings(tls_certificate=wrong, tls_key=wrong))
    with pytest.raises(InputError, match=r"cannot use .*a\.pem"):
        server._config()
    server.coordinator.repository.close()
