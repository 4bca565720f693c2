"""The directory: bundles, versions of weights, bodies on their way in.

    bundles/SHA256/...                     as exported, by the hash of the manifest
    jobs/JOB/versions/N.safetensors        the weights after N rounds
    jobs/JOB/versions/N.state              the vectors of the server's state then, if the algorithm has any
    jobs/JOB/versions/N.evaluated          a second name for them while they wait for their score
    spool/TASK.ID.part                     a body that is arriving; one may arrive twice at once
    spool/TASK.SHA256.body                 a body that has arrived and is sound

A file appears under its final name only when it is whole and on the disk.
"""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.credentials import new_id
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

    def state(self, job: str, number: int) -> Path:
        return self.version(job, number).with_suffix(".state")

    def arriving(self, task: str) -> Path:
        """A new place for every attempt."""
        return self.root / "spool" / f"{_safe(task)}.{new_id()}.part"

    def arrived(self, task: str, sha256: str) -> Path:
        return self.root / "spool" / f"{_safe(task)}.{_safe(sha256)}.body"

    def spooled(self) -> set[Path]:
        """Every body that has arrived."""
        return set((self.root / "spool").glob("*.body"))

    def unscored(self, job: str, number: int) -> Path:
        """The name that a version has while it waits to be evaluated."""
        return self.version(job, number).with_suffix(".evaluated")

    def versions(self, job: str) -> list[int]:
        """Those whose weights are here, under either name."""
        found = self.version(job, 0).parent.glob("*")
        return sorted({int(p.stem) for p in found if p.suffix in (".safetensors", ".evaluated") and p.stem.isdigit()})

    def forget_arriving(self) -> None:
        """Remove bodies that were cut off by a restart: their devices send them again."""
        for path in (self.root / "spool").glob("*.part"):
            path.unlink(missing_ok=True)


def _safe(name: str) -> str:
    if not _SAFE.fullmatch(name) or name.startswith("."):
        raise InputError(f"{name!r} cannot be part of a path")
    return name
