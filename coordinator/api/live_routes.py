"""One stream of everything that happens, for a page that watches the fleet. A stream that waits takes no thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from coordinator.api.auth import IDENTITY, Admin, Identity, Known, Service
from coordinator.api.limits import LARGEST
from coordinator.api.openapi import EVENT_STREAM, problems
from coordinator.coordinator import Coordinator
from coordinator.registry import Registry
from coordinator.reports import EVENTS_AT_ONCE
from federation.errors import InputError

router = APIRouter(prefix="/v1", tags=["admin"], dependencies=[Admin])
MOST_STREAMS = 64
BREATH = 0.25  # seconds in which several facts become one look at the database
PULSE = 5.0  # seconds after which a stream says that it is still there, and looks whether devices came or went
LONGEST = 3600.0  # seconds of a stream; a page opens the next by itself
AGAIN = 1000  # milliseconds until it does


class Streams:
    """Count the streams that are open."""

    def __init__(self) -> None:
        self.open = 0


@router.get(
    "/events",
    summary="What happens in all jobs, as it happens (server-sent events)",
    response_class=StreamingResponse,
    responses={**EVENT_STREAM, **problems(400)},
)
async def all_events(
    request: Request,
    service: Service,
    known: Known,
    after: Annotated[int | None, Query(ge=0, le=LARGEST, description="Default: what happens from now on.")] = None,
    seconds: Annotated[float, Query(ge=0, le=LONGEST, description="After which the stream ends.")] = LONGEST,
) -> StreamingResponse:
    """Events of all jobs, unnamed: `kind` says what happened. Two others have a name and no number: `fleet`, when
    devices came or went, with how many there are by state; `benchmarks`, when a device sent one, with when that was.

    `Last-Event-ID` continues an interrupted stream. It ends with the session of the page that opened it.
    """
    streams: Streams = request.app.state.streams
    if streams.open >= MOST_STREAMS:
        raise HTTPException(503, f"{MOST_STREAMS} streams are open; close one", {"Retry-After": "5"})
    start = _last_seen(request.headers.get("Last-Event-ID"), after)
    if start is None:
        start = await run_in_threadpool(service.overview.last_event)
    watch = Watch(service, known, request.scope[IDENTITY], time.monotonic() + seconds)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy passes it on as it comes
    return StreamingResponse(_counted(streams, watch.lines(start)), media_type="text/event-stream", headers=headers)


def _last_seen(given: str | None, after: int | None) -> int | None:
    if given is None:
        return after
    if not given.isascii() or not given.isdecimal() or len(given) > 18 or int(given) > LARGEST:
        raise InputError(f"Last-Event-ID: expected the number of an event, got {given[:40]!r}")
    return int(given)


async def _counted(streams: Streams, lines: AsyncIterator[str]) -> AsyncIterator[str]:
    streams.open += 1
    try:
        async for line in lines:
            yield line
    finally:
        streams.open -= 1


class Watch:
    """What one client sees."""

    def __init__(self, service: Coordinator, known: Registry, sender: Identity, until: float) -> None:
        self._service = service
        self._known = known
        self._sender = sender
        self._until = until

    async def lines(self, last: int) -> AsyncIterator[str]:
        """Yield what happened behind an event, and then what happens."""
        service, known = self._service, dict[str, Any]()
        yield f"retry: {AGAIN}\n\n"
        while True:
            count = service.watchers.count
            found, facts = await run_in_threadpool(service.overview.news, last)
            for row in found:
                last = row["id"]
                yield f"id: {last}\ndata: {_json(row)}\n\n"
            for name in [name for name, value in facts.items() if value != known.get(name)]:
                yield f"event: {name}\ndata: {_json(facts[name])}\n\n"
            if not found and facts == known:
                yield ": still here\n\n"
            known = facts
            if self._is_over():
                return
            if len(found) < EVENTS_AT_ONCE:
                await service.watchers.wait(count, min(PULSE, max(0.0, self._until - time.monotonic())))
                await asyncio.sleep(BREATH)
            if self._is_over():
                return

    def _is_over(self) -> bool:
        ended = self._sender.session and self._known.sessions.expires_at(self._sender.session) is None
        return bool(ended) or self._service.leaving or time.monotonic() >= self._until


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
