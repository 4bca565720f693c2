"""The three requests that every device makes in every round, without FastAPI's general way of finding arguments.

That way takes longer than the work itself. Here only what is plainly in order is found: a token that is known, a
parameter as it should be. Everything else, every refusal above all, goes the general way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from coordinator.api.metrics import counted
from coordinator.credentials import token_hash

Arguments = dict[str, Any]
LONGEST_WAIT = 60.0
MOST_REPORT = 16_384


class Direct(APIRoute):
    """A route whose function is called directly where that is possible."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual, find = super().get_route_handler(), _FIND.get(self.name)
        if find is None:
            return usual

        async def handle(request: Request) -> Response:
            arguments = find(request)
            if arguments is None or (device := _device(request)) is None:
                return await usual(request)
            answer: Response = await self.endpoint(device=device, service=request.app.state.coordinator, **arguments)
            return answer

        async def handle_counted(request: Request) -> Response:
            async with asynccontextmanager(counted)(request):
                return await handle(request)

        return handle_counted if self.name == "send_update" else handle


def _device(request: Request) -> str | None:
    """Who asks, if that is known and it does not ask too often."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    state = request.app.state
    device: str | None = state.registry.known_device(token) if scheme.lower() == "bearer" else None
    if device is None or device in state.coordinator.shut_out:
        return None
    return None if state.pace.take(token_hash(token), time.monotonic()) > 0 else device


def _for_next_task(request: Request) -> Arguments | None:
    given = request.query_params
    wait = given.get("wait", "30")
    plain = set(given) <= {"wait"} and len(wait) < 10 and wait.replace(".", "", 1).isdecimal()
    return {"request": request, "wait": float(wait)} if plain and float(wait) <= LONGEST_WAIT else None


def _for_weights(request: Request) -> Arguments | None:
    version = request.path_params["version"]
    plain = not request.url.query and version.isascii() and version.isdecimal() and len(version) < 10
    return {"job": request.path_params["job"], "version": int(version)} if plain else None


def _for_update(request: Request) -> Arguments | None:
    report = request.headers.get("embrace-report")
    if report is None or len(report) > MOST_REPORT:
        return None
    digest = request.headers.get("content-digest")
    task = request.path_params["task"]
    return {"request": request, "task": task, "embrace_report": report, "content_digest": digest}


_FIND: dict[str, Callable[[Request], Arguments | None]] = {
    "next_task": _for_next_task,
    "get_weights": _for_weights,
    "send_update": _for_update,
}
