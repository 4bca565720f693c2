"""Find out who sends a request. Administrator and device credentials never stand in for one another.

The admission (admission.py) identifies the sender before anything of the body is read; the routes say whom they serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from starlette.types import Scope

from coordinator.api.limits import check_pace
from coordinator.coordinator import Coordinator
from coordinator.credentials import token_hash
from coordinator.errors import NotAllowed
from coordinator.registry import Registry

IDENTITY = "embrace.identity"  # the key of the scope


@dataclass(frozen=True)
class Identity:
    """What the token of a request proves."""

    token: str | None = None
    hashed: str = ""
    device: str | None = None
    admin: bool = False

    @property
    def is_known(self) -> bool:
        return self.admin or self.device is not None


def recognise(scope: Scope, registry: Registry, coordinator: Coordinator) -> Identity | str:
    """Identify the sender without the database; return the token of one that has to be looked up."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
    scheme, _, token = given.partition(" ")
    if scheme.lower() != "bearer" or not token:
        return Identity()
    hashed = token_hash(token := token.strip())
    if registry.is_known_admin(token):
        return Identity(token, hashed, admin=True)
    device = registry.known_device(hashed)
    if device is None or device in coordinator.shut_out:
        return token
    return Identity(token, hashed, device)


def look_up(token: str, registry: Registry) -> Identity:
    """Ask the database whose token this is."""
    hashed = token_hash(token)
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
