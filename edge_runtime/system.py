"""What operating systems do differently, a class for each; `HERE` is the one that this process runs on.

Linux, macOS and Windows differ in locks, in what may happen to a file that is open, in how a folder is flushed and how
blocks are given back, in the limit of open files, in groups of processes, and in how they count memory. Other modules
ask `HERE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_TASK_VM_INFO = 22  # of task_info
_LOCKED_BYTE = 1 << 30  # far behind the content: on Windows the bytes of a lock cannot be read
_NEW_PROCESS_GROUP = 0x200  # of CreateProcess
BY_THE_MACHINE = "free memory of the machine"


class ProcessMemory(NamedTuple):
    """Bytes of this process."""

    resident: int
    anonymous: int
    file_backed: int
    peak: int  # of what was resident


class System(Protocol):
    """What is asked of an operating system."""

    removes_open_files: bool  # also those that are mapped; and they can be replaced
    own_group: Mapping[str, Any]  # options of Popen: Ctrl-C is for this process, which ends the new one in its order

    def end_group(self, process: int) -> None:
        """End a process that was started with `own_group`, and all that it started."""

    def lock(self, descriptor: int) -> bool:
        """Lock an open file until it is closed; False if another process has it, OSError if there are no locks."""

    def flush_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk, where that can be asked for."""

    def punch_hole(self, descriptor: int, offset: int, length: int) -> None:
        """Give blocks of a file back to the disk, where the system can; they read as zeros or as before."""

    def allow_open_files(self, wanted: int) -> int | None:
        """Raise the limit of open files as far as the system lets us, and return it; None where there is none."""

    def memory(self) -> ProcessMemory | None:
        """Measure this process; None where other ways are better (Linux: /proc)."""

    def free_memory(self) -> tuple[int, str] | None:
        """Find (bytes that may still be taken, where that is written); None where other ways are better."""


class Linux:
    """Linux, Android too. Memory is read from /proc (memory.py)."""

    removes_open_files = True
    own_group: Mapping[str, Any] = MappingProxyType({"start_new_session": True})

    def __init__(self, libc: Any = None) -> None:
        self.libc = libc or ctypes.CDLL(None, use_errno=True)

    def end_group(self, process: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    def lock(self, descriptor: int) -> bool:
        fcntl = import_module("fcntl")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def flush_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def punch_hole(self, descriptor: int, offset: int, length: int) -> None:
        call = getattr(self.libc, "fallocate64", None)
        if call is not None and length:
            call(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length))

    def allow_open_files(self, wanted: int) -> int | None:
        resource = import_module("resource")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if now == resource.RLIM_INFINITY else int(now)

    def memory(self) -> ProcessMemory | None:
        return None

    def free_memory(self) -> tuple[int, str] | None:
        return None


class _TaskVmInfo(ctypes.Structure):
    """task_vm_info of <mach/task_info.h>, to its first revision."""

    _fields_ = (
        ("virtual_size", ctypes.c_uint64),
        ("region_count", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("resident_size", "resident_size_peak", "device", "device_peak")),
        *((name, ctypes.c_uint64) for name in ("internal", "internal_peak", "external", "external_peak")),
        *((name, ctypes.c_uint64) for name in ("reusable", "reusable_peak", "purgeable_volatile_pmap")),
        *((name, ctypes.c_uint64) for name in ("purgeable_volatile_resident", "purgeable_volatile_virtual")),
        *((name, ctypes.c_uint64) for name in ("compressed", "compressed_peak", "compressed_lifetime")),
        ("phys_footprint", ctypes.c_uint64),
    )


class MacOS(Linux):
    """As Linux, but for holes and memory: the kernel's task_info, and `vm_stat` for the machine."""

    def punch_hole(self, descriptor: int, offset: int, length: int) -> None:
        """Do nothing: the blocks stay until the next version is written over them."""

    def memory(self) -> ProcessMemory | None:
        found = _TaskVmInfo()
        count = ctypes.c_uint32(ctypes.sizeof(found) // 4)
        task = self.libc.mach_task_self()
        if self.libc.task_info(task, _TASK_VM_INFO, ctypes.byref(found), ctypes.byref(count)):
            return None
        anonymous = found.internal + found.compressed
        return ProcessMemory(found.resident_size, anonymous, found.external, found.resident_size_peak)

    def free_memory(self) -> tuple[int, str] | None:
        try:
            said = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=10, check=True).stdout
            head, *lines = said.splitlines()
            pages = {name.strip(): int(value.strip(" .")) for name, _, value in (one.partition(":") for one in lines)}
            free = sum(pages[f"Pages {kind}"] for kind in ("free", "inactive", "speculative"))
            return free * int(head.split("page size of ")[1].split()[0]), BY_THE_MACHINE
        except (OSError, subprocess.SubprocessError, LookupError, ValueError):
            return None


class _ProcessMemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS_EX of <psapi.h>."""

    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("PageFaultCount", ctypes.c_uint32),
        *((name, ctypes.c_size_t) for name in ("PeakWorkingSetSize", "WorkingSetSize")),
        *((name, ctypes.c_size_t) for name in ("QuotaPeakPagedPoolUsage", "QuotaPagedPoolUsage")),
        *((name, ctypes.c_size_t) for name in ("QuotaPeakNonPagedPoolUsage", "QuotaNonPagedPoolUsage")),
        *((name, ctypes.c_size_t) for name in ("PagefileUsage", "PeakPagefileUsage", "PrivateUsage")),
    )


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of <sysinfoapi.h>."""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        *((f"ull{name}", ctypes.c_uint64) for name in ("TotalPhys", "AvailPhys", "TotalPageFile", "AvailPageFile")),
        *((f"ull{name}", ctypes.c_uint64) for name in ("TotalVirtual", "AvailVirtual", "AvailExtendedVirtual")),
    )


class Windows:
    """A folder cannot be flushed there, and what is open or mapped can be neither removed nor replaced."""

    removes_open_files = False
    own_group: Mapping[str, Any] = MappingProxyType({"creationflags": _NEW_PROCESS_GROUP})

    def __init__(self, kernel32: Any = None, msvcrt: Any = None) -> None:
        self.kernel32 = kernel32 or ctypes.CDLL("kernel32")
        self.msvcrt = msvcrt or import_module("msvcrt")

    def end_group(self, process: int) -> None:
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process)], capture_output=True, check=False)

    def lock(self, descriptor: int) -> bool:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            self.msvcrt.locking(descriptor, self.msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def flush_folder(self, folder: Path) -> None:
        """Do nothing: NTFS writes names to its journal."""

    def punch_hole(self, descriptor: int, offset: int, length: int) -> None:
        """Do nothing: the blocks stay until the next version is written over them."""

    def allow_open_files(self, wanted: int) -> int | None:
        """Do nothing: handles and sockets have no such limit there."""
        return None

    def memory(self) -> ProcessMemory | None:
        found = _ProcessMemoryCounters()
        this_process = ctypes.c_void_p(-1)
        if not self.kernel32.K32GetProcessMemoryInfo(this_process, ctypes.byref(found), ctypes.sizeof(found)):
            return None
        resident, private = found.WorkingSetSize, found.PrivateUsage
        return ProcessMemory(resident, private, max(0, resident - private), found.PeakWorkingSetSize)

    def free_memory(self) -> tuple[int, str] | None:
        found = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
        if not self.kernel32.GlobalMemoryStatusEx(ctypes.byref(found)):
            return None
        return min(found.ullAvailPhys, found.ullAvailPageFile), BY_THE_MACHINE


def this_system(platform: str = sys.platform) -> System:
    """Choose the class by `sys.platform`; what is none of the three counts as Linux."""
    if platform == "win32":
        return Windows()
    return MacOS() if platform == "darwin" else Linux()


HERE: System = this_system()
