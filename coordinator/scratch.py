"""Temporary folders: a process removes its own when it ends, and those that killed ones left behind when it starts."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_runtime.files import sole_user
from federation.errors import InputError

_LOCK = "lock"  # of the process that uses a folder; a kill gives it back
_YOUNG = 60.0  # seconds in which a folder may have a lock that its process is about to take


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Make a folder that is removed when the block ends; of the same kind, what dead processes left goes now."""
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}-*"):
        with suppress(InputError, OSError):  # its process is at work, or another has removed it
            if _may_be_left(folder):
                with sole_user(folder / _LOCK, "in use"):
                    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{kind}-") as made, sole_user(Path(made) / _LOCK, f"{made} is in use"):
        yield Path(made)


def _may_be_left(folder: Path) -> bool:
    """Whether a folder has a lock, and is not new."""
    lock = folder / _LOCK
    return not folder.is_symlink() and lock.is_file() and time.time() - lock.stat().st_mtime > _YOUNG
