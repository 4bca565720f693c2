"""The directory: bundles, versions of weights, bodies on their way in.

    bundles/SHA256/...                     as exported, by the hash of the manifest
    jobs/JOB/versions/N.safetensors        the weights after N rounds
    spool/TASK.part                        a body that is arriving
    spool/TASK.body                        a body that has arrived and is sound

A file appears under its final name only when it is whole and on the disk.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from federation.errors import InputError

_SAFE = re.compile(r"[A-Za-z0-9_.@-]{1,120}")


class Files:
    """Paths, and the few operations that have to reach the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bundles", "jobs", "spool"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def bundle(self, digest: str) -> Path:
        return self.root / "bundles" / _safe(digest)

    def version(self, job: str, number: int) -> Path:
        return self.root / "jobs" / _safe(job) / "versions" / f"{number}.safetensors"

    def arriving(self, task: str) -> Path:
        return self.root / "spool" / f"{_safe(task)}.part"

    def arrived(self, task: str) -> Path:
        return self.root / "spool" / f"{_safe(task)}.body"

    def spooled(self) -> dict[str, Path]:
        """Every body that has arrived, by its task."""
        return {path.stem: path for path in (self.root / "spool").glob("*.body")}

    def forget_arriving(self) -> None:
        """After a restart nobody goes on with a body that was cut off: it is sent again."""
        for path in (self.root / "spool").glob("*.part"):
            path.unlink(missing_ok=True)


def publish(draft: Path, final: Path) -> None:
    """Give a written file its name, so that both survive a loss of power."""
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    draft.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _safe(name: str) -> str:
    if not _SAFE.fullmatch(name) or name.startswith("."):
        raise InputError(f"{name!r} cannot be part of a path")
    return name
