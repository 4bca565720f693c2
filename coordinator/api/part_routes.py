"""What devices need of some algorithms beside the weights: a part of a vector, another device's local model, and
whether what they keep is of use."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from coordinator.api.auth import Device, Service
from coordinator.api.device_routes import Version
from coordinator.api.documents import JobState
from coordinator.api.downloads import Download
from coordinator.api.limits import LARGEST
from coordinator.api.openapi import BINARY_ANSWER, problems
from federation.wire import encode

router = APIRouter(prefix="/v1", tags=["device"])


@router.get(
    "/jobs/{job}/versions/{version}/parts/{name}",
    summary="A part of the weights, or of the server's state",
    response_class=StreamingResponse,
    responses={**BINARY_ANSWER, **problems(400, 404)},
)
def get_part(
    job: str,
    version: Version,
    name: str,
    device: Device,
    service: Service,
    boundary: Annotated[str, Query(max_length=200, description="What the device trains, as in its task.")],
    unit: Annotated[int | None, Query(ge=0, le=LARGEST, description="One unit of the job's synchronisation.")] = None,
) -> StreamingResponse:
    """As safetensors: everything that the training graph of a boundary takes, or of what it trains one unit.

    `control` (SCAFFOLD) and `momentum` (FedAvgLM) exist where the job's algorithm has them.
    """
    region, vector = service.part(job, version, name, boundary, unit)
    body = (bytes(piece) for piece in encode({name: (region, vector)}))
    return StreamingResponse(body, media_type="application/octet-stream")


@router.get("/jobs/{job}/state", summary="How a job stands", responses=problems(404))
def get_state(job: str, device: Device, service: Service) -> JobState:
    """Devices remove what they kept of a job that is over."""
    return JobState(state=service.job_state(job))


@router.get(
    "/tasks/{task}/inherited",
    summary="The local model to go on with",
    response_class=Download,
    responses={**BINARY_ANSWER, **problems(404, 409)},
)
def get_inherited(task: str, device: Device, service: Service) -> Download:
    """The update of the device that had this place before (partial averaging). For the holder of the task."""
    return Download(service.inherited(device, task), media_type="application/octet-stream")
