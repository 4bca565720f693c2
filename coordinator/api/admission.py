"""Admit requests: find out who sends them, bound how many are answered at once, and let few of them work at a time.

A request at work takes far more memory than one that waits, so those that are past authentication take places. A
request whose client sends its body or reads its answer slowly loses its place and goes on without, so that no other
client waits for it. Long polls, event streams, heartbeats and clients without a valid token take no place.

Of a client without a valid token a body is read for an enrolment only, within seconds, and an address may have a few of
these at once. Whose token it is, is found out before that: no such client keeps a device from being recognised.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, deque
from typing import Literal

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.auth import IDENTITY, Identity, look_up, recognise
from coordinator.api.limits import (
    UNKNOWN_SECONDS,
    ClientLimits,
    Transfer,
    address_of,
    body_bound,
    has_body,
    refuse_head,
    refuse_length,
)
from coordinator.api.problems import database_problem, problem

PLACES = 16
UNKNOWN_OF_ADDRESS = 32  # requests at once of clients without a valid token
LOOK_UPS_OF_ADDRESS = 128  # tokens of clients that the coordinator does not know yet, looked up or waiting for it
LOOK_UPS = 2  # tokens that the database is asked for at a time: threads stay for devices that are known
PATIENCE = 0.25  # seconds in which a request has to move so many bytes, or it loses its place
LEAST_MOVED = 1 << 16
LONGEST_WAIT = 1.0  # seconds for a place; after that requests go on without, one after the other
BETWEEN = 0.02  # seconds from one of these to the next: those that waited together do not begin together
PLACE = "embrace.place"  # the key of the scope

Kind = Literal["working", "waiting", "brief", "unknown", "operations", "looked up"]
_ENROLMENT = ("POST", "/v1/devices")  # the one body of a client that is not known
# Requests that mostly wait: they hold a connection and next to nothing else.
_WAITING = re.compile(r"POST /v1/tasks/(?:next|[^/]+/complete)|GET /v1/events|GET /v1/jobs/[^/]+/events")
# Requests that move next to nothing: they do not wait behind those that move models.
_BRIEF = re.compile(r"POST /v1/tasks/[^/]+/heartbeat|GET /v1/jobs/[^/]+(/state)?")
# A busy process is still alive: these are always answered.
_OPERATIONS = ("/healthz", "/readyz", "/metrics")


def kind_of(method: str, path: str, *, known: bool) -> Kind:
    """Name what is counted together: clients without a valid token use up nothing that belongs to the others."""
    if path in _OPERATIONS:
        return "operations"
    if not known:
        return "unknown"
    if _WAITING.fullmatch(f"{method} {path}"):
        return "waiting"
    return "brief" if _BRIEF.fullmatch(f"{method} {path}") else "working"


def give_way(request: Request) -> None:
    """Free the place of a request that goes on to wait for the disk or the database."""
    place: Place | None = request.scope.get(PLACE)
    if place is not None:
        place.leave()


class Places:
    """Hand out a number of places, first come, first served."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[float, asyncio.Future[bool]]] = deque()  # until when, and whether it is a place
        self._timer: asyncio.TimerHandle | None = None  # of the first that waits

    async def take(self, transfer: Transfer) -> Place | None:
        """Wait for a place; None if that takes too long, and the request goes on without."""
        if self._free > 0:
            self._free -= 1
            return Place(self, transfer)
        loop = asyncio.get_running_loop()
        offered: asyncio.Future[bool] = loop.create_future()
        self._waiting.append((loop.time() + LONGEST_WAIT, offered))
        if self._timer is None:
            self._timer = loop.call_later(LONGEST_WAIT, self._let_on)
        try:
            return Place(self, transfer) if await offered else None
        except BaseException:
            if not offered.cancelled() and offered.result():  # it was given a place that no request will leave
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Give a place that was left to the next request that still waits."""
        while self._waiting:
            _, offered = self._waiting.popleft()
            if not offered.done():
                offered.set_result(True)
                return
        self._free += 1

    def _let_on(self) -> None:
        """Let the first request that has waited too long go on without a place."""
        self._timer = None
        while self._waiting and self._waiting[0][1].done():  # it was cancelled
            self._waiting.popleft()
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        rest = self._waiting[0][0] - loop.time()
        if rest <= 0:
            self._waiting.popleft()[1].set_result(False)
        self._timer = loop.call_later(max(rest, BETWEEN), self._let_on)


class Place:
    """A place at work, lost by a request that moves too little."""

    __slots__ = ("_before", "_places", "_timer", "_transfer")

    def __init__(self, places: Places, transfer: Transfer) -> None:
        self._places = places
        self._transfer = transfer
        self._before = transfer.moved
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(PATIENCE, self._look)

    def leave(self) -> None:
        """Make room for the next request; once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._places.pass_on()

    def _look(self) -> None:
        if self._transfer.moved - self._before < LEAST_MOVED:
            self.leave()
        else:
            self._before = self._transfer.moved
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._look)


class Admission:
    """ASGI middleware that keeps every request within the limits."""

    def __init__(self, app: ASGIApp, limits: ClientLimits) -> None:
        self._app = app
        self._limits = limits
        self._places = Places(PLACES)
        self._look_ups = asyncio.Semaphore(LOOK_UPS)
        self._open: Counter[Kind] = Counter()
        self._most: dict[Kind, float] = {
            "working": limits.concurrent_requests,
            "waiting": limits.waiting_requests,
            "brief": limits.concurrent_requests,
            "unknown": limits.concurrent_requests,
            "looked up": limits.waiting_requests,
            "operations": math.inf,
        }
        self._unknown_of: Counter[str] = Counter()  # address -> requests
        self._looked_up_of: Counter[str] = Counter()  # address -> tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        transfer = Transfer(scope, receive, send, self._limits.slow_client)
        identity, answer = Identity(), refuse_head(scope)
        if answer is None and scope["path"] not in _OPERATIONS:  # which are answered without the database
            identity, answer = await self._identify(scope)
        scope[IDENTITY] = identity
        kind = kind_of(scope["method"], scope["path"], known=identity.is_known)
        transfer.most = body_bound(scope["method"], scope["path"], self._limits, known=identity.is_known)
        answer = answer or refuse_length(scope, transfer.most)
        if not identity.is_known:
            transfer.seconds = UNKNOWN_SECONDS
            answer = answer or self._refuse_body(scope)
        address = address_of(scope) if kind == "unknown" else ""
        answer = answer or self._refuse_busy(kind, address)
        if answer is not None:
            await answer(scope, receive, transfer.send)
            return
        self._open[kind] += 1
        if address:
            self._unknown_of[address] += 1
        place = None
        try:
            place = scope[PLACE] = await self._places.take(transfer) if kind == "working" else None
            await self._app(scope, transfer.receive, transfer.send)
        finally:
            self._open[kind] -= 1
            if address:
                self._unknown_of[address] -= 1
                self._unknown_of += Counter()  # forgets addresses with none
            transfer.close()
            scope.pop(PLACE, None)  # which leads back to the scope: no work for the garbage collector
            if place is not None:
                place.leave()

    async def _identify(self, scope: Scope) -> tuple[Identity, JSONResponse | None]:
        """Find the sender. Those that the database has to be asked for are bounded, and asked for a few at a time.

        They are counted by themselves: a look-up is over in milliseconds, whatever other clients do. An address has a
        bound of its own: with tokens that it made up, a client makes no long queue in front of others.
        """
        state = scope["app"].state
        found = recognise(scope, state.registry, state.coordinator)
        if isinstance(found, Identity):
            return found, None
        address = address_of(scope)
        busy = self._refuse_busy("looked up")
        if busy is not None or self._looked_up_of[address] >= LOOK_UPS_OF_ADDRESS:
            return Identity(), busy or _busy()
        self._open["looked up"] += 1
        self._looked_up_of[address] += 1
        try:
            async with self._look_ups:
                return await run_in_threadpool(look_up, found, state.registry), None
        except OperationalError as error:
            return Identity(), database_problem(error)
        finally:
            self._open["looked up"] -= 1
            self._looked_up_of[address] -= 1
            self._looked_up_of += Counter()  # forgets addresses with none

    def _refuse_body(self, scope: Scope) -> JSONResponse | None:
        """Answer a client that is not known before its body comes, unless it wants to enrol."""
        if not has_body(scope) or (scope["method"], scope["path"]) == _ENROLMENT:
            return None
        known = "the administrator's, or a device's that is enrolled and not shut out"
        answer = problem(401, "Not allowed", f"this coordinator knows no such token; expected {known}")
        answer.headers["Connection"] = "close"  # what follows would be the body
        return answer

    def _refuse_busy(self, kind: Kind, address: str = "") -> JSONResponse | None:
        if self._open[kind] < self._most[kind] and self._unknown_of[address] < UNKNOWN_OF_ADDRESS:
            return None
        return _busy()


def _busy() -> JSONResponse:
    answer = problem(503, "Too many requests at once", "try again in a moment")
    answer.headers["Retry-After"] = "1"
    return answer
