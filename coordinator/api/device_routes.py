"""Routes of a device: enrol, describe itself, fetch a task, its graphs and weights, answer."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import time
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from coordinator.api.admission import give_way
from coordinator.api.auth import Device, EnrolmentToken, Known, Service
from coordinator.api.documents import Accepted, Enrolled, Enrolment, Failure
from coordinator.api.downloads import Download
from coordinator.api.limits import check_length
from coordinator.api.metrics import CountedRoute
from coordinator.api.openapi import BINARY_ANSWER, BINARY_BODY, NOTHING_TO_DO, problems
from coordinator.body_check import check_body
from coordinator.coordinator import PRESENCE, Arrival, Receiving
from coordinator.errors import NotFound
from edge_runtime.bundle_files import map_weights
from federation.axes.cover import DeviceProfile
from federation.errors import EmbraceError, InputError
from federation.messages import TaskOffer
from federation.wire import WireError, encode_layers

router = APIRouter(prefix="/v1", tags=["device"], route_class=CountedRoute)
LONGEST_WAIT = 60.0  # seconds for a task
MOST_REPORT = 16_384  # characters
MOST_WORDS = 1000


@router.post("/devices", status_code=201, summary="Enrol a device")
def enrol(request: Enrolment, token: EnrolmentToken, known: Known) -> Enrolled:
    """With an enrolment token. The answer has the device's own token, which is not shown again."""
    device, own = known.enrol(token, request.name, request.profile)
    return Enrolled(device=device, token=own)


@router.put("/devices/me/profile", status_code=204, summary="Say what this device can do")
def set_profile(profile: DeviceProfile, device: Device, known: Known) -> None:
    known.set_profile(device, profile)


@router.post(
    "/tasks/next",
    summary="Wait for a task",
    responses={200: {"model": TaskOffer}, 204: NOTHING_TO_DO},
)
async def next_task(
    request: Request, device: Device, service: Service, wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT)] = 30.0
) -> Response:
    """Answers as soon as there is something to do. The task is the device's until its lease ends.

    If none of the jobs that run can use the device, `Embrace-Unfit` says why, percent-encoded; a later one may.
    """
    offer, until = None, time.monotonic() + wait
    while True:
        count = service.notifier.count
        offer = await request.app.state.next_task(device)
        rest = until - time.monotonic()
        if offer is not None or rest <= 0 or service.leaving:
            break
        await service.notifier.wait(count, min(rest, PRESENCE / 4))  # now and then it is seen to be there still
        if await request.is_disconnected():
            break
    if offer is None:
        why = service.unfit(device)
        return Response(status_code=204, headers={"Embrace-Unfit": quote(why[:MOST_WORDS], " ")} if why else None)
    return JSONResponse(vars(offer))


@router.put(
    "/tasks/{task}/update",
    status_code=201,
    summary="Send an update",
    response_model=Accepted,
    responses=problems(400, 404, 409, 507),
    openapi_extra=BINARY_BODY,
)
async def send_update(
    task: str,
    request: Request,
    device: Device,
    service: Service,
    embrace_report: Annotated[str, Header(max_length=MOST_REPORT, description='JSON, at least {"samples": N}')],
    content_digest: Annotated[str | None, Header(description="sha-256=:BASE64: (RFC 9530)")] = None,
    following: Annotated[bool, Query(alias="next", description="Answer with the next task, if there is one.")] = False,
) -> Response:
    """The body is a safetensors file (docs/reference/wire.md): the *change* of every parameter of the trained layers.

    Answered only when the update is recorded. Sending the same again is harmless: 409 with reason `duplicate`.
    """
    report = _report(embrace_report)
    receiving = service.receive_at_once(device, task)
    if receiving is None:
        receiving = await run_in_threadpool(service.receive, device, task)
    check_length(request, receiving.most)
    try:
        await _spool(request, receiving)
        give_way(request)  # the more wait for the disk together, the less each of them costs
        checked, sha256 = await check_body(receiving.path, receiving.decoder, request.app.state.body_checks)
        _check_digest(content_digest, sha256)
    except BaseException:
        receiving.path.unlink(missing_ok=True)
        raise
    await request.app.state.accept(Arrival(device, receiving, checked, sha256.hex(), report))
    answer: dict[str, Any] = {"status": "accepted", "sha256": sha256.hex()}
    if following:
        answer["next"] = await _next_at_once(request, device)
    return JSONResponse(answer, 201)


@router.post("/tasks/{task}/failure", status_code=204, summary="Give a task up", responses=problems(404, 409))
def fail_task(task: str, failure: Failure, device: Device, service: Service) -> None:
    service.fail_task(device, task, failure.reason, failure.message)


@router.get(
    "/bundles/{digest}/manifest",
    summary="The manifest of a bundle",
    response_class=Download,
    responses={200: {"content": {"application/json": {}}}, **problems(400, 404)},
)
def get_manifest(digest: str, device: Device, service: Service) -> Download:
    """Layers, boundaries, parameters with their shapes, graphs with their hashes: docs/reference/bundle.md."""
    return _immutable(service.bundle_file(digest, "manifest.json"), digest, "application/json")


@router.get(
    "/graphs/{sha256}",
    summary="A graph, by its hash",
    response_class=Download,
    responses={**BINARY_ANSWER, **problems(404)},
)
def get_graph(sha256: str, device: Device, service: Service) -> Download:
    """Graphs never change: keep them."""
    return _immutable(service.graph(sha256), sha256)


@router.get(
    "/jobs/{job}/versions/{version}/weights",
    summary="Weights of a version",
    response_class=Download,
    responses={**BINARY_ANSWER, **problems(400, 404)},
)
async def get_weights(
    job: str,
    version: int,
    device: Device,
    service: Service,
    from_layer: Annotated[int | None, Query(ge=0)] = None,
    to_layer: Annotated[int | None, Query(ge=1)] = None,
) -> Response:
    """The whole file, any byte range of it (Range), or the layers [from_layer, to_layer) as safetensors."""
    found = service.known_version(job, version)
    if found is None:
        found = await run_in_threadpool(service.version_file, job, version)
    path, manifest = found
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        raise NotFound(f"there is no version {version} of job {job!r} any more") from None
    if from_layer is None and to_layer is None:
        etag = {"ETag": f'"{job}-{version}"'}
        return Download(path, media_type="application/octet-stream", headers=etag, stat_result=facts)
    space = manifest.space
    first, end = from_layer or 0, to_layer or len(space.layers)
    if not 0 <= first < end <= len(space.layers):
        raise InputError(f"there are no layers [{first}, {end}); the model has {len(space.layers)}")
    vector = map_weights(path, space)[space.layer(first).start : space.layer(end - 1).stop]
    body = (bytes(part) for part in encode_layers(space, first, vector, end=end))
    return StreamingResponse(body, media_type="application/octet-stream")


async def _next_at_once(request: Request, device: str) -> dict[str, Any] | None:
    """Take the next task; a device that gets none asks for it, and hears then why."""
    try:
        offer = await request.app.state.next_task(device)
    except EmbraceError:
        return None
    return None if offer is None else vars(offer)


async def _spool(request: Request, receiving: Receiving) -> None:
    """Write the body to its file as it comes."""
    left = receiving.most
    with receiving.path.open("wb", buffering=0) as file:
        async for chunk in request.stream():
            left -= len(chunk)
            if left < 0:
                raise WireError(f"the body goes on after {receiving.most} bytes, the most that it can have")
            if file.write(chunk) != len(chunk):
                raise OSError(errno.ENOSPC, "the disk took a part only")


def _immutable(path: Any, digest: str, media_type: str = "application/octet-stream") -> Download:
    if not path.is_file():
        raise NotFound(f"there is no file {digest!r}")
    headers = {"ETag": f'"{digest}"', "Cache-Control": "private, max-age=31536000, immutable"}
    return Download(path, media_type=media_type, headers=headers)


def _report(text: str) -> dict[str, Any]:
    try:
        report = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict):
        raise InputError("Embrace-Report: expected a JSON object")
    return report


def _finite(text: str) -> float:
    """JSON has no other numbers, although Python reads and writes them."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _check_digest(given: str | None, found: bytes) -> None:
    if given is not None and given != f"sha-256=:{base64.b64encode(found).decode()}:":
        raise WireError("the body is not the one that Content-Digest describes; send it again")
