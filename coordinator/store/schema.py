"""The tables, as values: what the repository takes and returns has a class for each table, a field for each column.

A change to them is a migration (migrations.py), never an edit of what exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    TypeDecorator,
)

METADATA: Final = MetaData()
FINISHED: Final = ("stopped", "done", "failed")  # states of a job that is over
DELETING: Final = "deleting"  # ... of one that was over, and goes
_WHOLE: Final = BigInteger().with_variant(Integer, "sqlite")  # whose integers have 64 bits, and a key must be INTEGER


class _Text(TypeDecorator[str]):
    """Text without NUL, which PostgreSQL does not take: a path with one names nothing, a message is kept without."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None or "\0" not in value else value.replace("\0", "\ufffd")


_KINDS: Final[dict[Any, Any]] = {
    str: _Text,
    int: _WHOLE,
    float: Double,
    float | None: Double,
    bool: Boolean,
    dict[str, Any]: JSON,
}


def _table(name: str, record: type[Any], *indexes: Index) -> Table:
    """Make the table of a class; an annotation has what its column has beside the type of the field."""
    annotations, columns = get_type_hints(record, include_extras=True), []
    for own, kind in get_type_hints(record).items():
        ((arguments, options),) = getattr(annotations[own], "__metadata__", [_of(_KINDS[kind])])
        columns.append(Column(own, *arguments, nullable=kind == (float | None), **options))
    return Table(name, METADATA, *columns, *indexes)


def _of(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, options


@dataclass(frozen=True)
class MetaRecord:
    """A fact about the database itself: its schema version, the hash of the administrator's token."""

    key: Annotated[str, _of(_Text(64), primary_key=True)]
    value: str


@dataclass(frozen=True)
class JobRecord:
    """A training job."""

    id: Annotated[str, _of(_Text(32), primary_key=True)]
    name: str
    bundle: Annotated[str, _of(_Text(64))]  # sha256 of its manifest
    plan: dict[str, Any]
    state: Annotated[str, _of(_Text(16))]  # running | paused | stopped | done | failed
    version: int  # of the newest weights
    created_at: float
    message: str = ""


@dataclass(frozen=True)
class DeviceRecord:
    """A device that was enrolled."""

    id: Annotated[str, _of(_Text(32), primary_key=True)]
    name: Annotated[str, _of(_Text, index=True)]
    token_hash: Annotated[str, _of(_Text(64), unique=True)]
    revoked: bool
    profile: dict[str, Any]
    enrolled_at: float
    seen_at: float
    # It would come for a task before then; kept where several processes share the database.
    here_until: Annotated[float, _of(Double, index=True)] = 0.0
    away_until: Annotated[float, _of(Double, index=True)] = 0.0  # it was told to come back, and is there until


@dataclass(frozen=True)
class EnrolmentRecord:
    """A token with which devices enrol."""

    token_hash: Annotated[str, _of(_Text(64), primary_key=True)]
    expires_at: float
    uses_left: int


@dataclass(frozen=True)
class SessionRecord:
    """A page that signed in with the administrator's token."""

    token_hash: Annotated[str, _of(_Text(64), primary_key=True)]
    admin_hash: Annotated[str, _of(_Text(64))]  # of the token that it signed in with
    created_at: float
    expires_at: float


@dataclass(frozen=True)
class RoundRecord:
    """A round but for its seats."""

    job: Annotated[str, _of(ForeignKey("jobs.id"), primary_key=True)]
    number: Annotated[int, _of(_WHOLE, primary_key=True)]
    state: Annotated[str, _of(_Text(16))]
    body: dict[str, Any]  # rounds.encode_head
    summary: dict[str, Any]  # what it came to, once it is over
    opened_at: float
    closed_at: float | None


@dataclass(frozen=True)
class SeatRecord:
    """A seat of a round: a fact is about one of them, so that it costs the same in a round of any size."""

    job: Annotated[str, _of(ForeignKey("jobs.id"), primary_key=True)]
    round: Annotated[int, _of(_WHOLE, primary_key=True)]
    number: Annotated[int, _of(_WHOLE, primary_key=True)]
    body: dict[str, Any]  # rounds.encode_seat
    revision: int = 0  # of its job when it was written


@dataclass(frozen=True)
class UpdateRecord:
    """An update that was acknowledged: received whole and found sound; or uploaded, and counted once it is checked."""

    task: Annotated[str, _of(_Text(96), primary_key=True)]
    job: Annotated[str, _of(ForeignKey("jobs.id"))]
    round: int
    slot: int
    device: Annotated[str, _of(ForeignKey("devices.id"))]
    sha256: Annotated[str, _of(_Text(64))]
    bytes: int
    samples: int
    weight: float
    report: dict[str, Any]
    arrived_at: float
    body: Annotated[str, _of(_Text(64))] = ""  # name of its body, if that is not the sha256
    checked: bool = True  # False: it lies in object storage as its device has put it there; sha256 and bytes are claims
    sum: Annotated[str, _of(_Text(64))] = ""  # the partial sum that holds it, where processes share the database

    @property
    def body_name(self) -> str:
        return self.body or self.sha256


@dataclass(frozen=True)
class SumRecord:
    """A partial sum of an open round, which a worker has stored; the rows of its updates name it."""

    id: Annotated[str, _of(_Text(64), primary_key=True)]  # random: part of the key of its bytes
    job: Annotated[str, _of(ForeignKey("jobs.id"), index=True)]
    round: int
    updates: int
    at: float


@dataclass(frozen=True)
class StandingRecord:
    """How a device has done in a job so far. A device that fails for its own reasons is benched for a while."""

    job: Annotated[str, _of(ForeignKey("jobs.id"), primary_key=True)]
    device: Annotated[str, _of(ForeignKey("devices.id"), primary_key=True, index=True)]
    successes: int = 0  # updates that counted
    failures: int = 0
    in_a_row: int = 0  # failures since the last success that were the device's own
    benched_until: float | None = None  # seconds since 1970; it gets no task of this job before
    seconds: float | None = None  # that its tasks take, measured from lease to update
    reason: str = ""  # of the last failure, a word
    message: str = ""  # ... for people
    at: float = 0.0  # of the last change
    excused: int = 0  # failures since the last success that were not held against it
    revision: int = 0  # of its job when it was written


@dataclass(frozen=True)
class SharedJobRecord:
    """How often an open job has changed: a process that knows an older revision reads what is new.

    Its row is locked by the process that changes the job. It goes when the job is over, the last version is scored and
    what was left of its rounds is removed. Only databases that several processes share have such rows.
    """

    job: Annotated[str, _of(ForeignKey("jobs.id"), primary_key=True)]
    revision: int
    open: bool  # it has a round to go on with
    scoring: int  # the newest version that waits for its score; 0: none does


@dataclass(frozen=True)
class MetricRecord:
    """A score of a version."""

    id: Annotated[int, _of(_WHOLE, primary_key=True, autoincrement=True)]
    job: Annotated[str, _of(ForeignKey("jobs.id"), index=True)]
    version: int
    name: Annotated[str, _of(_Text(64))]
    value: float
    at: float


@dataclass(frozen=True)
class EventRecord:
    """What happened to a job, for clients that watch it."""

    id: Annotated[int, _of(_WHOLE, primary_key=True, autoincrement=True)]
    job: Annotated[str, _of(_Text(32), index=True)]
    at: float
    kind: Annotated[str, _of(_Text(32))]
    body: dict[str, Any]


@dataclass(frozen=True)
class BenchmarkRecord:
    """What training costs on a device, by its own measurement; the newest of each bundle, batch, runtime, threads."""

    device: Annotated[str, _of(ForeignKey("devices.id"), primary_key=True)]
    bundle: Annotated[str, _of(_Text(64), primary_key=True, index=True)]
    batch: Annotated[int, _of(_WHOLE, primary_key=True)]
    threads: Annotated[int, _of(_WHOLE, primary_key=True)]
    runtime: Annotated[str, _of(_Text(200), primary_key=True)]
    body: dict[str, Any]  # federation/benchmark.py
    at: float


META: Final = _table("meta", MetaRecord)
JOBS: Final = _table("jobs", JobRecord)
DEVICES: Final = _table("devices", DeviceRecord)
ENROLMENTS: Final = _table("enrolments", EnrolmentRecord)
SESSIONS: Final = _table("sessions", SessionRecord)
ROUNDS: Final = _table("rounds", RoundRecord)
SEATS: Final = _table("seats", SeatRecord)
UPDATES: Final = _table(
    "updates",
    UpdateRecord,
    Index("updates_of_round", "job", "round"),
    Index("updates_of_device", "job", "device", "round"),
    Index("updates_by_device", "device", "arrived_at"),
)
SUMS: Final = _table("sums", SumRecord)
STANDINGS: Final = _table("standings", StandingRecord)
SHARED_JOBS: Final = _table("shared_jobs", SharedJobRecord)
METRICS: Final = _table("metrics", MetricRecord)
EVENTS: Final = _table("events", EventRecord)
BENCHMARKS: Final = _table("benchmarks", BenchmarkRecord)
