"""Find out whether Flower can be compared with: an interpreter that has it, and `bench.flower` beside this file."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

from federation.errors import EmbraceError


class FlowerMissing(EmbraceError):
    """Flower cannot be measured here; the message says why."""


def flower_version(python: Path | None) -> str:
    """Find the version of flwr that an interpreter has."""
    if find_spec("bench.flower") is None:
        raise FlowerMissing("an installed embrace cannot; run the command in a clone of the project")
    if python is None:
        raise FlowerMissing("install flwr in an environment of its own and give --flower-python ITS/bin/python")
    program = "from importlib.metadata import version; print(version('flwr'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FlowerMissing(f"{python} does not run: {error}") from None
    if done.returncode:
        raise FlowerMissing(f"{python} has no package flwr")
    return done.stdout.strip()


def has_flower(python: Path | None, notes: list[str]) -> bool:
    """Tell whether Flower can be compared with; if not, a note says why."""
    try:
        flower_version(python)
    except FlowerMissing as error:
        notes.append(f"Flower is not compared with: {error}")
        return False
    return True
