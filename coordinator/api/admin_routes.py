"""Routes of the administrator: bundles, jobs, devices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from coordinator.api.auth import Admin, Known, Service
from coordinator.api.documents import DeviceDocument, Invitation, Invited, JobCreated, JobDocument, JobRequest
from coordinator.api.downloads import Download
from coordinator.api.openapi import BINARY_ANSWER, BINARY_FILE, EVENT_STREAM, problems
from coordinator.evaluation import check_data
from federation.errors import InputError
from federation.job import plan_from

router = APIRouter(prefix="/v1", tags=["admin"], dependencies=[Admin])
MOST_FILE = 64 << 30


@router.post("/enrolments", status_code=201, summary="Invite devices")
def invite(request: Invitation, known: Known) -> Invited:
    """Makes an enrolment token. It cannot be shown again; make another."""
    return Invited(token=known.invite(request.uses, request.seconds))


@router.get("/devices", summary="All devices")
def devices(service: Service) -> list[DeviceDocument]:
    return [DeviceDocument(**row) for row in service.devices()]


@router.delete("/devices/{device}", status_code=204, summary="Shut a device out", responses=problems(404))
def revoke(device: str, service: Service) -> None:
    """Its token is worth nothing from now on, and what it was working on is given to others."""
    service.revoke(device)


@router.put(
    "/bundles/{digest}/files/{name:path}",
    status_code=204,
    summary="Send a file of a bundle",
    responses=problems(400, 507),
    openapi_extra=BINARY_FILE,
)
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


@router.post("/bundles/{digest}", status_code=204, summary="Complete a bundle", responses=problems(400))
def complete_bundle(digest: str, service: Service) -> None:
    """Checks every file against the manifest. Harmless if the bundle is complete already."""
    service.complete_bundle(digest)


@router.post("/jobs", status_code=201, summary="Create a job", responses=problems(400))
def create_job(request: JobRequest, service: Service) -> JobCreated:
    """It runs from now on, with the devices that there are."""
    plan = plan_from(request.plan)
    check_data(plan.evaluate.data)
    return JobCreated(id=service.create_job(plan, request.bundle))


@router.get("/jobs", summary="All jobs")
def jobs(service: Service) -> list[JobDocument]:
    return [JobDocument(**row) for row in service.jobs()]


@router.get("/jobs/{job}", summary="A job", responses=problems(404))
def job(job: str, service: Service) -> JobDocument:
    return JobDocument(**service.job(job))


@router.post("/jobs/{job}/pause", status_code=204, summary="Pause a job", responses=problems(404, 409))
def pause(job: str, service: Service) -> None:
    """It hands out no tasks; what is under way still counts."""
    service.set_state(job, "paused")


@router.post("/jobs/{job}/resume", status_code=204, summary="Let a paused job go on", responses=problems(404, 409))
def resume(job: str, service: Service) -> None:
    """Its round is where it was: leases do not run out while a job is paused."""
    service.set_state(job, "running")


@router.post("/jobs/{job}/stop", status_code=204, summary="Stop a job", responses=problems(404, 409))
def stop(job: str, service: Service) -> None:
    """It is over for good; its weights stay."""
    service.set_state(job, "stopped")


@router.get(
    "/jobs/{job}/versions/{version}/file",
    summary="The weights of a version",
    response_class=Download,
    responses={**BINARY_ANSWER, **problems(404)},
)
def weights(job: str, version: int, service: Service) -> Download:
    """A safetensors file. The newest versions are kept; the number of the newest is the job's `version`."""
    return Download(service.version_file(job, version)[0], media_type="application/octet-stream")


@router.get("/jobs/{job}/rounds", summary="The rounds of a job", responses=problems(404))
def rounds(job: str, service: Service) -> list[dict[str, Any]]:
    """From the first on; `summary` is what a committed round came to."""
    return service.rounds(job)


@router.get("/jobs/{job}/metrics", summary="Scores of the versions of a job", responses=problems(404))
def metrics(job: str, service: Service) -> list[dict[str, Any]]:
    """What the evaluation of each version found, if the job has evaluation data."""
    return service.metrics(job)


@router.get(
    "/jobs/{job}/events",
    summary="What happens, as it happens (server-sent events)",
    response_class=StreamingResponse,
    responses={**EVENT_STREAM, **problems(400, 404)},
)
async def events(
    job: str, request: Request, service: Service, after: Annotated[int, Query(ge=0, lt=10**18)] = 0
) -> StreamingResponse:
    """Goes on until the client leaves or the job is over. `Last-Event-ID` continues an interrupted stream."""
    known = request.headers.get("Last-Event-ID", str(after))
    if not known.isdecimal() or len(known) > 18:
        raise InputError(f"Last-Event-ID: expected the number of an event, got {known[:40]!r}")
    start = int(known)
    await run_in_threadpool(service.job, job)  # a job that is not there is a problem, not an empty stream

    async def stream() -> AsyncIterator[str]:
        last = start
        while not service.leaving:
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
