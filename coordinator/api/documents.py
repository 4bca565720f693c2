"""What goes over the wire as JSON, for the documentation as much as for the checks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Profile(Document):
    """What a device says about itself. The boundary it measured counts most, then its tier, then its memory."""

    memory: Annotated[int | None, Field(ge=1, description="Bytes for training; null: enough for everything.")] = None
    tier: Annotated[str | None, Field(max_length=200)] = None
    boundary: Annotated[str | None, Field(max_length=200)] = None
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    runtime: Annotated[str, Field(max_length=200, examples=["onnxruntime 1.31.1"])] = ""
    engines: Annotated[list[str], Field(min_length=1, max_length=8)] = ["portable"]


class Enrolment(Document):
    name: Annotated[str, Field(min_length=1, max_length=100, examples=["kitchen-pi"])]
    profile: Profile = Profile()


class Enrolled(Document):
    device: str
    token: Annotated[str, Field(description="The device's own credential. It is shown once.")]


class TaskDocument(Document):
    """A device's work: fetch `version`, train as `work` says, send the update before the lease ends."""

    id: str
    job: str
    bundle: Annotated[str, Field(description="sha256 of the bundle's manifest")]
    version: int
    lease_until: Annotated[float, Field(description="seconds since 1970")]
    work: dict[str, Any]


class Failure(Document):
    reason: Annotated[str, Field(max_length=64, examples=["out_of_memory"])]
    message: Annotated[str, Field(max_length=2000)] = ""


class Accepted(Document):
    status: str = "accepted"
    sha256: str


class Invitation(Document):
    uses: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    seconds: Annotated[float, Field(ge=1, le=366 * 86400)] = 86400


class Invited(Document):
    token: str


class JobRequest(Document):
    bundle: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="sha256 of a bundle's manifest that is here")]
    plan: Annotated[dict[str, Any], Field(description="A job file as JSON")]


class JobCreated(Document):
    id: str


class JobDocument(Document):
    id: str
    name: str
    bundle: str
    state: str
    version: int
    message: str
    created_at: float
    plan: dict[str, Any]
    round: dict[str, Any] | None = None


class DeviceDocument(Document):
    id: str
    name: str
    revoked: bool
    profile: dict[str, Any]
    enrolled_at: float
    seen_at: float
