"""Find out who sends a request. Administrator and device credentials never stand in for one another.

The admission (admission.py) identifies the sender before anything of the body is read; the routes say whom they serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from starlette.types import Scope

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


async def identify(scope: Scope, registry: Registry, coordinator: Coordinator) -> Identity:
    """Look up the sender. Devices ask again and again: the database is asked once for each."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
    scheme, _, token = given.partition(" ")
    if scheme.lower() != "bearer" or not token:
        return Identity()
    hashed = token_hash(token := token.strip())
    device = registry.known_device(hashed)
    if device is None or device in coordinator.shut_out:
        return await run_in_threadpool(_look_up, token, hashed, registry)
    return Identity(token, hashed, device)


def _look_up(token: str, hashed: str, registry: Registry) -> Identity:
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
    """Describe the header in the OpenAPI document; the admission has read it."""

    async def __call__(self, request: HTTPConnection) -> Identity:  # type: ignore[override]
        found: Identity = request.scope[IDENTITY]
        return found


Sender = Annotated[Identity, Depends(_Bearer(description="A token made by 'embrace serve' or by enrolment"))]


# Dependencies that do not wait are coroutines: FastAPI runs every other one in a thread.
async def get_coordinator(request: Request) -> Coordinator:
    found: Coordinator = request.app.state.coordinator
    return found


async def get_registry(request: Request) -> Registry:
    found: Registry = request.app.state.registry
    return found


async def require_token(sender: Sender) -> str:
    if sender.token is None:
        raise NotAllowed("this needs a token: Authorization: Bearer TOKEN")
    return sender.token


async def require_admin(sender: Sender) -> None:
    await require_token(sender)
    if not sender.admin:
        raise NotAllowed("this needs the administrator's token")


async def require_device(sender: Sender) -> str:
    await require_token(sender)
    if sender.device is None:
        raise NotAllowed("this needs a device's token; enrol first")
    return sender.device


Service = Annotated[Coordinator, Depends(get_coordinator)]
Known = Annotated[Registry, Depends(get_registry)]
Token = Annotated[str, Depends(require_token)]
Device = Annotated[str, Depends(require_device)]
Admin = Depends(require_admin)
