"""Who is asking. Administrator and device credentials are different things and never stand in for one another."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from coordinator.credentials import token_hash
from coordinator.errors import NotAllowed
from coordinator.registry import Registry
from coordinator.service import Coordinator

_bearer = HTTPBearer(auto_error=False, description="A token made by 'embrace serve' or by enrolment")
Given = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


# Whatever does not wait is a coroutine: FastAPI gives every other dependency a turn in a thread.
async def get_coordinator(request: Request) -> Coordinator:
    found: Coordinator = request.app.state.coordinator
    return found


async def get_registry(request: Request) -> Registry:
    found: Registry = request.app.state.registry
    return found


Service = Annotated[Coordinator, Depends(get_coordinator)]
Known = Annotated[Registry, Depends(get_registry)]


async def given_token(given: Given) -> str:
    if given is None:
        raise NotAllowed("this needs a token: Authorization: Bearer TOKEN")
    return given.credentials


Token = Annotated[str, Depends(given_token)]


def require_admin(token: Token, known: Known) -> None:
    known.check_admin(token)


async def require_device(token: Token, known: Known, service: Service) -> str:
    """A device asks again and again: the database is asked once, and revocations are known without it."""
    device = known.known_device(token_hash(token))
    if device is None or device in service.shut_out:
        return await run_in_threadpool(known.device_of, token)
    return device


Admin = Depends(require_admin)
Device = Annotated[str, Depends(require_device)]
