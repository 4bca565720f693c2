"""What the administrator does: bundles, jobs, devices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, StreamingResponse

from coordinator.api.auth import Admin, Known, Service
from coordinator.api.documents import DeviceDocument, Invitation, Invited, JobCreated, JobDocument, JobRequest
from coordinator.plan import plan_from
from federation.errors import InputError

router = APIRouter(prefix="/v1", tags=["admin"], dependencies=[Admin])
MOST_FILE = 64 << 30


@router.post("/enrolments", status_code=201, summary="Invite devices")
def invite(request: Invitation, known: Known) -> Invited:
    return Invited(token=known.invite(request.uses, request.seconds))


@router.get("/devices", summary="All devices")
def devices(service: Service) -> list[DeviceDocument]:
    return [DeviceDocument(**row) for row in service.devices()]


@router.delete("/devices/{device}", status_code=204, summary="Shut a device out")
def revoke(device: str, service: Service) -> None:
    service.revoke(device)


@router.put("/bundles/{digest}/files/{name:path}", status_code=204, summary="Send a file of a bundle")
async def put_file(digest: str, name: str, request: Request, service: Service) -> None:
    """Files first, in any order; the bundle can be used once all are there and are what its manifest says."""
    path = await run_in_threadpool(service.draft_file, digest, name)
    size = 0
    with path.open("wb") as file:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MOST_FILE:
                raise InputError(f"a file of a bundle has at most {MOST_FILE} bytes")
            file.write(chunk)


@router.post("/bundles/{digest}", status_code=204, summary="Complete a bundle")
def complete_bundle(digest: str, service: Service) -> None:
    service.complete_bundle(digest)


@router.post("/jobs", status_code=201, summary="Create a job")
def create_job(request: JobRequest, service: Service) -> JobCreated:
    return JobCreated(id=service.create_job(plan_from(request.plan), request.bundle))


@router.get("/jobs", summary="All jobs")
def jobs(service: Service) -> list[JobDocument]:
    return [JobDocument(**row) for row in service.jobs()]


@router.get("/jobs/{job}", summary="A job")
def job(job: str, service: Service) -> JobDocument:
    return JobDocument(**service.job(job))


@router.post("/jobs/{job}/{action}", status_code=204, summary="Pause, resume or stop a job")
def act(job: str, action: Literal["pause", "resume", "stop"], service: Service) -> None:
    service.set_state(job, {"pause": "paused", "resume": "running", "stop": "stopped"}[action])


@router.get("/jobs/{job}/versions/{version}/file", summary="The weights of a version", response_class=FileResponse)
def weights(job: str, version: int, service: Service) -> FileResponse:
    return FileResponse(service.version_file(job, version)[0], media_type="application/octet-stream")


@router.get("/jobs/{job}/rounds", summary="The rounds of a job")
def rounds(job: str, service: Service) -> list[dict[str, Any]]:
    return service.rounds(job)


@router.get("/jobs/{job}/metrics", summary="Scores of the versions of a job")
def metrics(job: str, service: Service) -> list[dict[str, Any]]:
    return service.metrics(job)


@router.get("/jobs/{job}/events", summary="What happens, as it happens (server-sent events)")
async def events(
    job: str, request: Request, service: Service, after: Annotated[int, Query(ge=0)] = 0
) -> StreamingResponse:
    """Goes on until the client leaves or the job is over. `Last-Event-ID` continues an interrupted stream."""
    start = int(request.headers.get("Last-Event-ID") or after)

    async def stream() -> AsyncIterator[str]:
        last = start
        while not await request.is_disconnected():
            found, over = await run_in_threadpool(service.events, job, last)
            for row in found:
                last = row["id"]
                yield f"id: {last}\nevent: {row['kind']}\ndata: {json.dumps(row)}\n\n"
            if over and not found:
                return
            if not found:
                yield ": still here\n\n"
                await asyncio.sleep(0.5)

    return StreamingResponse(stream(), media_type="text/event-stream")
