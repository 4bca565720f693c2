"""How much one client may take: bytes, seconds, requests. A refusal comes before anything is read or computed.

    431   more or longer headers than any client of ours sends
    413   a body above the bound of its route: by its Content-Length, or as soon as too much has come
    408   a body that comes too slowly; the connection is closed
    429   more requests per second than a device may send (Retry-After)
    503   more requests at once than the process may answer (Retry-After)

Headers that come too slowly never become a request: http.PatientProtocol drops their connection.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from dataclasses import dataclass
from functools import partial

import anyio
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.auth import Given
from coordinator.api.problems import problem
from coordinator.credentials import token_hash
from coordinator.http import INFLOW
from coordinator.inflow import Inflow, Sink

HEADER_BYTES = 32 << 10  # all headers together; the report of an update has up to 16 KiB
HEADER_COUNT = 100
LEAST_BYTES = 1024  # of a body, within `slow_client` seconds of waiting for it
BURST = 4.0  # seconds' worth of requests that a device may send at once
POUR = "embrace.pour"  # the extension of the scope that `pour` uses
_KNOWN_CLIENTS = 65_536

# Bodies that are read piece by piece, checked on the way, and have bounds of their own.
_STREAMED = re.compile(r"PUT /v1/(tasks/[^/]+/update|bundles/[^/]+/files/.+)")
# Requests that mostly wait: they hold a connection and next to nothing else.
_WAITING = re.compile(r"POST /v1/tasks/next|GET /v1/jobs/[^/]+/events")
# A busy process is still alive: whoever asks gets an answer.
_OPERATIONS = ("/healthz", "/readyz", "/metrics")


@dataclass(frozen=True)
class ClientLimits:
    """What is allowed; settings.py has the same names."""

    requests_per_second: float = 50.0  # of one device
    concurrent_requests: int = 1024  # that are answered at the same time
    waiting_requests: int = 8192  # ... that wait for a task or for events
    slow_client: float = 15.0  # seconds for the headers of a request, and for every KiB of its body
    json_bytes: int = 1 << 20


class Buckets:
    """A token bucket for every key: `rate` per second in the long run, `burst` at once. Time is an argument."""

    def __init__(self, rate: float, burst: float, most_keys: int = _KNOWN_CLIENTS) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)
        self._most = most_keys
        self._left: dict[str, tuple[float, float]] = {}  # key -> tokens, when; those used last stand last

    def take(self, key: str, now: float) -> float:
        """0.0, and a token is taken; or the seconds until there is one."""
        tokens, then = self._left.pop(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        lacking = max(0.0, 1.0 - tokens)
        self._left[key] = (tokens if lacking else tokens - 1.0, now)
        if len(self._left) > self._most:
            del self._left[next(iter(self._left))]
        return lacking / self._rate


def buckets(limits: ClientLimits) -> Buckets:
    return Buckets(limits.requests_per_second, BURST * limits.requests_per_second)


async def paced(request: Request, given: Given) -> None:
    """A dependency of the routes of devices: 429 for one that asks too often. Waiting for an answer costs nothing."""
    host = request.client.host if request.client else ""
    key = token_hash(given.credentials) if given else f"from {host}"
    wait = request.app.state.pace.take(key, time.monotonic())
    if wait > 0:
        seconds = str(math.ceil(wait))
        raise HTTPException(429, "this device asks too often; slow down", {"Retry-After": seconds})


async def pour(request: Request, sink: Sink) -> None:
    """The body of a request, piece by piece, without a copy of it where the server can do that."""
    poured = request.scope.get("extensions", {}).get(POUR)
    if poured is not None:
        await poured(sink)
        return
    async for chunk in request.stream():
        sink(memoryview(chunk))


def check_length(request: Request, most: int) -> None:
    """413 for a body that is announced to be longer; what comes without an announcement is counted as it comes."""
    announced = _content_length(request.scope)
    if announced is not None and announced > most:
        raise HTTPException(413, f"the body is announced with {announced} bytes; expected at most {most}")


def body_bound(method: str, path: str, limits: ClientLimits) -> int | None:
    """Most bytes of a request's body; None for the routes that check it themselves."""
    return None if _STREAMED.fullmatch(f"{method} {path}") else limits.json_bytes


def kind_of(method: str, path: str) -> str:
    """What is counted together."""
    if path in _OPERATIONS:
        return "operations"
    return "waiting" if _WAITING.fullmatch(f"{method} {path}") else "working"


class Bounded:
    """ASGI middleware that keeps every request within the limits."""

    def __init__(self, app: ASGIApp, limits: ClientLimits, leaving: threading.Event) -> None:
        self._app = app
        self._limits = limits
        self._leaving = leaving
        self._open = {"working": 0, "waiting": 0, "operations": 0}
        self._most = {"working": limits.concurrent_requests, "waiting": limits.waiting_requests, "operations": math.inf}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        kind = kind_of(scope["method"], scope["path"])
        refusal = self._refusal(scope, kind)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._open[kind] += 1
        try:
            await self._serve(scope, receive, send, kind)
        finally:
            self._open[kind] -= 1

    def _refusal(self, scope: Scope, kind: str) -> JSONResponse | None:
        if scope["path"].endswith("\n"):  # the framework's routes match it nevertheless; whatever has a bound would not
            return problem(404, "Not Found")
        headers, most = scope["headers"], body_bound(scope["method"], scope["path"], self._limits)
        if len(headers) > HEADER_COUNT or sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES:
            detail = f"expected at most {HEADER_COUNT} headers with {HEADER_BYTES} bytes"
            return problem(431, "Headers too large", detail)
        announced = _content_length(scope)
        if most is not None and announced is not None and announced > most:
            return problem(413, "Body too large", f"{announced} bytes are announced; expected at most {most}")
        if self._open[kind] >= self._most[kind]:
            busy = problem(503, "Too many requests at once", "try again in a moment")
            busy.headers["Retry-After"] = "1"
            return busy
        return None

    async def _serve(self, scope: Scope, receive: Receive, send: Send, kind: str) -> None:
        body = _Body(receive, body_bound(scope["method"], scope["path"], self._limits), self._limits.slow_client)
        inflow: Inflow | None = scope.get("extensions", {}).get(INFLOW)
        if inflow is not None:
            scope["extensions"][POUR] = partial(body.pour, inflow)
        begun = replaced = False

        async def receiving() -> Message:
            if kind == "waiting" and self._leaving.is_set():
                return {"type": "http.disconnect"}
            return await body.receive()

        async def sending(message: Message) -> None:
            nonlocal begun, replaced
            if body.refusal is None or begun:
                begun = True
                await send(message)
            elif not replaced:  # whatever the application made of a body that was cut off
                replaced = True
                await body.refusal(scope, receive, send)

        await self._app(scope, receiving, sending)


class _Body:
    """A request's body on its way in. What breaks a rule ends it, and `refusal` is the answer."""

    def __init__(self, receive: Receive, most: int | None, window: float) -> None:
        self._receive = receive
        self._most = math.inf if most is None else most
        self._window = window
        self._size = 0
        self._whole = False
        self._waited = 0.0
        self._came = 0  # in the present window
        self.refusal: JSONResponse | None = None

    async def receive(self) -> Message:
        if self._whole:  # all that can come now is the end of the connection
            return await self._receive()
        message = await self._in_time()
        if message is None:
            self._too_slow()
        else:
            self._size += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._size > self._most:
                self.refusal = problem(413, "Body too large", f"expected at most {self._most:.0f} bytes")
        if self.refusal is not None or message is None:
            self._whole = True
            return {"type": "http.disconnect"}
        return message

    async def pour(self, inflow: Inflow, sink: Sink) -> None:
        """The whole body into a sink, which knows how much it takes; ends for a client that is too slow."""
        loop, came = asyncio.get_running_loop(), inflow.received
        timer = loop.call_later(self._window, lambda: look())

        def look() -> None:
            nonlocal came, timer
            if inflow.received - came < LEAST_BYTES:
                self._too_slow()
                inflow.give_up()
            came, timer = inflow.received, loop.call_later(self._window, look)

        try:
            await inflow.pour(sink)
        finally:
            timer.cancel()

    def _too_slow(self) -> None:
        self.refusal = problem(408, "Too slow", f"expected {LEAST_BYTES} bytes in {self._window:g} seconds")
        self.refusal.headers["Connection"] = "close"

    async def _in_time(self) -> Message | None:
        """The next piece; None from a client that is too slow. Only time spent waiting for it counts."""
        while True:
            if self._waited >= self._window:
                if self._came < LEAST_BYTES:
                    return None
                self._waited, self._came = 0.0, 0
            began = time.monotonic()
            message: Message | None = None
            with anyio.move_on_after(self._window - self._waited):
                message = await self._receive()
            self._waited += time.monotonic() - began
            if message is not None:
                self._came += len(message.get("body", b""))
                return message


def _content_length(scope: Scope) -> int | None:
    found = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(found) if found.isdigit() else None
