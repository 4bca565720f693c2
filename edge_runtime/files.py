"""Write files that survive a crash, and keep other processes out of a place.

A file is written beside its name, flushed to the disk and renamed; then its folder is flushed, because the rename is a
change of the folder. After a crash there is the old file or the new one, whole. Windows can neither flush a folder nor
has it these locks: both are left out there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from federation.errors import FULL_DISK, DiskFull, InputError


@contextmanager
def replacing(path: Path, *, durable: bool = True, mode: int = 0o666, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Open a draft that takes the name `path` when the block ends; if the block fails, what was there before stays.

    What may be lost with the machine need not be `durable`: then the disk is not waited for. Processes that may write
    the same file at once give each a `draft` of its own.
    """
    draft = draft or path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if durable:
                flush(file)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        flush_folder(path.parent)


def publish(draft: Path, final: Path) -> None:
    """Give a written file its name, so that both survive a loss of power."""
    rename_flushed(draft, final)
    flush_folder(final.parent)


def rename_flushed(draft: Path, final: Path) -> None:
    """Flush a file and give it its name: the first half of `publish`. One `flush_folder` then does for many files."""
    with draft.open("rb+") as file:
        flush(file)
    draft.replace(final)


def flush(file: BinaryIO) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def disk_errors(*, no_room: str, otherwise: str) -> Iterator[None]:
    """Raise DiskFull(no_room) where the disk is full, and for any other OSError an InputError that adds its reason."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise DiskFull(no_room) from None
        raise InputError(f"{otherwise}: {error.strerror or error}") from None


@contextmanager
def sole_user(lock: Path, in_use: str) -> Iterator[None]:
    """Hold a lock that one process has at a time; InputError(in_use) if another has it. A kill gives it back.

    Nothing is checked where there are no such locks (Windows, some network file systems).
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    while True:
        with _open_lock(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(in_use) from None
            except OSError:
                pass  # a file system without locks
            if not _is_still(lock, file):
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _open_lock(lock: Path) -> BinaryIO:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        return lock.open("ab")
    except FileExistsError:
        raise InputError(f"cannot use {lock.parent}: it is a file, expected a directory") from None
    except OSError as error:
        raise InputError(f"cannot use {lock.parent}: {error.strerror}") from None


def _is_still(path: Path, file: BinaryIO) -> bool:
    """Whether an open file has its name yet; the process that held a lock before may have just removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
