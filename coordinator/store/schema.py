"""The tables. A change to them is a migration (migrations.py), never an edit of what exists."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: JSON}  # noqa: RUF012


class MetaRow(Base):
    """Words about the database itself: its schema version, the hash of the administrator's token."""

    __tablename__ = "meta"
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str]


class JobRow(Base):
    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str]
    bundle: Mapped[str] = mapped_column(String(64))  # sha256 of its manifest
    plan: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))  # running | paused | stopped | done | failed
    version: Mapped[int]  # of the newest weights
    created_at: Mapped[float]
    message: Mapped[str] = mapped_column(default="")


class DeviceRow(Base):
    __tablename__ = "devices"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str]
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    revoked: Mapped[bool] = mapped_column(default=False)
    profile: Mapped[dict[str, Any]]
    enrolled_at: Mapped[float]
    seen_at: Mapped[float]


class EnrolmentRow(Base):
    __tablename__ = "enrolments"
    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[float]
    uses_left: Mapped[int]


class RoundRow(Base):
    __tablename__ = "rounds"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    body: Mapped[dict[str, Any]]  # rounds.encode_head
    summary: Mapped[dict[str, Any]]  # what it came to, once it is over
    opened_at: Mapped[float]
    closed_at: Mapped[float | None]


class SeatRow(Base):
    """A seat of a round: a fact is about one of them, so that it costs the same in a round of any size."""

    __tablename__ = "seats"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[dict[str, Any]]  # rounds.encode_seat


class UpdateRow(Base):
    """An update that was received whole, found sound and acknowledged."""

    __tablename__ = "updates"
    task: Mapped[str] = mapped_column(String(96), primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    round: Mapped[int]
    slot: Mapped[int]
    device: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    sha256: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int]
    samples: Mapped[int]
    weight: Mapped[float]
    report: Mapped[dict[str, Any]]
    arrived_at: Mapped[float]
    __table_args__ = (
        Index("updates_of_round", "job", "round"),
        Index("updates_of_device", "job", "device", "round"),
    )


class MetricRow(Base):
    __tablename__ = "metrics"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    version: Mapped[int]
    name: Mapped[str] = mapped_column(String(64))
    value: Mapped[float]
    at: Mapped[float]


class EventRow(Base):
    """What happened, for whoever watches."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(String(32), index=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(32))
    body: Mapped[dict[str, Any]]
