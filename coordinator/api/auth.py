"""Find out who sends a request. Administrator and device credentials never stand in for one another.

The admission (admission.py) identifies the sender before anything of the body is read; the routes say whom they serve.

A program has a token, in `Authorization`. A page has a session, in a cookie (session_routes.py), and its request counts
only if the browser says that the coordinator's own page makes it: a browser adds a cookie to the requests of any page
of this host, whatever its port. What changes something also needs a header that no other page may send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from starlette.types import Scope

from coordinator.api.limits import check_enrolments, check_pace, check_tries
from coordinator.coordinator import Coordinator
from coordinator.credentials import token_hash
from coordinator.errors import NotAllowed
from coordinator.registry import Registry

IDENTITY = "embrace.identity"  # the key of the scope
OWN_PAGE: Final = "embrace-request"  # a header of what the coordinator's own pages ask for
_READING: Final = ("GET", "HEAD")


@dataclass(frozen=True)
class Unknown:
    """A credential that the database has to be asked about."""

    token: str
    is_session: bool = False


@dataclass(frozen=True)
class Identity:
    """What the token of a request proves."""

    token: str | None = None
    hashed: str = ""
    device: str | None = None
    admin: bool = False
    session: str = ""  # hash of the session's token, if it is a page

    @property
    def is_known(self) -> bool:
        return self.admin or self.device is not None


def recognise(scope: Scope, registry: Registry, coordinator: Coordinator) -> Identity | Unknown:
    """Identify the sender without the database; return the credential of one that has to be looked up."""
    given = header(scope, "authorization")
    if not given:
        return _recognise_page(scope, registry)
    scheme, _, token = given.partition(" ")
    if scheme.lower() != "bearer" or not token:
        return Identity()
    hashed = token_hash(token := token.strip())
    if registry.is_known_admin(token):
        return Identity(token, hashed, admin=True)
    device = registry.known_device(hashed)
    if device is None or device in coordinator.shut_out:
        return Unknown(token)
    return Identity(token, hashed, device)


def _recognise_page(scope: Scope, registry: Registry) -> Identity | Unknown:
    token = session_token(scope)
    if not token or not _is_own_page(scope):
        return Identity()
    hashed = token_hash(token)
    if registry.sessions.expires_at(hashed) is None:
        return Unknown(token, is_session=True)
    return Identity(token, hashed, admin=True, session=hashed)


def _is_own_page(scope: Scope) -> bool:
    """Whether a page of this coordinator makes a request, by what the browser says and no page can change."""
    site, origin = header(scope, "sec-fetch-site"), header(scope, "origin")
    if scope["method"] in _READING:
        return site in ("", "same-origin", "none")  # none: a person typed the address
    host = header(scope, "host")
    same = site == "same-origin" or (not site and origin in (f"http://{host}", f"https://{host}"))
    return same and header(scope, OWN_PAGE) != ""


def header(scope: Scope, name: str) -> str:
    """Return a header of a request; empty if it has none."""
    wanted = name.encode()
    return next((value for known, value in scope["headers"] if known == wanted), b"").decode("latin-1")


def session_cookie(scope: Scope) -> str:
    """Name the cookie of a session: browsers do not tell the ports of a host apart, and each may have a coordinator."""
    port = header(scope, "host").rpartition(":")[2]
    return f"embrace_session_{port}" if port.isdecimal() else "embrace_session"


def session_token(scope: Scope) -> str:
    """Return the token in the cookie of a request; empty if it has none."""
    wanted = session_cookie(scope)
    given = (part.strip().partition("=") for part in header(scope, "cookie").split(";"))
    return next((value for name, _, value in given if name == wanted), "")


def look_up(given: Unknown, registry: Registry) -> Identity:
    """Ask the database whose credential this is."""
    token = given.token
    hashed = token_hash(token)
    if given.is_session:
        try:
            return Identity(token, hashed, admin=True, session=registry.sessions.find(token))
        except NotAllowed:
            return Identity(token, hashed)
    try:
        return Identity(token, hashed, registry.device_of(token))
    except NotAllowed:
        pass
    try:
        registry.check_admin(token)
    except NotAllowed:
        return Identity(token, hashed)
    return Identity(token, hashed, admin=True)


class _Bearer(HTTPBearer):
    """A dependency that says whom a route serves, and describes the header in the OpenAPI document.

    These are few and flat: FastAPI takes longer to find the way through dependencies of dependencies than they take.
    """

    def __init__(self) -> None:
        super().__init__(scheme_name="HTTPBearer", description="A token made by 'embrace serve' or by enrolment")

    def sender(self, request: HTTPConnection) -> Identity:
        found: Identity = request.scope[IDENTITY]
        if found.token is None:
            raise NotAllowed("this needs a token: Authorization: Bearer TOKEN")
        return found


class _Enrolling(_Bearer):
    async def __call__(self, request: HTTPConnection) -> str:  # type: ignore[override]
        if not request.scope[IDENTITY].is_known:
            check_enrolments(request)
        check_pace(request, request.scope[IDENTITY].hashed)
        return self.sender(request).token or ""


class _Device(_Bearer):
    async def __call__(self, request: HTTPConnection) -> str:  # type: ignore[override]
        known: Identity = request.scope[IDENTITY]
        check_pace(request, known.hashed if known.is_known else "")  # new tokens are no way around the pace
        sender = self.sender(request)
        if sender.device is None:
            raise NotAllowed("this needs a device's token; enrol first")
        return sender.device


class _Admin(_Bearer):
    async def __call__(self, request: HTTPConnection) -> None:
        if not self.sender(request).admin:
            raise NotAllowed("this needs the administrator's token")


class _SigningIn(_Admin):
    async def __call__(self, request: HTTPConnection) -> None:
        sender: Identity = request.scope[IDENTITY]
        if not sender.admin:
            check_tries(request)
        await super().__call__(request)
        if sender.session:
            raise NotAllowed("a session opens no other; this needs the administrator's token itself")


# Dependencies that do not wait are coroutines: FastAPI runs every other one in a thread.
async def get_coordinator(request: Request) -> Coordinator:
    found: Coordinator = request.app.state.coordinator
    return found


async def get_registry(request: Request) -> Registry:
    found: Registry = request.app.state.registry
    return found


Service = Annotated[Coordinator, Depends(get_coordinator)]
Known = Annotated[Registry, Depends(get_registry)]
EnrolmentToken = Annotated[str, Depends(_Enrolling())]
Device = Annotated[str, Depends(_Device())]
Admin = Depends(_Admin())
SigningIn = Depends(_SigningIn())
