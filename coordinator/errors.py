"""What the coordinator answers with besides success; each has the status of its HTTP answer."""

from __future__ import annotations

from typing import ClassVar

from federation.errors import EmbraceError, InputError


class NotFound(InputError):
    """There is no such thing, or it is not the caller's to see."""

    status: ClassVar[int] = 404


class Refused(InputError):
    """The request came too late, twice, or from another device."""

    status: ClassVar[int] = 409

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAllowed(EmbraceError):
    """No credential, or not the right one."""

    status: ClassVar[int] = 401


class Superseded(EmbraceError):
    """Another process that shares the database has done this already."""

    status: ClassVar[int] = 503


class NotChecked(EmbraceError):
    """An update lies in object storage, and it is open whether it counts: to be asked again."""

    status: ClassVar[int] = 503


class StoreAway(OSError):
    """The object storage does not answer: to be tried again."""


class Lost(FileNotFoundError):
    """The object storage has not got an object that was written, or has other bytes than were written."""
