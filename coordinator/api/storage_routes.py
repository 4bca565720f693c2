"""Routes of a device whose update goes past this process: where to put it, and that it lies there."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from coordinator.api.auth import Device, Service
from coordinator.api.device_routes import Direct, Following, ReportHeader, accepted, read_report
from coordinator.api.documents import Accepted, Completion, Upload, UploadGranted
from coordinator.api.metrics import CountedRoute
from coordinator.api.openapi import problems
from coordinator.arrivals import Uploaded

router = APIRouter(prefix="/v1", tags=["device"], route_class=CountedRoute)
LONGEST_WAIT = 60.0  # seconds for a verdict
FIRST_LOOK, LONGEST_PAUSE = 0.02, 0.5  # seconds until it is looked whether there is one; longer each time


@router.post("/tasks/{task}/upload", summary="Ask where to put an update", responses=problems(400, 404, 409))
def grant_upload(task: str, upload: Upload, device: Device, service: Service) -> UploadGranted:
    """For the holder of a task that came with `storage`. Nothing is recorded: ask again as often as you like.

    404 without object storage that devices reach: send the update to this coordinator.
    """
    name, url = service.upload_url(device, task, upload.bytes)
    return UploadGranted(name=name, url=url)


@router.post(
    "/tasks/{task}/complete",
    status_code=201,
    summary="Say that an update is uploaded",
    response_model=Accepted,
    responses={
        202: {"model": Accepted, "description": "It is recorded, and not checked yet: say so again."},
        **problems(400, 404, 409),
    },
)
async def complete(
    task: str,
    completion: Completion,
    request: Request,
    device: Device,
    service: Service,
    embrace_report: ReportHeader,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds for the verdict.")] = 20.0,
    following: Following = False,
    direct: Direct = False,
) -> Response:
    """The update is recorded before it is looked at; it counts, and the answer is 201, once it is checked.

    Repeat this until then. 400 if the update is unsound: `detail` says why, and the task is no longer the device's.
    409 without object storage that devices reach: send the update to this coordinator.
    """
    service.check_uploads()
    said = Uploaded(device, task, completion.name, completion.sha256, completion.bytes, read_report(embrace_report))
    counts, until, pause = await request.app.state.complete(said), time.monotonic() + wait, FIRST_LOOK
    while not counts and time.monotonic() < until and not service.leaving:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        if not service.is_unchecked(task):
            counts = await request.app.state.complete(said)
    if not counts:
        return JSONResponse({"status": "checking", "sha256": said.sha256}, 202)
    return await accepted(request, service, device, said.sha256, following=following, direct=direct)
