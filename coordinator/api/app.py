"""The application: routes, errors, limits, and the clock that lets leases run out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Response
from fastapi.concurrency import run_in_threadpool

from coordinator.api import (
    admin_routes,
    benchmark_routes,
    cors,
    device_routes,
    join_routes,
    live_routes,
    metrics,
    openapi,
    overview_routes,
    pages,
    part_routes,
    problems,
    session_routes,
    storage_routes,
    table_routes,
)
from coordinator.api.admission import Admission
from coordinator.api.documents import Health
from coordinator.api.limits import ClientLimits, buckets, failed_enrolments, tries
from coordinator.api.live_routes import Streams
from coordinator.api.shared import Shared
from coordinator.batching import Batched
from coordinator.body_check import AT_ONCE
from coordinator.coordinator import Coordinator
from coordinator.logs import AccessLog
from coordinator.presence import PRESENCE
from coordinator.registry import Registry
from federation import __version__

log = logging.getLogger("embrace.api")
TICK = 0.25  # seconds
PRUNE = 60.0  # seconds until it is looked whether what is old has to go
READY = 1.0  # seconds for which it is taken as known that the database answers
# Requests for a task and heartbeats that are answered at a time: each is cheap, a turn behind updates is not.
MOST_ASKS, MOST_BEATS = 256, 1024
GATHERS = 0.05  # seconds in which updates that arrive are gathered: a transaction costs as much as many of them
THREADS = 8  # that wait for the database or the disk: it has one writer, and every thread takes memory


def create_app(
    coordinator: Coordinator, registry: Registry, limits: ClientLimits | None = None, origins: Sequence[str] = ()
) -> FastAPI:
    """Build the REST interface of a coordinator, which starts and stops with the application.

    Pages of other `origins` may call it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        app.state.body_checks = CapacityLimiter(AT_ONCE)
        await run_in_threadpool(coordinator.start)
        ended = asyncio.Event()
        ticking = asyncio.create_task(_repeat(TICK, coordinator.tick, ended))
        pruning = asyncio.create_task(_repeat(PRUNE, coordinator.prune, ended))
        try:
            yield
        finally:
            ended.set()
            await ticking  # its thread has a connection to the database
            pruning.cancel()
            await run_in_threadpool(coordinator.stop)

    limits = limits or ClientLimits()
    counts = metrics.Metrics(lambda: coordinator.census(coordinator.clock() - PRESENCE), coordinator.figures)
    app = FastAPI(
        title="embrace coordinator",
        version=__version__,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        lifespan=lifespan,
    )
    coordinator.tell_registry = registry.heard
    app.state.coordinator = coordinator
    app.state.registry = registry
    app.state.next_task = Batched(coordinator.next_tasks, MOST_ASKS)
    app.state.accept = Batched(coordinator.accept_all, pause=GATHERS)
    app.state.complete = Batched(coordinator.complete_all)
    app.state.heartbeat = Batched(coordinator.heartbeats, MOST_BEATS)
    app.state.metrics = counts
    app.state.pace = buckets(limits)
    app.state.tries = tries()
    app.state.streams = Streams()
    app.state.failed_enrolments = failed_enrolments()
    problems.install(app)
    for router in (
        join_routes.router,
        device_routes.router,
        storage_routes.router,
        part_routes.router,
        benchmark_routes.router,
        admin_routes.router,
        table_routes.router,
        overview_routes.router,
        live_routes.router,
        session_routes.router,
    ):
        app.include_router(router)
    pages.install(app)
    _operations(app, coordinator, counts)
    app.add_middleware(Admission, limits=limits)
    cors.install(app, origins)
    app.add_middleware(AccessLog, observe=counts.observe)  # added last: it sees everything
    openapi.install(app)
    return app


def _operations(app: FastAPI, coordinator: Coordinator, counts: metrics.Metrics) -> None:
    """Add the routes for operators. They need no token: a proxy can keep others away from them.

    However many clients ask, the database is asked for them once in a while.
    """
    text = Shared(lambda: counts.text(), metrics.KEPT)
    database = Shared(coordinator.check_database, READY)

    @app.get("/healthz", tags=["operations"], summary="Is the process alive?")
    async def healthz() -> Health:
        """Answers without touching the database."""
        return Health(status="ok", version=__version__)

    @app.get("/readyz", tags=["operations"], summary="Can it serve?")
    async def readyz() -> Health:
        """Asks the database, at most once a second; 503 if that does not answer."""
        await database.latest()
        return Health(status="ready", version=__version__)

    @app.get("/metrics", tags=["operations"], summary="Numbers for Prometheus", response_class=Response)
    async def prometheus() -> Response:
        """The text format of Prometheus. docs/guides/operations.md explains every number."""
        return Response(await text.latest(), media_type=metrics.MEDIA_TYPE)


async def _repeat(seconds: float, act: Callable[[], None], ended: asyncio.Event) -> None:
    """Do something again and again, so long after it was done, until that is to end."""
    while True:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
        if ended.is_set():
            return
        try:
            await run_in_threadpool(act)
        except Exception:  # time goes on
            log.exception("what is done every %g seconds failed", seconds)
