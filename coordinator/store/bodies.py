"""The bodies of updates: they arrive, wait to be folded, and go. So do the partial sums that they are folded into."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.credentials import new_id
from coordinator.store.blobs import Blobs, safe
from coordinator.store.schema import UpdateRecord
from coordinator.store.sums import write_sums
from federation.round_sums import RoundSums
from federation.space import Vector

_FOLDER = "spool"
_BODY = ".body"
_SUM = ".sums"


@dataclass(frozen=True)
class BodyReader:
    """Read parts of a body. It is opened for each: a cohort may be larger than the limit of open files."""

    path: Path

    def values(self, offset: int, count: int) -> Vector:
        return np.fromfile(self.path, "<f4", count, offset=offset)


class Bodies:
    """Bodies by task and name: their sha256, or a new one where several processes may receive the same body."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def arriving(self, task: str) -> Path:
        """Return a new place for each attempt to send the body of a task."""
        return self._blobs.draft(f"{_FOLDER}/{safe(task)}.{new_id()}", ".part")

    def commit_all(self, arrivals: Sequence[tuple[Path, str, str]]) -> list[OSError | None]:
        """Keep what has arrived at a path, of a task and with a name; for each, None or why it was not possible."""
        return self._blobs.commit_all([(path, _key(task, name)) for path, task, name in arrivals])

    def file(self, update: UpdateRecord) -> Path:
        return self._blobs.file(_key(update.task, update.body_name))

    def upload_url(self, task: str, name: str, size: int) -> str | None:
        """Sign a URL to which a device can write a body itself; None if it has to send it here."""
        return self._blobs.upload_url(_key(task, name), size)

    @property
    def has_uploads(self) -> bool:
        """Whether devices may leave bodies behind that no process knows of."""
        return self._blobs.has_uploads

    def take_upload(self, update: UpdateRecord) -> Path:
        """Return the file of a body that its device has uploaded; WireError if it is not what the device said."""
        self._blobs.take_upload(_key(update.task, update.body_name), update.bytes, update.sha256)
        return self.file(update)

    def delete(self, task: str, name: str) -> None:
        self._blobs.delete(_key(task, name))

    def delete_all(self, updates: Iterable[UpdateRecord]) -> None:
        self._blobs.delete(*(_key(update.task, update.body_name) for update in updates))

    def delete_sums(self, updates: Iterable[UpdateRecord]) -> None:
        """Delete the partial sums that hold updates."""
        self._blobs.delete(*{_sum_key(update.job, update.round, update.sum) for update in updates if update.sum})

    def drop(self, update: UpdateRecord) -> None:
        """Let go of a local copy: another process folds it."""
        self._blobs.drop(_key(update.task, update.body_name))

    def arrived(self) -> list[str]:
        """List the keys of all bodies that have arrived, and of partial sums."""
        return [key for key in self._all() if key.endswith((_BODY, _SUM))]

    def _all(self) -> list[str]:
        return [*self._blobs.list(_FOLDER), *self._blobs.uploads(_FOLDER)]

    def job_of(self, key: str) -> str:
        """Name the job of a body: spool/JOB-ROUND-SLOT-ATTEMPT.NAME.body."""
        return key.removeprefix(f"{_FOLDER}/").partition("-")[0]

    def keep_sum(self, job: str, round: int, name: str, sums: RoundSums) -> None:
        """Keep a partial sum of a round."""
        key = _sum_key(job, round, name)
        draft = self._blobs.draft(key)
        write_sums(draft, sums)
        self._blobs.commit(draft, key)

    def sum_file(self, job: str, round: int, name: str) -> Path:
        return self._blobs.file(_sum_key(job, round, name))

    def drop_sum(self, job: str, round: int, name: str) -> None:
        """Let go of a local copy: another process merges it."""
        self._blobs.drop(_sum_key(job, round, name))

    def of_job(self, job: str) -> list[str]:
        """List the keys of all bodies and partial sums of a job, also of those that are arriving."""
        return [key for key in self._all() if key.startswith(f"{_FOLDER}/{safe(job)}-")]

    def forget(self, job: str, before: int) -> None:
        """Delete what is left of the rounds of a job before one, also what arrived and was never recorded."""
        self._blobs.delete(*(key for key in self.of_job(job) if _round(key) < before))

    def keep_only(self, updates: Iterable[UpdateRecord]) -> None:
        """Delete every other body: it is done with, or was never acknowledged and is sent again.

        What was uploaded stays: its device is about to say so.
        """
        needed = {_key(update.task, update.body_name) for update in updates}
        self._blobs.delete(*(key for key in self._blobs.list(_FOLDER) if key not in needed))


def _key(task: str, name: str) -> str:
    return f"{_FOLDER}/{safe(task)}.{safe(name)}{_BODY}"


def _sum_key(job: str, round: int, name: str) -> str:
    return f"{_FOLDER}/{safe(job)}-{round}-sum.{safe(name)}{_SUM}"


def _round(key: str) -> int:
    """Name the round of a body, spool/JOB-ROUND-SLOT-ATTEMPT.NAME.body, or of a partial sum."""
    number = key.split("-")[1:2]
    return int(number[0]) if number and number[0].isdigit() else sys.maxsize
