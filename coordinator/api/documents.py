"""Describe and check the JSON of the REST interface. Profiles and tasks are federation's own dataclasses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, with_config

from federation.axes.cover import DeviceProfile
from federation.messages import TaskOffer

with_config(ConfigDict(extra="forbid"))(DeviceProfile)


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Enrolment(Document):
    """Who wants to take part."""

    name: Annotated[str, Field(min_length=1, max_length=100, description="For people.", examples=["kitchen-pi"])]
    profile: DeviceProfile = DeviceProfile()


class Enrolled(Document):
    """The device's identity from now on."""

    device: Annotated[str, Field(examples=["83d9012691ea"])]
    token: Annotated[
        str, Field(description="The device's own credential. It is shown once.", examples=["embrace_device_X3k…"])
    ]


class Failure(Document):
    """Why a device gives a task up; another device gets it."""

    reason: Annotated[str, Field(max_length=64, description="A word.", examples=["out_of_memory"])]
    message: Annotated[str, Field(max_length=2000, description="For people.")] = ""


class Accepted(Document):
    """The update is recorded and will not be lost."""

    status: str = "accepted"
    sha256: Annotated[str, Field(description="Of the body, as it arrived.")]
    next: Annotated[TaskOffer | None, Field(description="Asked for with `next=1`: the next task, if there is one.")] = (
        None
    )


class Invitation(Document):
    """What an enrolment token is good for."""

    uses: Annotated[int, Field(ge=1, le=1_000_000, description="Devices that it enrols.")] = 1
    seconds: Annotated[float, Field(ge=1, le=366 * 86400, description="How long it lasts.")] = 86400


class Invited(Document):
    token: Annotated[str, Field(description="It is shown once.", examples=["embrace_enrol_Zw9…"])]


class JobRequest(Document):
    """A job on a bundle that was sent before."""

    bundle: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="sha256 of a bundle's manifest that is here")]
    plan: Annotated[
        dict[str, Any],
        Field(
            description="A job file as JSON. Every key has a default but `bundle`, which is a name here.",
            examples=[{"bundle": "digits", "num_rounds": 10, "participate": {"count": 3}, "local": {"steps": 20}}],
        ),
    ]


class JobCreated(Document):
    id: Annotated[str, Field(examples=["1f2e3d4c5b6a7988"])]


class JobState(Document):
    state: Annotated[str, Field(description="running, paused, stopped, done or failed", examples=["running"])]


class JobDocument(Document):
    """A job, and in `round` the round that is open or was the last."""

    id: Annotated[str, Field(examples=["1f2e3d4c5b6a7988"])]
    name: Annotated[str, Field(examples=["digits"])]
    bundle: Annotated[str, Field(description="sha256 of the bundle's manifest")]
    state: Annotated[str, Field(description="running, paused, stopped, done or failed", examples=["running"])]
    version: Annotated[int, Field(description="Of the newest weights: rounds that were committed.")]
    message: Annotated[str, Field(description="Why it failed, if it did.")]
    created_at: Annotated[float, Field(description="seconds since 1970")]
    plan: Annotated[dict[str, Any], Field(description="The job file, with every default written out.")]
    unfit: Annotated[dict[str, str], Field(description="Devices that can train nothing of it, and why.")] = {}
    round: dict[str, Any] | None = None


class DeviceDocument(Document):
    """A device as the administrator sees it."""

    id: str
    name: str
    revoked: bool
    profile: dict[str, Any]
    enrolled_at: Annotated[float, Field(description="seconds since 1970")]
    seen_at: Annotated[float, Field(description="When it last asked for a task; seconds since 1970.")]
    unfit: Annotated[str, Field(description="Why none of the jobs that run can use it, if that is so.")] = ""


class TimingDocument(Document):
    """An accepted update and what its report says about time."""

    round: int
    slot: int
    device: str
    boundary: str
    engine: str
    samples: int
    bytes: Annotated[int, Field(description="Of the update's body.")]
    arrived_at: Annotated[float, Field(description="seconds since 1970")]
    lost_state: Annotated[bool, Field(description="What it had kept was gone; it went on from the server's values.")]
    seconds: Annotated[
        dict[str, float],
        Field(
            description="By part: docs/guides/fine-tune.md.",
            examples=[{"wall": 2.1, "forward": 0.4, "training": 1.2}],
        ),
    ]


class Health(Document):
    status: Annotated[str, Field(examples=["ok"])]
    version: Annotated[str, Field(description="Of the program.")]


class Problem(BaseModel):
    """An error (RFC 9457). Some have more members, such as `reason`."""

    type: Annotated[str, Field(examples=["about:blank"])]
    title: Annotated[str, Field(description="The kind of error.")]
    status: Annotated[int, Field(description="The HTTP status.")]
    detail: Annotated[str, Field(description="What was found and what was expected.")]
    reason: Annotated[
        str | None, Field(description="With 409: duplicate, round_closed, finished, or why an update does not count.")
    ] = None
