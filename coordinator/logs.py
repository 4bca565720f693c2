"""Log one line of JSON per event. Tokens never appear: no header, query string or body is logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.credentials import new_id

log = logging.getLogger("embrace.access")
REQUEST_ID = b"x-request-id"
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)

Observe = Callable[[str, str, int, float, int], None]  # method, route, status, seconds, bytes received


class JsonLines(logging.Formatter):
    """Format a record with its time, logger, request, and what was given as `extra={"facts": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "from": record.name,
            "message": record.getMessage(),
        }
        if (request := current_request.get()) is not None:
            line["request"] = request
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str) -> None:
    """Log to standard error, uvicorn's own messages too."""
    # JsonLines does not use these facts of a record, and collecting them takes as long as writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("boto3", "botocore", "s3transfer", "urllib3"):  # what they say to debug has URLs and signatures in it
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        other = logging.getLogger(name)
        other.handlers, other.propagate = [], name != "uvicorn.access"


class AccessLog:
    """ASGI middleware: gives every request a number, counts its bytes, and logs a line when it is answered."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, began, status, received = new_id(), time.perf_counter(), 500, 0

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (REQUEST_ID, request.encode())]
            await send(message)

        before = current_request.set(request)
        try:
            await self._app(scope, receiving, sending)
        finally:
            seconds = time.perf_counter() - began
            self._observe(scope["method"], _route(scope), status, seconds, received)
            facts = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(1e3 * seconds, 1),
                "received": received,
                "client": (scope.get("client") or ("",))[0],
            }
            log.info("request", extra={"facts": facts})
            current_request.reset(before)


def _route(scope: Scope) -> str:
    """Name the route as it is written in the program, so that an unknown path makes no new name."""
    return getattr(scope.get("route"), "path", "(none)")
