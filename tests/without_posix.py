"""Run `embrace` as on a system without POSIX: `python -m tests.without_posix serve ...`.

Modules and functions that Windows lacks are gone; a file that this process has open or mapped can be neither removed
nor replaced; what is asked of Windows itself (system.py) is answered by stand-ins.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edge_runtime import system

MISSING_MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
MISSING_FUNCTIONS = ("O_DIRECTORY", "fork", "posix_fallocate", "sched_getaffinity", "sysconf", "getuid", "fchmod")
MISSING_FUNCTIONS += ("getloadavg", "killpg", "setsid", "getpgid", "nice", "mkfifo")


def locking(descriptor: int, mode: int, size: int) -> None:
    """Lock bytes from where the file stands on, as msvcrt does: PermissionError if another process has them."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, size, 0, os.SEEK_CUR)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


class Kernel32:
    """Answer in the layouts that Microsoft documents for 64 bits, written down here once more, independently."""

    def __init__(self, working_set: int, peak: int, private: int, physical: int, page_file: int) -> None:
        self.counters = struct.pack("<II9Q", 80, 0, peak, working_set, 0, 0, 0, 0, private, private, private)
        self.status = struct.pack("<II7Q", 64, 50, 1 << 35, physical, 1 << 36, page_file, 0, 0, 0)

    def K32GetProcessMemoryInfo(self, process: ctypes.c_void_p, answer: Any, size: int) -> int:
        assert (process.value, size) == (2**64 - 1, len(self.counters))
        ctypes.memmove(answer, self.counters, size)
        return 1

    def GlobalMemoryStatusEx(self, answer: Any) -> int:
        assert ctypes.string_at(answer, 4) == struct.pack("<I", len(self.status))
        ctypes.memmove(answer, self.status, len(self.status))
        return 1


def windows(*memory: int) -> system.Windows:
    """Make a Windows whose locks are real, and which has this much memory."""
    made = system.Windows(Kernel32(*memory), SimpleNamespace(LK_NBLCK=2, locking=locking))
    made.own_group = {}  # POSIX refuses creation flags
    return made


def in_use(path: Any) -> bool:
    """Whether this process has a file open or mapped."""
    wanted = os.path.realpath(path)
    if not os.path.isfile(wanted):
        return False
    opened = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return any(os.path.realpath(one) == wanted for one in opened) or any(line.endswith(wanted) for line in mapped)


def guarded(call: Callable[..., None], which: int) -> Callable[..., None]:
    """Refuse a call whose argument number `which` is a file in use."""

    def checked(*paths: Any, **more: Any) -> None:
        for path in paths[: which + 1]:
            if in_use(path):
                raise PermissionError(13, "The process cannot access the file because it is being used", str(path))
        call(*paths, **more)

    return checked


def forget_posix() -> None:
    """Take away what Windows lacks, from the processes of a demo, too."""
    from embrace.demo import processes

    system.HERE = windows(60 << 20, 70 << 20, 50 << 20, 4 << 30, 8 << 30)
    for name in MISSING_FUNCTIONS:
        delattr(os, name)
    os.unlink = guarded(os.unlink, 0)
    os.remove = guarded(os.remove, 0)
    os.replace = guarded(os.replace, 1)
    os.rename = guarded(os.rename, 1)
    from edge_runtime import memory

    for name in ("_STATUS", "_STATM", "_CLEAR"):
        setattr(memory, name, Path("no/proc/here"))
    processes.PROGRAM = f"from tests.without_posix import forget_posix; forget_posix(); {processes.PROGRAM}"
    sys.modules.update(dict.fromkeys(MISSING_MODULES))


if __name__ == "__main__":
    from embrace.cli.main import main

    forget_posix()
    main()
