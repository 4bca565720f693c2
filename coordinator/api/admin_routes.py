"""Routes of the administrator: bundles, jobs, devices."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from coordinator.api.auth import Admin, Known, Service
from coordinator.api.device_routes import Version
from coordinator.api.documents import (
    DataDocument,
    DeviceDocument,
    DeviceReport,
    Invitation,
    Invited,
    JobChange,
    JobCreated,
    JobDeleted,
    JobDocument,
    JobRequest,
    Revoked,
)
from coordinator.api.downloads import Download
from coordinator.api.limits import LARGEST, check_length
from coordinator.api.openapi import BINARY_ANSWER, BINARY_BODY, BINARY_FILE, EVENT_STREAM, problems
from federation.errors import InputError
from federation.job import plan_from

router = APIRouter(prefix="/v1", tags=["admin"], dependencies=[Admin])
Match = Annotated[
    str | None,
    Query(min_length=1, max_length=200, description="Only those with this name or id, or this beginning of an id."),
]

First = Annotated[int, Query(ge=0, le=LARGEST, description="Leave out what is before it.")]


@router.post("/enrolments", status_code=201, summary="Invite devices")
def invite(request: Invitation, known: Known) -> Invited:
    """Makes an enrolment token. It cannot be shown again; make another."""
    return Invited(token=known.invite(request.uses, request.seconds))


@router.get("/devices", summary="All devices")
def devices(service: Service, match: Match = None) -> list[DeviceDocument]:
    return [DeviceDocument(**row) for row in service.devices(match)]


@router.get("/devices/{device}", summary="A device, and what it did", responses=problems(404))
def device(device: str, service: Service) -> DeviceReport:
    """Its state, tasks, failures, the last error, where its time goes, and how it stands in each job."""
    return DeviceReport(**service.device(device))


@router.delete("/devices/{device}", summary="Shut a device out", responses=problems(404))
def revoke(device: str, service: Service) -> Revoked:
    """Its token is worth nothing from now on, and what it was working on is given to others."""
    return Revoked(**service.revoke(device))


@router.put(
    "/bundles/{digest}/files/{name:path}",
    status_code=204,
    summary="Send a file of a bundle",
    responses=problems(400, 507),
    openapi_extra=BINARY_FILE,
)
async def put_file(digest: str, name: str, request: Request, service: Service) -> None:
    """The manifest first; then the files that it names, in any order. No other file is taken."""
    path, most = await run_in_threadpool(service.draft_file, digest, name)
    check_length(request, most)
    await _receive(request, path, most)
    await run_in_threadpool(service.file_arrived, digest, name)


async def _receive(request: Request, path: Path, most: int) -> str:
    """Write a body to a file as it comes; return its sha256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise InputError(f"the body goes on after {most} bytes, the most that it can have")
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


@router.post("/bundles/{digest}", status_code=204, summary="Complete a bundle", responses=problems(400))
def complete_bundle(digest: str, service: Service) -> None:
    """Checks every file against the manifest. Harmless if the bundle is complete already."""
    service.complete_bundle(digest)


@router.get("/evaluation-data", summary="Uploaded evaluation data")
def evaluation_data(service: Service) -> list[DataDocument]:
    """What is here already need not be sent again."""
    return [DataDocument(**row) for row in service.evaluation_data()]


@router.put(
    "/evaluation-data/{sha256}",
    status_code=201,
    summary="Send evaluation data",
    responses=problems(400, 413, 507),
    openapi_extra=BINARY_BODY,
)
async def put_evaluation_data(sha256: str, request: Request, service: Service) -> DataDocument:
    """A safetensors file with the tensors `x` and `y`, samples along the first axis, finite numbers only.

    A job names it as `evaluate.data = "sha256:..."`. It is kept until no job uses it and a job that did is deleted.
    """
    check_length(request, service.most_evaluation_data)
    path = await run_in_threadpool(service.arriving_data, sha256)
    try:
        found = await _receive(request, path, service.most_evaluation_data)
        return DataDocument(**await run_in_threadpool(service.keep_data, path, sha256, found))
    finally:
        path.unlink(missing_ok=True)


@router.post("/jobs", status_code=201, summary="Create a job", responses=problems(400))
def create_job(request: JobRequest, service: Service) -> JobCreated:
    """It runs from now on, with the devices that there are."""
    return JobCreated(id=service.create_job(plan_from(request.plan), request.bundle))


@router.get("/jobs", summary="All jobs")
def jobs(service: Service, match: Match = None) -> list[JobDocument]:
    return [JobDocument(**row) for row in service.jobs(match)]


@router.get("/jobs/{job}", summary="A job", responses=problems(404))
def job(job: str, service: Service) -> JobDocument:
    return JobDocument(**service.job(job))


@router.post("/jobs/{job}/pause", summary="Pause a job", responses=problems(404, 409))
def pause(job: str, service: Service) -> JobChange:
    """It hands out no tasks; what is under way still counts."""
    return JobChange(**service.set_state(job, "paused"))


@router.post("/jobs/{job}/resume", summary="Let a paused job go on", responses=problems(404, 409))
def resume(job: str, service: Service) -> JobChange:
    """Its round is where it was: leases do not run out while a job is paused."""
    return JobChange(**service.set_state(job, "running"))


@router.post("/jobs/{job}/stop", summary="Stop a job", responses=problems(404, 409))
def stop(job: str, service: Service) -> JobChange:
    """It is over for good; its weights stay."""
    return JobChange(**service.set_state(job, "stopped"))


@router.delete("/jobs/{job}", summary="Delete a job", responses=problems(404, 409))
def delete_job(job: str, service: Service, force: bool = False) -> JobDeleted:
    """Removes a job that is over with its versions and results, and the bundle and the data that no other job uses.

    One that runs is refused, unless `force` stops it first.
    """
    return JobDeleted(**service.delete_job(job, force=force))


@router.get(
    "/jobs/{job}/versions/{version}/file",
    summary="The weights of a version",
    response_class=Download,
    responses={**BINARY_ANSWER, **problems(404)},
)
def weights(job: str, version: Version, service: Service) -> Download:
    """A safetensors file. The newest versions are kept; the number of the newest is the job's `version`."""
    return Download(service.version_file(job, version)[0], media_type="application/octet-stream")


@router.get("/jobs/{job}/rounds", summary="The rounds of a job", responses=problems(404))
def rounds(job: str, service: Service, first_round: First = 0) -> list[dict[str, Any]]:
    """From the first on, or from `first_round` on; `summary` is what a committed round came to."""
    return service.rounds(job, first_round)


@router.get("/jobs/{job}/metrics", summary="Scores of the versions of a job", responses=problems(404))
def metrics(job: str, service: Service, first_version: First = 0) -> list[dict[str, Any]]:
    """What the evaluation of each version found, if the job has evaluation data."""
    return service.metrics(job, first_version)


@router.get(
    "/jobs/{job}/events",
    summary="What happens, as it happens (server-sent events)",
    response_class=StreamingResponse,
    responses={**EVENT_STREAM, **problems(400, 404)},
)
async def events(
    job: str, request: Request, service: Service, after: Annotated[int, Query(ge=0, le=LARGEST)] = 0
) -> StreamingResponse:
    """Goes on until the client leaves or the job is over. `Last-Event-ID` continues an interrupted stream."""
    known = request.headers.get("Last-Event-ID", str(after))
    if not known.isdecimal() or len(known) > 18 or int(known) > LARGEST:
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
