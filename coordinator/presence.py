"""Which devices are there. A device that waits in a request is; one that went away in the middle of it is not, nor is
one that took a task and has not come back from it. A device that was told to come back is away: it counts for the size
of the fleet until shortly after its time, and is drawn for a round only when it has come.

A single process keeps this in memory: after a restart a device counts as there for as long as the database saw it
lately, and as away if the database says so. Processes that share a database keep it there: a device waits in one of
them, and another draws the cohort.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from sqlalchemy.orm import Session

from coordinator.store.repository import Repository

HERE = 15.0  # seconds after the last word of a device that does not wait in a request
STAYS = HERE + 5.0  # the same where processes share a database: a device that waits comes again after 15 seconds
PRESENCE = 60.0  # seconds after which a device that was not heard of counts as gone
LATE = 10.0  # seconds that a device which was told to come back may be late
EARLY = 1.0  # ... or early: clocks differ
COUNTED = 1.0  # seconds for which the fleet of several processes is not counted again
MOST_KNOWN = 1 << 20


class Presence(Protocol):
    """Know the devices that would come for a task. Thread-safe."""

    def recall(self, session: Session, now: float) -> None:
        """Learn which devices the database saw lately, when the process begins."""

    def came(self, session: Session, devices: Sequence[str], now: float) -> set[str]:
        """Note that devices ask for a task; return those that were told to come later."""

    def answered(self, session: Session, devices: Sequence[str], now: float) -> None:
        """Note that devices have answered a task."""

    def took(self, session: Session, devices: Sequence[str]) -> None:
        """Note that devices have a task: until one comes back there is no use in another for it."""

    def left(self, device: str) -> None:
        """Note that a device hung up or did not come for a task: it is gone unless a request of its waits."""

    def sent_away(self, session: Session, devices: Mapping[str, float], now: float) -> None:
        """Note in how many seconds devices come back."""

    def waiting(self, device: str) -> AbstractContextManager[None]:
        """Count a device as there while the block runs, in which it comes again and again."""

    def here(self, session: Session, now: float) -> Sequence[str]:
        """List the devices that would come for a task."""

    def counts(self, session: Session, now: float) -> tuple[int, int]:
        """Count the devices that would come for a task, and those that are away."""

    def away_among(self, session: Session, devices: Collection[str], now: float) -> set[str]:
        """Find those of some devices that are away."""


class OwnPresence:
    """What devices last did, as this process, the only one, has seen it."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        self._heard: set[str] = set()  # devices that this process knows more of than the database
        self._here: dict[str, float] = {}  # that were heard of lately -> until when they count as there
        self._away: dict[str, float] = {}  # that were told to come back -> until when they count as away
        self._oldest_away = math.inf  # none of these times is before it
        self._working: set[str] = set()
        self._waiting: Counter[str] = Counter()

    def recall(self, session: Session, now: float) -> None:
        away, lately = self._repository.away(session, now), self._repository.present(session, now - PRESENCE)
        with self._lock:
            self._away = dict(away)
            self._oldest_away = min(self._away.values(), default=math.inf)
            self._here = {device: at + PRESENCE for device, at in lately if device not in self._away}
            self._heard = {*self._here, *self._away}

    def came(self, session: Session, devices: Sequence[str], now: float) -> set[str]:
        with self._lock:
            if len(self._heard) > MOST_KNOWN:
                self._forget()
            early = {device for device in devices if self._away.pop(device, now) > now + LATE + EARLY}
            self._heard.update(devices)
            self._here.update(dict.fromkeys(devices, now + HERE))
            self._working.difference_update(devices)
            return early

    def answered(self, session: Session, devices: Sequence[str], now: float) -> None:
        self.came(session, devices, now)

    def _forget(self) -> None:
        self._heard.clear()
        self._here.clear()
        self._away.clear()
        self._working.clear()

    def took(self, session: Session, devices: Sequence[str]) -> None:
        with self._lock:
            self._working.update(devices)

    def left(self, device: str) -> None:
        with self._lock:
            self._heard.add(device)
            self._here.pop(device, None)
            self._away.pop(device, None)

    def sent_away(self, session: Session, devices: Mapping[str, float], now: float) -> None:
        until = {device: now + seconds + LATE for device, seconds in devices.items()}
        self._repository.set_away(session, until)
        with self._lock:
            self._heard.update(until)
            self._away.update(until)
            self._oldest_away = min(self._oldest_away, *until.values())
            for device in until:
                self._here.pop(device, None)

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
        """List those that this process heard of; one that has just enrolled has the benefit of the doubt."""
        enrolled = self._repository.here(session, now)
        with self._lock:
            return [*self._known(now), *(device for device in enrolled if device not in self._heard)]

    def counts(self, session: Session, now: float) -> tuple[int, int]:
        with self._lock:
            here = len(self._known(now))
            if self._oldest_away < now:
                self._away = {device: until for device, until in self._away.items() if until >= now}
                self._oldest_away = min(self._away.values(), default=math.inf)
            return here, len(self._away)

    def away_among(self, session: Session, devices: Collection[str], now: float) -> set[str]:
        with self._lock:
            return {device for device in devices if self._away.get(device, -math.inf) >= now}

    def _known(self, now: float) -> set[str]:
        """Find the devices that are there and that this process has heard of."""
        self._here = {device: until for device, until in self._here.items() if until >= now}
        return (self._here.keys() | self._waiting.keys()) - self._working - self._away.keys()


class SharedPresence:
    """The same in the rows of devices, for all processes. Only what is new is written."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        self._counted_at = 0.0
        self._counts = (0, 0)

    def recall(self, session: Session, now: float) -> None:
        """Learn nothing: the rows are read when they are needed."""

    def came(self, session: Session, devices: Sequence[str], now: float) -> set[str]:
        early = {device for device, _ in self._repository.away(session, now + LATE + EARLY, among=devices)}
        self.answered(session, devices, now)
        return early

    def answered(self, session: Session, devices: Sequence[str], now: float) -> None:
        self._repository.set_here(session, devices, until=now + STAYS, besides=(now + HERE, now + STAYS))

    def took(self, session: Session, devices: Sequence[str]) -> None:
        self._repository.set_here(session, devices, until=0.0)

    def left(self, device: str) -> None:
        with self._repository.begin() as session:
            self._repository.set_here(session, [device], until=0.0)

    def sent_away(self, session: Session, devices: Mapping[str, float], now: float) -> None:
        self._repository.set_away(session, {device: now + seconds + LATE for device, seconds in devices.items()})

    def waiting(self, device: str) -> AbstractContextManager[None]:
        return nullcontext()

    def here(self, session: Session, now: float) -> Sequence[str]:
        return self._repository.here(session, now)

    def counts(self, session: Session, now: float) -> tuple[int, int]:
        """Count the rows; not at every request of a large fleet."""
        with self._lock:
            if not 0 <= now - self._counted_at < COUNTED:
                self._counts = self._repository.count_there(session, now)
                self._counted_at = now
            return self._counts

    def away_among(self, session: Session, devices: Collection[str], now: float) -> set[str]:
        return {device for device, _ in self._repository.away(session, now, among=devices)}
