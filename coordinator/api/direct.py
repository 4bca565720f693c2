"""The three requests that every device makes in every round, past FastAPI's general way to a function.

That way takes longer than the work itself. Here only what is plainly in order is found: a token that is known, a
parameter as it should be. Everything else, every refusal above all, goes the general way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.device_routes import LONGEST_WAIT, MOST_REPORT, get_weights, next_task, send_update
from coordinator.api.metrics import counted
from coordinator.credentials import token_hash

Call = Callable[[], Awaitable[Response]]
_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4})?")


@dataclass(frozen=True)
class Shortcut:
    """To a function; `path` is the route's, for the numbers that are kept of each."""

    path: str
    pattern: re.Pattern[str]
    find: Callable[[Request, str, re.Match[str]], Call | None]


class Direct:
    """ASGI middleware that calls these functions itself where that is possible."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shortcut = _SHORTCUTS.get(scope["method"]) if scope["type"] == "http" else None
        matched = shortcut.pattern.fullmatch(scope["path"]) if shortcut is not None else None
        if shortcut is None or matched is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        hashed = _token_hash(request)
        device = _device(request, hashed)
        call = shortcut.find(request, device, matched) if device is not None else None
        # Last, because the general way counts a request too.
        if call is None or request.app.state.pace.take(hashed, time.monotonic()) > 0:
            await self._app(scope, receive, send)
            return
        scope["route"] = shortcut
        try:
            answer = await call()
        except Exception as error:
            answer = await _refusal(request, error)
        await answer(scope, receive, send)


async def _refusal(request: Request, error: Exception) -> Response:
    """What the application makes of an error. What it has no words for is a defect, and not for here."""
    handlers = request.app.exception_handlers
    known = next((kind for kind in type(error).__mro__ if kind in handlers and kind is not Exception), None)
    if known is None:
        raise error
    answer: Response = await handlers[known](request, error)
    return answer


def _token_hash(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token_hash(token) if scheme.lower() == "bearer" else ""


def _device(request: Request, hashed: str) -> str | None:
    """Who asks, if that is known."""
    device: str | None = request.app.state.registry.known_device(hashed)
    return None if device in request.app.state.coordinator.shut_out else device


def _for_next_task(request: Request, device: str, _: re.Match[str]) -> Call | None:
    given = request.query_params
    wait = given.get("wait", "30")
    plain = set(given) <= {"wait"} and _SECONDS.fullmatch(wait)
    if not plain or float(wait) > LONGEST_WAIT:
        return None
    return partial(next_task, request, device, request.app.state.coordinator, float(wait))


def _for_weights(request: Request, device: str, matched: re.Match[str]) -> Call | None:
    if request.scope["query_string"]:
        return None
    return partial(get_weights, matched[1], int(matched[2]), device, request.app.state.coordinator)


def _for_update(request: Request, device: str, matched: re.Match[str]) -> Call | None:
    report, digest = request.headers.get("embrace-report"), request.headers.get("content-digest")
    if report is None or len(report) > MOST_REPORT:
        return None
    service = request.app.state.coordinator

    async def send() -> Response:
        with counted(request):
            return await send_update(matched[1], request, device, service, report, digest)

    return send


_SHORTCUTS = {
    "POST": Shortcut("/v1/tasks/next", re.compile("/v1/tasks/next"), _for_next_task),
    "GET": Shortcut(
        "/v1/jobs/{job}/versions/{version}/weights",
        re.compile("/v1/jobs/([^/]+)/versions/([0-9]{1,9})/weights"),
        _for_weights,
    ),
    "PUT": Shortcut("/v1/tasks/{task}/update", re.compile("/v1/tasks/([^/]+)/update"), _for_update),
}
