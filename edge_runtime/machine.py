"""What a measurement was made on, in words that identify the kind of machine and not the machine."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Packages that decide how fast a step is; onnxruntime comes as one of two distributions.
PACKAGES = ("onnxruntime", "onnxruntime-training-cpu", "numpy", "torch")


def describe_device() -> dict[str, str]:
    """Describe processor, cores, memory, system and versions; what the system does not say is left out."""
    found = {
        "processor": _processor(),
        "cores": str(core_count()),
        "memory": _memory(),
        "system": f"{_system()} ({platform.machine()})",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    return {key: value for key, value in found.items() if value}


def _processor() -> str:
    """Name the board on small computers, which says more than their processor; else the processor."""
    board = _read("/proc/device-tree/model").strip("\0 \n")
    lines = [line.partition(":") for line in _read("/proc/cpuinfo").splitlines()]
    named = {key.strip(): value.strip() for key, _, value in lines}
    found = board or named.get("model name") or named.get("Hardware")
    return found or _said("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def core_count() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float:
    """Return how many processes wanted to run in the last minute; not a number where the system does not say so."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    except (AttributeError, OSError, ValueError):
        return ""


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _said(*command: str) -> str:
    """Return what a program prints; nothing where there is no such program, or it fails (sysctl is macOS's)."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
