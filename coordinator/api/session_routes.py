"""Routes with which a page signs in and out. Its session is a cookie that scripts cannot read."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from coordinator.api.auth import IDENTITY, Admin, Identity, Known, Service, SigningIn, header, session_cookie
from coordinator.api.documents import SessionDocument
from coordinator.api.openapi import problems
from coordinator.sessions import LIFE
from federation import __version__

router = APIRouter(prefix="/v1/session", tags=["admin"])


@router.post("", status_code=201, summary="Sign a page in", dependencies=[SigningIn], responses=problems(429))
def sign_in(request: Request, response: Response, known: Known) -> SessionDocument:
    """With the administrator's token. The answer sets a cookie (HttpOnly, SameSite=Strict) that lasts twelve hours.

    Requests with the cookie that change something need the header `Embrace-Request`, and the page's own origin.
    """
    opened = known.sessions.open()
    _set_cookie(request, response, opened.token, round(LIFE))
    return SessionDocument(expires_at=opened.expires_at, version=__version__)


@router.get("", summary="Is this page signed in?", dependencies=[Admin])
def session(request: Request, known: Known) -> SessionDocument:
    """`expires_at` is null for a client that has the token itself."""
    sender: Identity = request.scope[IDENTITY]
    return SessionDocument(expires_at=known.sessions.expires_at(sender.session), version=__version__)


@router.delete("", status_code=204, summary="Sign a page out", dependencies=[Admin])
def sign_out(request: Request, response: Response, known: Known, service: Service) -> None:
    """The session is worth nothing from now on, and what it streams ends."""
    sender: Identity = request.scope[IDENTITY]
    if sender.session:
        known.sessions.end(sender.session)
        service.watchers.notify()
    _set_cookie(request, response, "", 0)


def _set_cookie(request: Request, response: Response, value: str, seconds: int) -> None:
    # With a proxy that ends TLS the browser alone knows that the page came over it, and says so in Origin.
    secure = request.url.scheme == "https" or header(request.scope, "origin").startswith("https://")
    name = session_cookie(request.scope)
    response.set_cookie(name, value, seconds, path="/v1", secure=secure, httponly=True, samesite="strict")
