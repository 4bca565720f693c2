"""A process and all that it started: their processor time and their memory, from /proc where there is one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def family(root: int) -> set[int]:
    """Find a process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def family_memory(root: int) -> int | None:
    """Add up the bytes of all processes; what several share counts once (proportional set size)."""
    total = 0
    for pid in family(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total or None


def family_cpu(root: int, *, without_root: bool = False) -> float:
    """Add up the processor seconds of all processes so far, those that ended included."""
    total = 0
    for pid in family(root) - ({root} if without_root else set()):
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0
