"""Describe and check the JSON of the REST interface. Profiles and tasks are federation's own dataclasses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, with_config

from federation.axes.cover import DeviceProfile
from federation.benchmark import Benchmark, BoundaryCost, PartSeconds
from federation.messages import TaskOffer

_forbid_others = with_config(ConfigDict(extra="forbid"))
_forbid_others(DeviceProfile)
_forbid_others(Benchmark)
_forbid_others(BoundaryCost)
_forbid_others(PartSeconds)


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
    name: Annotated[str, Field(description="What it is called here.", examples=["kitchen-pi-2"])]


class OwnName(Document):
    """Who a device is."""

    device: Annotated[str, Field(examples=["83d9012691ea"])]
    name: Annotated[str, Field(description="What it is called here.", examples=["kitchen-pi-2"])]


class Failure(Document):
    """Why a device gives a task up; another device gets it."""

    reason: Annotated[str, Field(max_length=64, description="A word.", examples=["out_of_memory"])]
    message: Annotated[str, Field(max_length=2000, description="For people.")] = ""


class Renewed(Document):
    """The task is still the device's."""

    seconds: Annotated[float, Field(description="For which the device may be silent.", examples=[30.0])]


class Upload(Document):
    """An update that a device would put into object storage itself."""

    bytes: Annotated[int, Field(ge=1, le=1 << 50, description="Of the body.")]


class UploadGranted(Document):
    """Where the body goes: PUT it there, with its Content-Length and without a token."""

    name: Annotated[str, Field(description="Of the body, for `complete`.", examples=["9f86d081884c7d65…"])]
    url: Annotated[str, Field(description="Good for a few minutes. It is a secret: do not log it.")]


class Completion(Document):
    """A body that lies in object storage."""

    name: Annotated[str, Field(pattern="^[0-9a-f]{48}$", description="From the answer to `upload`.")]
    bytes: Annotated[int, Field(ge=1, le=1 << 50)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="Of the body.")]


class Accepted(Document):
    """The update is recorded and will not be lost."""

    status: Annotated[str, Field(description="accepted; or checking: it does not count yet, say `complete` again.")] = (
        "accepted"
    )
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


class DataDocument(Document):
    """Samples that versions can be scored on."""

    sha256: str
    bytes: int


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


class JobDeleted(Document):
    """What became free when a job was deleted."""

    bytes: int
    bundle: Annotated[str | None, Field(description="The bundle that went with it; others still use it if null.")]
    data: Annotated[str | None, Field(description="The evaluation data that went with it, likewise.")]


class JobState(Document):
    state: Annotated[str, Field(description="running, paused, stopped, done or failed", examples=["running"])]


class RunningJob(Document):
    """A job that gives out tasks, as a person sees it before a device joins."""

    id: Annotated[str, Field(examples=["1f2e3d4c5b6a7988"])]
    name: Annotated[str, Field(examples=["digits"])]
    bundle: Annotated[str, Field(description="sha256 of the bundle's manifest")]
    round: Annotated[int, Field(description="Rounds that are done.")]
    rounds: Annotated[int, Field(description="Rounds that it has.")]
    steps: Annotated[int, Field(description="Of a device in a round.")]
    epochs: Annotated[int | None, Field(description="Passes over a device's data instead of steps.")]
    batch: Annotated[int, Field(description="Samples of a step.")]
    manifest: Annotated[dict[str, Any], Field(description="Of the bundle: docs/reference/bundle.md")]


class RunningJobs(Document):
    jobs: list[RunningJob]


class BestVersion(Document):
    """The version that is best by the metric of the job's evaluation."""

    version: int
    metric: Annotated[str, Field(examples=["accuracy"])]
    value: float


class WaitingDocument(Document):
    """What a job waits for."""

    on: Annotated[str, Field(description="administrator, devices, updates, closing or evaluation")]
    text: Annotated[str, Field(description="For people, in one line.", examples=["needs 2 more devices"])]
    count: Annotated[int, Field(description="Devices that are missing to begin, or updates to close the round.")]
    devices: Annotated[list[str], Field(description="Whose updates are awaited.")]


class JobDocument(Document):
    """A job, and in `round` the round that is open or was the last."""

    id: Annotated[str, Field(examples=["1f2e3d4c5b6a7988"])]
    name: Annotated[str, Field(examples=["digits"])]
    bundle: Annotated[str, Field(description="sha256 of the bundle's manifest")]
    state: Annotated[str, Field(description="running, paused, stopped, done or failed", examples=["running"])]
    version: Annotated[int, Field(description="Of the newest weights: rounds that were committed.")]
    message: Annotated[str, Field(description="Why it failed or ended early, if it did.")]
    created_at: Annotated[float, Field(description="seconds since 1970")]
    plan: Annotated[dict[str, Any], Field(description="The job file, with every default written out.")]
    unfit: Annotated[dict[str, str], Field(description="Devices that can train nothing of it, and why.")] = {}
    waiting: Annotated[WaitingDocument | None, Field(description="What it waits for; with one job only.")] = None
    best: Annotated[BestVersion | None, Field(description="Its weights are kept beside the newest.")] = None
    benched: Annotated[
        dict[str, str], Field(description="Devices that failed and get no task for a while, for how long, and why.")
    ] = {}
    round: dict[str, Any] | None = None


class JobChange(Document):
    """What became of a job, and of the tasks of the round that was open."""

    id: Annotated[str, Field(examples=["1f2e3d4c5b6a7988"])]
    name: Annotated[str, Field(examples=["digits"])]
    before: Annotated[str, Field(description="Its state before.", examples=["running"])]
    state: Annotated[str, Field(description="Its state now.", examples=["paused"])]
    version: Annotated[int, Field(description="Of the newest weights.")]
    round: Annotated[int, Field(description="The round that was open.")]
    under_way: Annotated[int, Field(description="Tasks of the round that devices were at work on.")]
    arrived: Annotated[int, Field(description="Updates of the round that had arrived.")]
    closing: Annotated[bool, Field(description="Whether the round was complete; then it makes a version anyway.")]


class Revoked(Document):
    """What became of a device."""

    id: str
    name: str
    before: Annotated[bool, Field(description="Whether it was revoked already.")]
    freed: Annotated[int, Field(description="Tasks that it held and that other devices can get now.")]


class DeviceDocument(Document):
    """A device as the administrator sees it."""

    id: str
    name: str
    revoked: bool
    profile: dict[str, Any]
    enrolled_at: Annotated[float, Field(description="seconds since 1970")]
    seen_at: Annotated[float, Field(description="When it last asked for a task; seconds since 1970.")]
    state: Annotated[str, Field(description="working, waiting, benched, gone or revoked", examples=["working"])]
    benched_until: Annotated[
        float | None, Field(description="Until when a job that is open gives it no task; seconds since 1970.")
    ] = None
    unfit: Annotated[str, Field(description="Why none of the jobs that run can use it, if that is so.")] = ""


class DeviceError(Document):
    """What went wrong on a device last."""

    job: str
    at: Annotated[float, Field(description="seconds since 1970")]
    reason: Annotated[str, Field(examples=["out_of_memory"])]
    message: str


class DeviceInJob(Document):
    """How a device does in a job."""

    job: str
    name: str
    boundary: Annotated[str, Field(description="From where it trains, or did last.")]
    task: Annotated[str, Field(description="State of its seat in the open round; empty: it has none.")]
    done: Annotated[int, Field(description="Updates that counted.")]
    failed: int
    benched_until: Annotated[float | None, Field(description="It gets no task before; seconds since 1970.")]
    reason: Annotated[str, Field(description="Of its last failure here, a word.")]
    message: str


class DeviceReport(DeviceDocument):
    """A device and what it did."""

    tasks_done: int
    tasks_failed: int
    last_error: DeviceError | None
    last_update_at: Annotated[float | None, Field(description="seconds since 1970")]
    seconds: Annotated[
        dict[str, float], Field(description="Medians over its last 20 updates, by part: docs/guides/fine-tune.md.")
    ]
    jobs: list[DeviceInJob]


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


class BenchmarkDocument(Document):
    """What a device measured."""

    device: Annotated[str, Field(description="Its id.", examples=["83d9012691ea"])]
    name: Annotated[str, Field(description="What it is called here.", examples=["kitchen-pi"])]
    at: Annotated[float, Field(description="When it arrived; seconds since 1970.")]
    benchmark: Benchmark


class SessionDocument(Document):
    """A page that signed in."""

    expires_at: Annotated[float | None, Field(description="seconds since 1970")]
    version: Annotated[str, Field(description="Of the program.")]


class FleetDevice(DeviceDocument):
    """A device, what its last update told, and how it does in all jobs."""

    last_job: Annotated[str, Field(description="Of its last update; empty: it has sent none.")]
    last_update_at: Annotated[float | None, Field(description="seconds since 1970")]
    boundary: Annotated[str, Field(description="From where it trained last.")]
    engine: str
    seconds: Annotated[dict[str, float], Field(description="Of its last task, by part: docs/guides/fine-tune.md.")]
    memory: Annotated[
        dict[str, float],
        Field(description="Peak bytes of its last task: `anonymous` on top of the idle process, `process`, `allowed`."),
    ]
    done: Annotated[int, Field(description="Updates that counted.")]
    failed: int
    in_a_row: Annotated[int, Field(description="Failures since its last success that were its own.")]
    reason: Annotated[str, Field(description="Of its last failure, a word.", examples=["out_of_memory"])]
    message: str


class Fleet(Document):
    """Devices that are not revoked, those in trouble first."""

    devices: list[FleetDevice]
    total: Annotated[int, Field(description="Devices that there are; `devices` has at most 2000.")]


class LayerDocument(Document):
    name: str
    parameters: Annotated[int, Field(description="Numbers that it has.")]


class SeatDocument(Document):
    """A seat of a round: the device in it, and those that had it before."""

    round: int
    slot: int
    device: str
    boundary: str
    state: Annotated[str, Field(description="offered, leased, uploaded (not checked yet), arrived, expired or failed")]
    since: Annotated[float, Field(description="When it came into its state; seconds since 1970.")]
    until: Annotated[float, Field(description="When an offer or a lease runs out; seconds since 1970.")]
    seconds: Annotated[float | None, Field(description="From the lease to the update.")]
    usual: Annotated[float | None, Field(description="Seconds that this device's tasks took before.")]
    lost: Annotated[list[str], Field(description="Devices that had the seat and did not answer.")]


class JobSeats(Document):
    """Who trained what in the newest rounds of a job."""

    layers: list[LayerDocument]
    boundaries: Annotated[dict[str, list[int]], Field(description="The layers that each boundary trains.")]
    tiers: Annotated[dict[str, str], Field(description="The boundary of each tier.")]
    devices: Annotated[dict[str, str], Field(description="Names, by id.")]
    seats: Annotated[list[SeatDocument], Field(description="The newest rounds first; at most 20000.")]


class VersionDocument(Document):
    """A version whose weights are here."""

    version: int
    bytes: int
    scores: dict[str, float]
    newest: bool
    best: bool


class BundleDocument(Document):
    """A model that jobs can train."""

    digest: Annotated[str, Field(description="sha256 of its manifest")]
    name: str
    layers: int
    parameters: int
    bytes: int
    batch: int
    tiers: Annotated[dict[str, str], Field(description="The boundary of each tier.")]


class AlgorithmDocument(Document):
    name: str
    note: str
    paper: str


class Choices(Document):
    """What a job can be made of."""

    bundles: list[BundleDocument]
    evaluation_data: list[DataDocument]
    algorithms: list[AlgorithmDocument]


class JobFile(Document):
    """A job file, as it is written."""

    toml: Annotated[str, Field(max_length=100_000, examples=['bundle = "digits"\nnum_rounds = 20'])]


class PlanDocument(Document):
    plan: Annotated[dict[str, Any], Field(description="The job file, with every default written out.")]


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
