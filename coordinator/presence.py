"""Which devices are there. A device that waits in a request is; one that went away in the middle of it is not, nor is
one that took a task and has not come back from it.

A single process keeps this in memory: after a restart a device counts as there for as long as the database saw it
lately. Processes that share a database keep it there: a device waits in one of them, and another draws the cohort.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from sqlalchemy.orm import Session

from coordinator.store.repository import Repository

HERE = 15.0  # seconds after the last word of a device that does not wait in a request
STAYS = HERE + 5.0  # the same where processes share a database: a device that waits comes again after 15 seconds
PRESENCE = 60.0  # seconds after which a device that was not heard of counts as gone
MOST_KNOWN = 1 << 20


class Presence(Protocol):
    """Know the devices that would come for a task. Thread-safe."""

    def came(self, session: Session, devices: Sequence[str], now: float) -> None:
        """Note that devices ask for a task, or have answered one."""

    def took(self, session: Session, device: str) -> None:
        """Note that a device has a task: until it comes back there is no use in another for it."""

    def left(self, device: str) -> None:
        """Note that a device hung up or did not come for a task: it is gone unless a request of its waits."""

    def waiting(self, device: str) -> AbstractContextManager[None]:
        """Count a device as there while the block runs, in which it comes again and again."""

    def here(self, session: Session, now: float) -> Sequence[str]:
        """List the devices that would come for a task."""


class OwnPresence:
    """When devices last came to this process, the only one; which of them wait, and which are at work."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        self._working: set[str] = set()
        self._waiting: Counter[str] = Counter()

    def came(self, session: Session, devices: Sequence[str], now: float) -> None:
        with self._lock:
            if len(self._heard) > MOST_KNOWN:
                self._heard.clear()
                self._working.clear()
            self._heard.update(dict.fromkeys(devices, now))
            self._working.difference_update(devices)

    def took(self, session: Session, device: str) -> None:
        with self._lock:
            self._working.add(device)

    def left(self, device: str) -> None:
        with self._lock:
            self._heard[device] = float("-inf")

    @contextmanager
    def waiting(self, device: str) -> Iterator[None]:
        with self._lock:
            self._waiting[device] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[device] -= 1
                if self._waiting[device] <= 0:
                    del self._waiting[device]

    def here(self, session: Session, now: float) -> Sequence[str]:
        """List those that the database saw lately; one that was never heard of has the benefit of the doubt."""
        devices = self._repository.present(session, now - PRESENCE)
        with self._lock:
            heard, waiting = self._heard, self._waiting
            there = (device for device in devices if device not in self._working)
            return [device for device in there if device in waiting or now - heard.get(device, now) <= HERE]


class SharedPresence:
    """The same in the rows of devices, for all processes. Only what is new is written."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def came(self, session: Session, devices: Sequence[str], now: float) -> None:
        self._repository.set_here(session, devices, until=now + STAYS, besides=(now + HERE, now + STAYS))

    def took(self, session: Session, device: str) -> None:
        self._repository.set_here(session, [device], until=0.0)

    def left(self, device: str) -> None:
        with self._repository.begin() as session:
            self._repository.set_here(session, [device], until=0.0)

    def waiting(self, device: str) -> AbstractContextManager[None]:
        return nullcontext()

    def here(self, session: Session, now: float) -> Sequence[str]:
        return self._repository.here(session, now)
