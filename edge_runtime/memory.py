"""What memory this process has taken, as the kernel counts it, and what it may take.

Anonymous memory is what a process makes and only it has; file-backed memory (code, mapped weights) the kernel can drop
and read again. A budget is about the former. Here is how Linux counts; how macOS and Windows do, system.py knows.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from edge_runtime.system import BY_THE_MACHINE, HERE

_STATUS, _STATM, _CLEAR = Path("/proc/self/status"), Path("/proc/self/statm"), Path("/proc/self/clear_refs")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_INTERVAL = 0.001


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    resident: int
    anonymous: int
    file_backed: int
    peak: int  # of what was resident


def current_memory() -> Memory | None:
    """Measure what the process has now; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        resident, anonymous, files, shared, peak = (
            int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM")
        )
    except (OSError, KeyError):
        found = HERE.memory()
        return Memory(*found) if found else None
    return Memory(resident, anonymous, files + shared, peak)


@dataclass(frozen=True)
class Peak:
    """The most that was taken while something ran, in bytes on top of what was there before."""

    anonymous: int
    file_backed: int
    total: int  # of both together: their own peaks need not fall on the same moment


class PeakMeter:
    """Measures while it is entered: the kernel's own peak, and the two kinds apart by looking every millisecond.

    The kernel keeps a peak of the sum only. What lives for less than a millisecond can escape the look, not the sum.
    """

    def __init__(self, baseline: Memory | None = None) -> None:
        """`baseline`: what counts as there before; None: what is there when it is entered."""
        self.peak: Peak | None = None
        self.before = baseline
        self._resets = False  # whether the kernel's peak starts anew
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory", daemon=True)
        self._most = [0, 0]

    def __enter__(self) -> PeakMeter:
        # The peak starts anew from what is resident now; where it cannot, it is that of the whole process, never less.
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
            self._resets = True
        self.before = self.before or current_memory()
        if self.before is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.before is None:
            return
        self._stop.set()
        self._thread.join()
        self._take()
        after = current_memory()
        assert after is not None
        most = self._most[0]
        if self._resets:  # of the kernel's peak, files can have been no more than now
            most = max(most, after.peak - max(after.file_backed, self._most[1]))
        self.peak = Peak(
            anonymous=max(0, most - self.before.anonymous),
            file_backed=max(0, self._most[1] - self.before.file_backed),
            total=max(0, after.peak - self.before.resident),
        )

    def report(self, allowed: int | None = None) -> dict[str, int]:
        """Return the peak as reports have it: on top of the idle process, and of the whole process."""
        if self.peak is None or self.before is None:
            return {}
        whole = {"process": self.before.anonymous + self.peak.anonymous}
        return {**asdict(self.peak), **whole, **({} if allowed is None else {"allowed": allowed})}

    def _look(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._take()

    def _take(self) -> None:
        self._most = [max(known, found) for known, found in zip(self._most, _both_kinds())]


def anonymous_memory() -> int:
    """Measure the anonymous bytes of this process quickly."""
    return _both_kinds()[0]


def _both_kinds() -> tuple[int, int]:
    """Measure (anonymous, file-backed) memory, as quickly as the system can tell; zeros where it does not."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text().split())
        return (resident - shared) * _PAGE, shared * _PAGE
    except OSError:
        found = HERE.memory()
        return (found.anonymous, found.file_backed) if found else (0, 0)


def available_memory() -> tuple[int, str] | None:
    """Find (bytes this process may still take, where that is written): the control group's or the machine's rest."""
    found = [limit for limit in (_machine_rest(), *_group_rests()) if limit is not None]
    return min(found) if found else None


def _machine_rest() -> tuple[int, str] | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, BY_THE_MACHINE
    except OSError:
        pass
    return HERE.free_memory()


def _group_rests() -> list[tuple[int, str] | None]:
    """Read what control groups leave, version 2 (this process's group and those above) and version 1."""
    root = Path("/sys/fs/cgroup")
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in own:
        if not controllers:
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    found.append(_rest(folder / "memory.max", folder / "memory.current"))
        elif "memory" in controllers.split(","):
            for folder in (root / "memory" / path.lstrip("/"), root / "memory"):
                found.append(_rest(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"))
    return found


def _rest(limit: Path, usage: Path) -> tuple[int, str] | None:
    try:
        most, used = limit.read_text().strip(), int(usage.read_text())
        return (max(0, int(most) - used), "limit of the control group") if most != "max" else None
    except (OSError, ValueError):
        return None
