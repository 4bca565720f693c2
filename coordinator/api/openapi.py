"""What /docs says beyond the routes themselves: the whole in a few sentences, and which problems every route has."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from coordinator.api.documents import Problem
from coordinator.api.problems import MEDIA_TYPE

DESCRIPTION = """\
Runs training jobs on unequal devices.

A **device** enrols once with an enrolment token and gets a token of its own. Then it repeats: wait for a task, fetch
the weights of the task's version, train, send the update before the lease ends. The **administrator** sends bundles,
creates jobs and watches them.

Every request but those under *operations* has `Authorization: Bearer TOKEN`. Errors are problem documents (RFC 9457,
`application/problem+json`); `detail` says what was found and what was expected. Every answer has an `X-Request-Id`,
which the log has too. `docs/reference/rest.md` is a walk through all of it with curl.
"""

TAGS = [
    {"name": "device", "description": "What a device does, with its own token (to enrol: with an enrolment token)."},
    {"name": "admin", "description": "Bundles, jobs, devices and results, with the administrator's token."},
    {"name": "operations", "description": "Health and metrics, without a token."},
]

# status -> title, detail, what it means
_PROBLEMS: dict[int, tuple[str, str, str]] = {
    400: ("InputError", "report.samples: expected a number from 1 to 1048576, got 0", "The request cannot be right."),
    401: ("Not allowed", "this needs a device's token; enrol first", "No token, or not the right one."),
    404: ("NotFound", "there is no job '1f2e3d4c5b6a7988'", "There is none, or it is not the caller's to see."),
    408: ("Too slow", "expected 1024 bytes in 15 seconds", "The body came too slowly."),
    409: ("Refused", "round 3 is over; the job is in round 4", "Too late, or done already; `reason` says which."),
    413: ("Content Too Large", "9000000 bytes are announced; expected at most 1048576", "The body is too long."),
    422: ("Invalid request", "body.name: Field required", "The request does not have the form that is shown here."),
    429: ("Too Many Requests", "this device asks too often; slow down", "Wait for `Retry-After` seconds."),
    503: ("Too many requests at once", "try again in a moment", "Wait for `Retry-After` seconds."),
    507: ("Disk full", "nothing was lost; try again when there is room", "Wait for `Retry-After` seconds."),
}

_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BINARY_BODY = {"requestBody": {"required": True, "content": _BINARY}}  # for `openapi_extra=`
BINARY_FILE = {"requestBody": {"content": _BINARY, "description": "The file; no body is an empty one."}}
BINARY_ANSWER: dict[int | str, dict[str, Any]] = {200: {"description": "The bytes.", "content": _BINARY}}
_UNFIT = {"description": "Why no job can use the device, percent-encoded.", "schema": {"type": "string"}}
_WAITING = {"description": "What the jobs wait for, percent-encoded.", "schema": {"type": "string"}}
_COME_BACK = {"description": "Seconds after which to ask, if not at once.", "schema": {"type": "integer"}}
NOTHING_TO_DO = {
    "description": "Nothing to do; ask again.",
    "headers": {"Embrace-Unfit": _UNFIT, "Embrace-Waiting": _WAITING, "Retry-After": _COME_BACK},
}

# What the schema describes is each event of the stream (OpenAPI 3.1 has no word for a stream).
_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "For Last-Event-ID."},
        "event": {"type": "string", "description": "What happened.", "examples": ["RoundCommitted"]},
        "data": {"type": "string", "description": "JSON: id, job, at (seconds since 1970), kind, body."},
    },
}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events, one after the other.", "content": {"text/event-stream": {"schema": _EVENT}}}
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For `responses=` of a route: the problems that are its own."""
    return {status: _response(status) for status in statuses}


def install(app: FastAPI) -> None:
    """Let the application describe itself with the problems that all routes share."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(
                get_openapi(
                    title=app.title,
                    version=app.version,
                    description=app.description,
                    routes=app.routes,
                    tags=app.openapi_tags,
                )
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    for operations in document["paths"].values():
        for operation in operations.values():
            found = operation["responses"]
            shared = [503]
            shared += [401] if "security" in operation else []
            shared += [408, 413] if "requestBody" in operation else []
            shared += [400] if "application/json" in operation.get("requestBody", {}).get("content", {}) else []
            shared += [422] if found.pop("422", None) else []
            shared += [429] if "device" in operation["tags"] else []
            for status in shared:
                found.setdefault(str(status), _response(status))
            operation["responses"] = dict(sorted(found.items()))
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = Problem.model_json_schema()
    return document


def _response(status: int) -> dict[str, Any]:
    title, detail, meaning = _PROBLEMS[status]
    example: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if status == 409:
        example["reason"] = "round_closed"
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": meaning, "content": {MEDIA_TYPE: {"schema": schema, "example": example}}}
