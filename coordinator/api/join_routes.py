"""Routes of a person who joins with a device: see what is trained here, and be forgotten."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request

from coordinator.api.auth import IDENTITY, Device, EnrolmentToken, Identity, Known, Service
from coordinator.api.documents import RunningJob, RunningJobs
from coordinator.api.limits import counting_failures
from coordinator.jobs import OpenJob
from federation.manifest import dumps

router = APIRouter(prefix="/v1", tags=["device"])


@router.get("/jobs/open", summary="What is trained here now")
def open_jobs(request: Request, token: EnrolmentToken, known: Known, service: Service) -> RunningJobs:
    """For those who hold an enrolment token, before they join, and for devices."""
    sender: Identity = request.scope[IDENTITY]
    if not sender.is_known:
        with counting_failures(request):
            known.check_invited(token)
    return RunningJobs(jobs=[_described(job) for job in service.running_jobs()])


@router.delete("/devices/me", status_code=204, summary="Be forgotten")
def forget(device: Device, service: Service) -> None:
    """The device's token is worth nothing from now on; its name, its profile and its benchmarks are removed."""
    service.forget(device)


def _described(job: OpenJob) -> RunningJob:
    plan, manifest = job.engine.plan, job.engine.manifest
    return RunningJob(
        id=job.id,
        name=plan.name or plan.bundle,
        bundle=job.bundle,
        round=job.state.round.number,
        rounds=plan.num_rounds,
        steps=plan.local.steps,
        epochs=plan.local.epochs,
        batch=plan.local.batch,
        manifest=json.loads(dumps(manifest)),
    )
