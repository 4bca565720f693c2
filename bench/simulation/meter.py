"""What the rounds of a simulation take, for every contestant of `embrace bench simulate` alike.

Rounds begin and end where the contestant says so. The first does not count for time: processes start in it, models are
built, data is read. Its memory does, and is looked at all the time; later rounds are left alone until they are over.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from bench.processes import family_cpu, family_memory

EVERY = 0.2  # seconds between looks at the memory


@dataclass
class Meter:
    """Measure this process and all that it started."""

    seconds: list[float] = field(default_factory=list)  # of each round but the first
    cpu: list[float] = field(default_factory=list)  # processor seconds
    memory: int = 0  # bytes, the most that was seen
    _began: tuple[float, float] | None = None
    _watch: _Watch | None = None

    def round(self) -> None:
        """Begin a round, and end the one before."""
        first = self._began is None
        self.end()
        self._watch = _Watch() if first else None
        self._began = family_cpu(os.getpid(), without_root=True) + time.process_time(), time.perf_counter()

    def end(self) -> None:
        """End the last round."""
        if self._began is None:
            return
        seconds, own = time.perf_counter() - self._began[1], time.process_time()  # before it is spent on looking
        cpu = family_cpu(os.getpid(), without_root=True) + own - self._began[0]
        if self._watch is not None:
            self.memory = self._watch.stop()
        else:
            self.seconds.append(seconds)
            self.cpu.append(cpu)
        self.memory = max(self.memory, family_memory(os.getpid()) or 0)


class _Watch:
    """Sample the memory and keep the largest."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(EVERY):
            self.most = max(self.most, family_memory(os.getpid()) or 0)

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most
