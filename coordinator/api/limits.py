"""Bound what one client may take: bytes, seconds, requests. A refusal comes before anything is read or computed.

    431   more or longer headers than any client of ours sends
    413   a body above the bound of its route: by its Content-Length, or as soon as too much has come
    401   a body of a client without a valid token, but for an enrolment; the connection is closed
    408   a body that comes too slowly; the connection is closed
    429   more requests per second than a device may send, or more wrong tokens than people mistype (Retry-After)
    503   more requests at once than the process may answer (Retry-After): admission.py

Headers that come too slowly never become a request: server.py closes their connection.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from coordinator.api.problems import problem
from coordinator.errors import NotAllowed

HEADER_BYTES = 32 << 10  # all headers together; the report of an update has up to 16 KiB
HEADER_COUNT = 100
UNKNOWN_BYTES = 4 << 10  # of the body of a client that is neither a device nor the administrator: an enrolment
UNKNOWN_SECONDS = 5.0  # for that body
LEAST_BYTES = 1024  # of a body, within `slow_client` seconds of waiting for it
LARGEST = (1 << 31) - 1  # number of a round, a version or an event: what every database can count to
BURST = 4.0  # seconds' worth of requests that a device may send at once
TRIES_PER_SECOND, TRIES_AT_ONCE = 0.5, 10.0  # of an address, to sign in with a wrong token
FAILED_PER_SECOND, FAILED_AT_ONCE = 1.0, 32.0  # enrolments of an address that may fail: a house behind one router
_KNOWN_CLIENTS = 65_536

# Bodies that are read piece by piece, checked on the way, and have bounds of their own.
_STREAMED = re.compile(r"PUT /v1/(tasks/[^/]+/update|bundles/[^/]+/files/.+|evaluation-data/[^/]+)")


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
        """Take a token and return 0.0, or return the seconds until there is one."""
        tokens = self._tokens(key, now)
        lacking = max(0.0, 1.0 - tokens)
        self._left.pop(key, None)
        self._left[key] = (tokens if lacking else tokens - 1.0, now)
        if len(self._left) > self._most:
            del self._left[next(iter(self._left))]
        return lacking / self._rate

    def until_next(self, key: str, now: float) -> float:
        """Return the seconds until there is a token, and take none."""
        return max(0.0, 1.0 - self._tokens(key, now)) / self._rate

    def _tokens(self, key: str, now: float) -> float:
        tokens, then = self._left.get(key, (self._burst, now))
        return min(self._burst, tokens + (now - then) * self._rate)


def buckets(limits: ClientLimits) -> Buckets:
    return Buckets(limits.requests_per_second, BURST * limits.requests_per_second)


def tries() -> Buckets:
    return Buckets(TRIES_PER_SECOND, TRIES_AT_ONCE)


def failed_enrolments() -> Buckets:
    return Buckets(FAILED_PER_SECOND, FAILED_AT_ONCE)


def check_pace(request: HTTPConnection, token_hash: str) -> None:
    """Answer 429 to a device that asks too often. Waiting for an answer costs nothing."""
    host = address_of(request.scope)
    wait = request.app.state.pace.take(token_hash or f"from {host}", time.monotonic())
    _refuse_early(wait, "this device asks too often; slow down")


def check_enrolments(request: HTTPConnection) -> None:
    """Answer 429 to an address from which too many enrolments have failed."""
    wait = request.app.state.failed_enrolments.until_next(address_of(request.scope), time.monotonic())
    _refuse_early(wait, "too many enrolments from this address have failed; check the token and try again later")


@contextmanager
def counting_failures(request: HTTPConnection) -> Iterator[None]:
    """Count an enrolment token that is refused in the block against the address that gave it."""
    try:
        yield
    except NotAllowed:
        request.app.state.failed_enrolments.take(address_of(request.scope), time.monotonic())
        raise


def _refuse_early(wait: float, why: str) -> None:
    if wait > 0:
        raise HTTPException(429, why, {"Retry-After": str(math.ceil(wait))})


def check_tries(request: HTTPConnection) -> None:
    """Answer 429 to an address that signs in with wrong tokens again and again. The right one is never refused."""
    wait = request.app.state.tries.take(address_of(request.scope), time.monotonic())
    _refuse_early(wait, "too many wrong tokens from this address")


def address_of(scope: Scope) -> str:
    """Return the address of a client. With a proxy in front it is the proxy's, unless the settings name that."""
    return str(scope["client"][0]) if scope.get("client") else ""


def check_length(request: Request, most: int) -> None:
    """Answer 413 to a body that is announced to be longer; what is not announced is counted as it comes."""
    announced = _content_length(request.scope)
    if announced is not None and announced > most:
        raise HTTPException(413, f"the body is announced with {announced} bytes; expected at most {most}")


def body_bound(method: str, path: str, limits: ClientLimits, *, known: bool) -> int | None:
    """Most bytes of a request's body; None for the routes that check it themselves, once they know the sender."""
    if _STREAMED.fullmatch(f"{method} {path}"):
        return None
    return limits.json_bytes if known else UNKNOWN_BYTES


def refuse_head(scope: Scope) -> JSONResponse | None:
    """Refuse a request by its path and headers."""
    headers = scope["headers"]
    if not scope["path"].isprintable():  # routes match a line break at the end, and no database holds a NUL
        return problem(404, "Not Found")
    if b"%00" in scope.get("query_string", b""):
        return problem(400, "Invalid request", "expected no NUL (%00) in the query")
    if len(headers) > HEADER_COUNT or sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES:
        return problem(431, "Headers too large", f"expected at most {HEADER_COUNT} headers with {HEADER_BYTES} bytes")
    return None


def refuse_length(scope: Scope, most: int | None) -> JSONResponse | None:
    """Refuse a body that is announced to be too long."""
    announced = _content_length(scope)
    if most is not None and announced is not None and announced > most:
        return problem(413, "Body too large", f"{announced} bytes are announced; expected at most {most}")
    return None


class Transfer:
    """Pass a request's body and its answer on; answer in the application's place if the body is too long or too slow.

    One timer watches a body. Only time that the application spends waiting for the client counts.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, window: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._window = window
        self.most: int | None = None  # bytes of the body
        self.seconds: float | None = None  # of waiting for all of it; None: as long as it keeps coming
        self._loop = asyncio.get_running_loop()
        self._asked = False
        self._size = 0
        self.moved = 0  # bytes of the body and of the answer
        self._came = 0  # bytes in the present window
        self._waited = 0.0  # seconds in the present window
        self._waits_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusing: asyncio.Task[None] | None = None
        self._whole = not has_body(scope)
        self._answered = False
        self._refused = False

    async def receive(self) -> Message:
        """Receive the next piece; a body that was refused is a client that has gone."""
        if self._whole:  # all that can come now is the end of the connection
            return await self._receive()
        self._asked = True
        if self._timer is None:
            self._window = self.seconds or self._window
            self._timer = self._loop.call_later(self._window, self._look)
        self._waits_since = self._loop.time()
        message = await self._receive()
        self._count_time()
        self._waits_since = None
        count = len(message.get("body", b""))
        self._came += count
        self._size += count
        self.moved += count
        if self.most is not None and self._size > self.most:
            await self._refuse(problem(413, "Body too large", f"expected at most {self.most} bytes"))
            message = {"type": "http.disconnect"}
        if not message.get("more_body", False):
            self.close()
        return message

    async def send(self, message: Message) -> None:
        """Send what the application answers, unless its request was refused meanwhile."""
        if not self._refused:
            if not self._answered and not self._asked and _expects_continue(self._scope):
                # What comes next may be the body that was not asked for, or another request.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            self._answered = True
            await self._send(message)
            self.moved += len(message.get("body", b""))

    def close(self) -> None:
        """Stop watching."""
        self._whole = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count_time(self) -> None:
        if self._waits_since is not None:
            now = self._loop.time()
            self._waited += now - self._waits_since
            self._waits_since = now

    def _look(self) -> None:
        """Begin the next window, or end the request."""
        self._count_time()
        if self._waited >= self._window:
            if self._came < LEAST_BYTES or self.seconds is not None:
                wanted = "everything" if self.seconds is not None else f"{LEAST_BYTES} bytes"
                slow = problem(408, "Too slow", f"expected {wanted} in {self._window:g} seconds")
                slow.headers["Connection"] = "close"
                self._refusing = self._loop.create_task(self._refuse(slow))
                return
            self._waited = 0.0
            self._came = 0
        self._timer = self._loop.call_later(self._window - self._waited, self._look)

    async def _refuse(self, answer: JSONResponse) -> None:
        if not self._answered:
            self._refused = True
            await answer(self._scope, self._receive, self._send)


def has_body(scope: Scope) -> bool:
    """Whether a request announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])


def _content_length(scope: Scope) -> int | None:
    found = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(found) if found.isdigit() else None
