"""The application: routes, errors, and the clock that lets leases run out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from coordinator.api import admin_routes, device_routes, problems
from coordinator.registry import Registry
from coordinator.service import Coordinator
from federation import __version__

TICK = 0.5  # seconds


def create_app(coordinator: Coordinator, registry: Registry) -> FastAPI:
    """The REST interface of a coordinator; it starts and stops with the application."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(coordinator.start)
        ticking = asyncio.create_task(_tick(coordinator))
        try:
            yield
        finally:
            ticking.cancel()
            await run_in_threadpool(coordinator.stop)

    app = FastAPI(
        title="embrace coordinator",
        version=__version__,
        description="Runs training jobs on unequal devices. Devices enrol, wait for tasks, and send updates.",
        lifespan=lifespan,
    )
    app.state.coordinator, app.state.registry = coordinator, registry
    problems.install(app)
    app.include_router(device_routes.router)
    app.include_router(admin_routes.router)

    @app.get("/healthz", tags=["operations"], summary="Is the process alive?")
    def healthz() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/readyz", tags=["operations"], summary="Can it serve?")
    def readyz() -> dict[str, str]:
        coordinator.jobs()
        return {"status": "ready"}

    return app


async def _tick(coordinator: Coordinator) -> None:
    while True:
        await asyncio.sleep(TICK)
        await run_in_threadpool(coordinator.tick)
