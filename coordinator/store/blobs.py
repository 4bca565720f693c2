"""Keep bytes by key: bundles, versions of weights, bodies of updates. Here in a directory, one file for each key.

bundles/SHA256/...                     as exported, by the hash of the manifest
jobs/JOB/versions/N.safetensors        the weights after N rounds
jobs/JOB/versions/N.state              the vectors of the server's state then, if the algorithm has any
jobs/JOB/versions/N.sums               the sums that version N was made of (sums.py)
jobs/JOB/versions/N.evaluated          a second key of the weights while they wait for their score
jobs/JOB/versions/N.best               ... and of those that are the best so far
data/SHA256.safetensors                uploaded samples that versions are scored on
spool/TASK.SHA256.body                 the body of an update that has arrived and is sound
spool/JOB-ROUND-sum.SECRET.sums        a partial sum, where processes share the database (sums.py)
... .draft, ... .part                  what is being written; a body may arrive twice at once
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from edge_runtime.files import flush_folder, make_folder, publish, publish_folder, remove, rename_flushed
from federation.errors import InputError

FOLDERS = ("bundles", "data", "jobs", "spool")
AT_THE_DISK = 8  # threads that wait for it
_SAFE = re.compile(r"[A-Za-z0-9_.@-]{1,120}")


class Blobs(Protocol):
    """Bytes by key. A blob is there as a whole or not at all, and what is committed survives a loss of power."""

    def draft(self, key: str, suffix: str = ".draft") -> Path:
        """Return the local file (or folder) to write a blob to before it has its key."""

    def commit(self, draft: Path, key: str) -> None:
        """Give a draft its key, in place of what has that key already."""

    def commit_all(self, drafts: Sequence[tuple[Path, str]]) -> list[OSError | None]:
        """Commit several drafts of one folder, which share the wait; for each, None or why it was not possible."""

    def file(self, key: str) -> Path:
        """Return a local file (or folder) with the bytes of a blob, to be read."""

    def link(self, key: str, other: str) -> None:
        """Give a blob a second key."""

    def delete(self, *keys: str) -> None:
        """Remove blobs, with everything below their keys; those that are not there are no error."""

    def size(self, *keys: str) -> int:
        """Count the bytes of blobs and of everything below their keys; what has two keys counts once."""

    def list(self, folder: str) -> list[str]:
        """List the keys directly below a folder."""

    def share(self, draft: str) -> None:
        """Let other processes see a file of a draft that is a folder; `draft` is its place, as a key."""

    def gather(self, draft: str) -> Path:
        """Return a draft that is a folder, with the files that other processes shared."""

    def drop(self, *keys: str) -> None:
        """Let go of local copies of blobs that this process does not need."""

    def drop_deleted(self) -> None:
        """Let go of local copies of blobs that other processes have deleted."""

    def remove_unnamed(self, before: float) -> int:
        """Remove bytes older than a time that no key names: their writer was killed. Return how many there were."""

    def download_url(self, key: str) -> str | None:
        """Sign a URL from which a device can read a blob that is one file; None if it has to ask the coordinator."""

    def upload_url(self, key: str, size: int) -> str | None:
        """Sign a URL to which a device can write so many bytes, which `take_upload` makes a blob; None likewise."""

    @property
    def has_uploads(self) -> bool:
        """Whether devices can upload."""

    def uploads(self, folder: str) -> Sequence[str]:
        """List the keys below a folder that devices have uploaded to, and that were not taken."""

    def take_upload(self, key: str, size: int, sha256: str) -> None:
        """Make what a device has uploaded a blob; WireError if it is not there, or not what the device said."""

    def close(self) -> None:
        """End what waits for the disk."""


class DirectoryBlobs:
    """Blobs in a directory of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._disk = ThreadPoolExecutor(AT_THE_DISK, "disk")
        for folder in FOLDERS:
            make_folder(root / folder)

    def draft(self, key: str, suffix: str = ".draft") -> Path:
        return self.root / f"{key}{suffix}"

    def commit(self, draft: Path, key: str) -> None:
        if draft.is_dir():
            publish_folder(draft, self.root / key)
        else:
            publish(draft, self.root / key)

    def commit_all(self, drafts: Sequence[tuple[Path, str]]) -> list[OSError | None]:
        answers = list(self._disk.map(self._rename, drafts))
        flush_folder((self.root / drafts[0][1]).parent)
        return answers

    def _rename(self, pair: tuple[Path, str]) -> OSError | None:
        try:
            rename_flushed(pair[0], self.root / pair[1])
        except OSError as error:
            return error
        return None

    def file(self, key: str) -> Path:
        return self.root / key

    def link(self, key: str, other: str) -> None:
        if not (self.root / other).exists():
            (self.root / other).hardlink_to(self.root / key)

    def delete(self, *keys: str) -> None:
        for path in (self.root / key for key in keys):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                remove(path)

    def size(self, *keys: str) -> int:
        paths = [path for key in keys for path in (self.root / key, *(self.root / key).rglob("*")) if path.is_file()]
        return sum({(facts.st_dev, facts.st_ino): facts.st_size for facts in map(Path.stat, paths)}.values())

    def list(self, folder: str) -> list[str]:
        return [f"{folder}/{path.name}" for path in (self.root / folder).glob("*")]

    def share(self, draft: str) -> None:
        """Nothing to do: the directory is theirs, too."""

    def gather(self, draft: str) -> Path:
        return self.root / draft

    def drop(self, *keys: str) -> None:
        """Nothing to do: there are no copies."""

    def drop_deleted(self) -> None:
        """Nothing to do: there are no copies."""

    def remove_unnamed(self, before: float) -> int:
        """Nothing to do: a file has its key as its name."""
        return 0

    def download_url(self, key: str) -> str | None:
        return None

    def upload_url(self, key: str, size: int) -> str | None:
        return None

    @property
    def has_uploads(self) -> bool:
        return False

    def uploads(self, folder: str) -> Sequence[str]:
        return []

    def take_upload(self, key: str, size: int, sha256: str) -> None:
        """Nothing to do: what is there was committed."""

    def close(self) -> None:
        self._disk.shutdown()


def safe(name: str) -> str:
    """Check that a name can be part of a key, which becomes a path."""
    if not _SAFE.fullmatch(name) or name.startswith("."):
        raise InputError(f"{name!r} cannot be part of a path")
    return name
