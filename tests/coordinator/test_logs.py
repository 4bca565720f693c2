"""One line of JSON per event, each request with its number, and no secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from coordinator.logs import AccessLog, JsonLines, current_request
from tests.live_server import live_server, next_task, send_update


def formatted(message: str, **more: object) -> dict[str, object]:
    record = logging.LogRecord("embrace.test", logging.WARNING, __file__, 1, message, (), None)
    record.created, record.msecs = 0.25, 250.0
    vars(record).update(more)
    return dict(json.loads(JsonLines().format(record)))


def test_a_line() -> None:
    assert formatted("two\nlines", facts={"job": "j", "path": Path("a")}) == {
        "at": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "from": "embrace.test",
        "message": "two\nlines",
        "job": "j",
        "path": "a",
    }


def test_a_line_belongs_to_its_request() -> None:
    before = current_request.set("0123")
    try:
        assert formatted("x")["request"] == "0123"
    finally:
        current_request.reset(before)
    assert "request" not in formatted("x")


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        line = formatted("failed", exc_info=sys.exc_info())
    assert "KeyError: 'lost'" in str(line["traceback"])


async def _failing(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 418, "headers": []})
    raise RuntimeError


async def _silent(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError


@pytest.mark.parametrize(("app", "status", "received"), [(_failing, 418, 3), (_silent, 500, 0)])
def test_a_request_that_fails_is_logged_and_counted(
    app: object, status: int, received: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[object, ...]] = []
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"abc", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        observed = AccessLog(app, lambda *facts: seen.append(facts))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await observed({"type": "http", "method": "PUT", "path": "/x", "headers": []}, receive, send)

    caplog.set_level(logging.INFO)
    asyncio.run(run())
    assert [(*facts[:3], facts[4]) for facts in seen] == [("PUT", "(none)", status, received)]
    (record,) = caplog.records
    assert record.facts["status"] == status  # type: ignore[attr-defined]
    assert all(b"x-request-id" in dict(message["headers"]) for message in sent)


def test_what_a_server_logs(tmp_path: Path) -> None:
    with live_server(tmp_path, log_level="debug") as server:
        server.create_job(tmp_path / "bundle", num_rounds=1)
        device = server.enrol("kitchen")
        task = next_task(device)["id"]
        answer = send_update(device, task)
        device.get("/v1/tasks/next", params={"token": "in_a_query"})
        device.get("/v1/nowhere", headers={"Authorization": "Bearer embrace_device_wrong"})
        secrets = [server.admin, server.enrolment, device.headers["Authorization"].removeprefix("Bearer ")]
        assert server.stop() == 0
        lines = server.lines
    (line,) = [line for line in lines if line.get("path") == f"/v1/tasks/{task}/update"]
    assert line["request"] == answer.headers["x-request-id"]
    assert (line["method"], line["status"], line["client"]) == ("PUT", 201, "127.0.0.1")
    assert line["received"] > 200
    assert lines[0]["message"] == "listening"
    assert lines[-1]["message"] == "ended"
    for secret in [*secrets, "in_a_query", "embrace_device_wrong", "samples"]:
        assert secret not in server.log
    for kept in (tmp_path / "data").rglob("*"):  # hashes only, but for the administrator's own file
        if kept.is_file() and kept.name != "admin.token":
            assert not any(secret.encode() in kept.read_bytes() for secret in secrets)
