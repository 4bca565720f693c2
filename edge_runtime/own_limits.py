"""What a device spends on a task at most, whatever the task says: the person who starts the agent decides.

Memory has its own option and file (budget.py). These bound steps, time, and the disk that the work folder takes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from federation.errors import DiskFull, InputError, OverLimit

GRAPHS, JOBS = "graphs", "jobs"  # folders of the work folder with what can be fetched again


@dataclass(frozen=True)
class OwnLimits:
    """The most of each."""

    disk: int = 4_000_000_000  # bytes of the work folder
    task_seconds: float = 6 * 3600.0
    steps: int = 1_000_000  # of one task

    def __post_init__(self) -> None:
        if not (self.disk > 0 and 0 < self.task_seconds < 1e9 and self.steps > 0):
            raise InputError("max_disk, max_task_time and max_steps: expected numbers above 0")

    def check_steps(self, steps: int) -> None:
        if steps > self.steps:
            raise OverLimit(f"the task has {steps:,} steps, and this device does at most {self.steps:,} (--max-steps)")


class Deadline:
    """The end of a task's time. Everything that can go on for long asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: float | None = None
        self._seconds = 0.0

    def begin(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = self._clock() + seconds

    def end(self) -> None:
        self._until = None

    def check(self) -> None:
        """Raise OverLimit if a task is under way and its time is over."""
        if self._until is not None and self._clock() > self._until:
            raise OverLimit(f"the task took more than {self._seconds:g} seconds, its time here (--max-task-time)")


class DiskRoom:
    """The room in a work folder. What can be fetched again goes, the oldest first, when it is full."""

    def __init__(self, work: Path, most: int) -> None:
        self._work = work
        self._most = most
        self._used: int | None = None
        self.in_use: set[Path] = set()  # files and folders that stay

    def take(self, size: int) -> None:
        """Count bytes that are about to be written; DiskFull if there is no room for them."""
        if self._used is None or self._used + size > self._most:
            self._used = self._make_room(size)
        if self._used + size > self._most:
            raise DiskFull(
                f"{size:,} bytes more do not fit into {self._work}: {self._used:,} of {self._most:,} are used "
                "(--max-disk)"
            )
        self._used += size

    @property
    def left(self) -> int:
        self._used = self._make_room(0)
        return max(0, self._most - self._used)

    def _make_room(self, size: int) -> int:
        used = sum(map(_size, _files(self._work)))
        for path in sorted(self._cached(), key=lambda path: path.stat().st_mtime):
            if used + size <= self._most:
                break
            used -= sum(map(_size, _files(path))) if path.is_dir() else _size(path)
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return used

    def _cached(self) -> list[Path]:
        folders = [self._work / name for name in (GRAPHS, JOBS)]
        return [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path not in self.in_use]


def _files(folder: Path) -> Iterator[Path]:
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in names)


def _size(path: Path) -> int:
    """Count the bytes that a file takes, without its holes; a file with several names counts as its share."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    blocks = getattr(found, "st_blocks", None)
    return (found.st_size if blocks is None else 512 * blocks) // max(1, found.st_nlink)
