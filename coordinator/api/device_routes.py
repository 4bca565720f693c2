"""Routes of a device: enrol, describe itself, fetch a task, its graphs and weights, answer."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import time
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from coordinator.api.admission import give_way
from coordinator.api.auth import Device, EnrolmentToken, Known, Service
from coordinator.api.documents import Accepted, Enrolled, Enrolment, Failure, OwnName, Renewed
from coordinator.api.downloads import Download
from coordinator.api.hang_up import HangUp
from coordinator.api.limits import LARGEST, check_length, counting_failures
from coordinator.api.metrics import CountedRoute
from coordinator.api.openapi import BINARY_ANSWER, BINARY_BODY, NOTHING_TO_DO, problems
from coordinator.arrivals import Arrival, Receiving
from coordinator.body_check import check_body
from coordinator.coordinator import Coordinator
from coordinator.errors import NotFound
from coordinator.pacing import ComeBack
from coordinator.presence import PRESENCE
from edge_runtime.bundle_files import map_weights
from federation.axes.cover import DeviceProfile
from federation.errors import EmbraceError, InputError
from federation.messages import TaskOffer
from federation.signature import SIGNATURE_NAME
from federation.wire import WireError, encode_layers

router = APIRouter(prefix="/v1", tags=["device"], route_class=CountedRoute)
LONGEST_WAIT = 60.0  # seconds for a task
MOST_REPORT = 16_384  # characters
MOST_WORDS = 1000
ENOUGH = "; enough devices wait for the next round"
Version = Annotated[int, Path(ge=0, le=LARGEST)]
Direct = Annotated[bool, Query(alias="storage", description="The device can read and write object storage itself.")]
Following = Annotated[bool, Query(alias="next", description="Answer with the next task, if there is one.")]
ReportHeader = Annotated[str, Header(max_length=MOST_REPORT, description='JSON, at least {"samples": N}')]


@router.post("/devices", status_code=201, summary="Enrol a device")
def enrol(request: Enrolment, token: EnrolmentToken, known: Known, connection: Request) -> Enrolled:
    """With an enrolment token. The answer has the device's own token, which is not shown again.

    If another device has the name, this one gets a number behind it: `kitchen-2`.
    """
    with counting_failures(connection):
        device, own = known.enrol(token, request.name, request.profile)
    return Enrolled(device=device, token=own, name=known.name_of(device))


@router.put("/devices/me/profile", summary="Say what this device can do")
def set_profile(profile: DeviceProfile, device: Device, known: Known) -> OwnName:
    """Answers who the device is here."""
    known.set_profile(device, profile)
    return OwnName(device=device, name=known.name_of(device))


@router.post(
    "/tasks/next",
    summary="Wait for a task",
    responses={200: {"model": TaskOffer}, 204: NOTHING_TO_DO},
)
async def next_task(
    request: Request,
    device: Device,
    service: Service,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT)] = 30.0,
    direct: Direct = False,
) -> Response:
    """Answers as soon as there is something to do. The task is the device's until its lease ends.

    If none of the jobs that run can use the device, `Embrace-Unfit` says why, percent-encoded; a later one may.
    `Embrace-Waiting` says what the jobs that could use it wait for.

    A device of a large fleet that is not needed is answered at once, and told by `Retry-After` in how many seconds to
    come back; one that comes earlier waits.
    """
    offer, until, hang_up = None, time.monotonic() + wait, HangUp(request)
    with service.presence.waiting(device):
        while True:
            count = service.notifier.count
            offer = await request.app.state.next_task(device)
            rest = until - time.monotonic()
            if offer is not None or rest <= 0 or service.leaving:
                break
            rest = min(rest, PRESENCE / 4)  # then it is seen to be there still
            if await hang_up.wait(service.notifier, count, rest):
                break
    if await hang_up.close():
        await run_in_threadpool(service.presence.left, device)
    if not isinstance(offer, TaskOffer):
        told = {"Embrace-Unfit": service.unfit(device), "Embrace-Waiting": service.waiting(device)}
        if isinstance(offer, ComeBack):
            told["Embrace-Waiting"] += ENOUGH
        headers = {name: quote(words[:MOST_WORDS], " ") for name, words in told.items() if words}
        return Response(status_code=204, headers={**headers, **_come_back(offer)})
    return JSONResponse(await _describe(service, offer, direct=direct), headers=_lease(service, offer))


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
    embrace_report: ReportHeader,
    content_digest: Annotated[str | None, Header(description="sha-256=:BASE64: (RFC 9530)")] = None,
    following: Following = False,
    direct: Direct = False,
) -> Response:
    """The body is a safetensors file (docs/reference/wire.md): the *change* of every parameter of the trained layers.

    Answered only when the update is recorded. Sending the same again is harmless: 409 with reason `duplicate`.
    503 if it lies in object storage and is not checked yet: ask again.
    """
    report = read_report(embrace_report)
    receiving = service.receive_at_once(device, task)
    if receiving is None:
        receiving = await run_in_threadpool(service.receive, device, task)
    check_length(request, receiving.most)
    try:
        with request.app.state.accept.expecting():  # the more are recorded together, the less each of them costs
            await _spool(request, receiving)
            give_way(request)
            checked, sha256 = await check_body(receiving.path, receiving.decoder, request.app.state.body_checks)
        _check_digest(content_digest, sha256)
    except BaseException as error:
        receiving.path.unlink(missing_ok=True)
        if isinstance(error, InputError):  # it is whole, and unsound
            await run_in_threadpool(service.refuse_update, device, task, str(error))
        raise
    await request.app.state.accept(Arrival(device, receiving, checked, sha256.hex(), report))
    return await accepted(request, service, device, sha256.hex(), following=following, direct=direct)


@router.post("/tasks/{task}/heartbeat", summary="Keep a task", response_model=Renewed, responses=problems(404, 409))
async def keep_task(task: str, request: Request, device: Device) -> Renewed:
    """A device at work says so before its lease runs out, every third of it. Nothing is written.

    404 or 409: the task is no longer this device's, and the work on it can end.
    """
    return Renewed(seconds=await request.app.state.heartbeat((device, task)))


@router.post("/tasks/{task}/failure", status_code=204, summary="Give a task up", responses=problems(404, 409))
def fail_task(task: str, failure: Failure, device: Device, service: Service, request: Request) -> None:
    service.fail_task(device, task, failure.reason, failure.message)
    request.app.state.metrics.given_up(failure.reason)


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
    "/bundles/{digest}/signature",
    summary="The signature of a bundle",
    response_class=Download,
    responses={200: {"content": {"application/json": {}}}, **problems(400, 404)},
)
def get_signature(digest: str, device: Device, service: Service) -> Download:
    """Who made it: docs/guides/signing.md. 404 if it has none. It may change, the bundle does not."""
    path = service.bundle_file(digest, SIGNATURE_NAME)
    if not path.is_file():
        raise NotFound(f"bundle {digest!r} is not signed")
    return Download(path, media_type="application/json")


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
    version: Version,
    device: Device,
    service: Service,
    from_layer: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
    to_layer: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
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


async def accepted(
    request: Request, service: Coordinator, device: str, sha256: str, *, following: bool, direct: bool
) -> JSONResponse:
    """Answer that an update counts; `following`: with the next task."""
    answer: dict[str, Any] = {"status": "accepted", "sha256": sha256}
    if not following:
        return JSONResponse(answer, 201)
    offer = await _next_at_once(request, device)
    if isinstance(offer, TaskOffer):
        told = await _describe(service, offer, direct=direct)
        return JSONResponse({**answer, "next": told}, 201, headers=_lease(service, offer))
    return JSONResponse({**answer, "next": None}, 201, headers=_come_back(offer))


async def _describe(service: Coordinator, offer: TaskOffer, *, direct: bool) -> dict[str, Any]:
    """Turn an offer into JSON; `direct`: with a URL of the weights, if there is one.

    An earlier agent takes no further field of an offer: only those that ask for it get it.
    """
    url = await run_in_threadpool(service.weights_url, offer.job, offer.version) if direct else None
    return {name: value for name, value in vars(replace(offer, storage=url)).items() if value is not None}


async def _next_at_once(request: Request, device: str) -> TaskOffer | ComeBack | None:
    """Take the next task; a device that gets none asks for it, and hears then why."""
    try:
        offer: TaskOffer | ComeBack | None = await request.app.state.next_task(device)
    except EmbraceError:
        return None
    return offer


def _come_back(offer: ComeBack | None) -> dict[str, str]:
    """Say when to come back; until then the connection is of no use."""
    return {} if offer is None else {"Retry-After": str(math.ceil(offer.seconds)), "Connection": "close"}


def _lease(service: Coordinator, offer: TaskOffer) -> dict[str, str]:
    """Say in a header for how long a device may be silent: an earlier agent takes no further field of an offer."""
    seconds = service.lease_of(offer.job)
    return {} if seconds is None else {"Embrace-Lease": f"{seconds:g}"}


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


def read_report(text: str) -> dict[str, Any]:
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
