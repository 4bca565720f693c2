"""Which devices are there. A device that waits in a request is; one that went away in the middle of it is not, nor is
one that took a task and has not come back from it.

Kept in memory alone: after a restart a device counts as there for as long as the database saw it lately.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

HERE = 15.0  # seconds after the last word of a device that does not wait in a request
MOST_KNOWN = 1 << 20


class Presence:
    """When devices last came, which of them wait, and which are at work. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        self._working: set[str] = set()
        self._waiting: Counter[str] = Counter()

    def came(self, devices: Iterable[str], now: float) -> None:
        """Note that devices ask for a task, or have answered one."""
        with self._lock:
            if len(self._heard) > MOST_KNOWN:
                self._heard.clear()
                self._working.clear()
            self._heard.update(dict.fromkeys(devices, now))
            self._working.difference_update(devices)

    def took(self, device: str) -> None:
        """Note that a device has a task: until it comes back there is no use in another for it."""
        with self._lock:
            self._working.add(device)

    def left(self, device: str) -> None:
        """Note that a device hung up or did not come for a task: it is gone unless a request of its waits."""
        with self._lock:
            self._heard[device] = float("-inf")

    @contextmanager
    def waiting(self, device: str) -> Iterator[None]:
        """Count a device as there while the block runs."""
        with self._lock:
            self._waiting[device] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[device] -= 1
                if self._waiting[device] <= 0:
                    del self._waiting[device]

    def among(self, devices: Iterable[str], now: float) -> list[str]:
        """List those that would come for a task; one that was never heard of is given the benefit of the doubt."""
        with self._lock:
            heard, waiting = self._heard, self._waiting
            there = (device for device in devices if device not in self._working)
            return [device for device in there if device in waiting or now - heard.get(device, now) <= HERE]
