"""Answer every error with a problem document (RFC 9457)."""

from __future__ import annotations

import errno
import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from coordinator.errors import Lost, NotAllowed, Refused, StoreAway
from federation.errors import EmbraceError

log = logging.getLogger("embrace.api")
MEDIA_TYPE = "application/problem+json"
INSUFFICIENT_STORAGE = 507


def problem(status: int, title: str, detail: str = "", **more: object) -> JSONResponse:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status == INSUFFICIENT_STORAGE:
        headers["Retry-After"] = "30"
    return JSONResponse(body, status, headers, MEDIA_TYPE)


def database_problem(error: OperationalError) -> JSONResponse:
    """Describe a database that does not do its work."""
    if "full" in str(error.orig):
        return _disk_full()
    log.error("database: %s", error.orig)
    return problem(503, "Database not available", "try again in a moment")


def _disk_full() -> JSONResponse:
    return problem(INSUFFICIENT_STORAGE, "Disk full", "nothing was lost; try again when there is room")


def _methods(request: Request) -> list[str]:
    """List the methods of a path. The framework names those of the first of several routes only."""
    tried = ("DELETE", "GET", "HEAD", "POST", "PUT")
    routes = request.app.routes
    return [m for m in tried if any(r.matches({**request.scope, "method": m})[0] is Match.FULL for r in routes)]


def install(app: FastAPI) -> None:
    """Let the application answer every error this way."""

    @app.exception_handler(EmbraceError)
    async def ours(_: Request, error: EmbraceError) -> JSONResponse:
        more = {"reason": error.reason} if isinstance(error, Refused) else {}
        title = "Not allowed" if isinstance(error, NotAllowed) else type(error).__name__
        return problem(error.status, title, str(error), **more)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return problem(422, "Invalid request", f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        title = HTTPStatus(error.status_code).phrase
        answer = problem(error.status_code, title, str(error.detail) if error.detail != title else "")
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(_methods(request))
        return answer

    @app.exception_handler(ClientDisconnect)
    async def cut_off(_: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(
            400, "Cut off", "the body did not arrive whole; send it again"
        )  # the client has gone, but it is logged

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        return problem(500, "Internal error", "this is a defect; the log has more under this request's number")

    @app.exception_handler(OSError)
    async def disk(_: Request, error: OSError) -> JSONResponse:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _disk_full()
        if isinstance(error, StoreAway):
            log.error("%s", error)
            return problem(503, "Object storage not available", "try again in a moment")
        if isinstance(error, Lost):
            log.error("%s", error)
            return problem(500, "Lost in the object storage", "it has not got what was written; see the log")
        raise error

    @app.exception_handler(OperationalError)
    async def database(_: Request, error: OperationalError) -> JSONResponse:
        return database_problem(error)

    @app.exception_handler(DataError)
    async def unfit_value(_: Request, error: DataError) -> JSONResponse:
        log.warning("database: %s", error.orig)
        return problem(400, "Invalid request", "expected values that the database can hold: no NUL, no huge numbers")
