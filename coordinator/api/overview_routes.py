"""Routes for an overview, as the dashboard has it: the fleet, who trained what, versions, what jobs are made of."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from coordinator.api.auth import Admin, Service
from coordinator.api.device_routes import Version
from coordinator.api.documents import Choices, Fleet, JobFile, JobSeats, PlanDocument, VersionDocument
from coordinator.api.openapi import problems
from federation.job import parse_plan, plan_to

router = APIRouter(prefix="/v1", tags=["admin"], dependencies=[Admin])
ZIP = "application/zip"
ZIP_BODY = {200: {"description": "The bundle.", "content": {ZIP: {"schema": {"type": "string", "format": "binary"}}}}}


@router.get("/fleet", summary="The fleet at a glance")
def fleet(service: Service) -> Fleet:
    """Every device with its last update and its failures, those in trouble first."""
    return Fleet(**service.overview.fleet())


@router.get("/jobs/{job}/seats", summary="Who trained what", responses=problems(400, 404))
def seats(
    job: str,
    service: Service,
    rounds: Annotated[int, Query(ge=1, le=500, description="The newest so many.")] = 60,
) -> JobSeats:
    """Every seat of the newest rounds, also of the one that is open."""
    return JobSeats(**service.overview.seats(job, rounds))


@router.get("/jobs/{job}/versions", summary="The versions of a job", responses=problems(404))
def versions(job: str, service: Service) -> list[VersionDocument]:
    """Those whose weights are here: the newest, the one before, the best."""
    return [VersionDocument(**row) for row in service.overview.versions(job)]


@router.get(
    "/jobs/{job}/versions/{version}/bundle.zip",
    summary="The trained model",
    response_class=StreamingResponse,
    responses={**ZIP_BODY, **problems(400, 404)},  # type: ignore[dict-item]
)
def trained_bundle(job: str, version: Version, service: Service) -> StreamingResponse:
    """A zip file of the job's bundle with the weights of a version; `embrace.load` reads the folder that it holds."""
    name, body = service.overview.trained_bundle(job, version)
    headers = {"Content-Disposition": f'attachment; filename="{name}.zip"', "Cache-Control": "no-store"}
    return StreamingResponse(body, media_type=ZIP, headers=headers)


@router.get("/choices", summary="What a job can be made of")
def choices(service: Service) -> Choices:
    """Bundles and evaluation data that are here, and the published algorithms."""
    return Choices(**service.overview.choices())


@router.post("/plans", summary="Check a job file", responses=problems(400))
def check_plan(request: JobFile) -> PlanDocument:
    """Reads TOML; the answer is the plan of `POST /v1/jobs`. An error says on which line."""
    return PlanDocument(plan=plan_to(parse_plan(request.toml)))
