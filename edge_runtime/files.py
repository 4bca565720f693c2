"""Write files that survive a crash, and keep other processes out of a place.

A file is written beside its name, flushed to the disk and renamed; then its folder is flushed, because the rename is a
change of the folder. After a crash there is the old file or the new one, whole. What systems do differently: system.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge_runtime.system import HERE
from federation.errors import FULL_DISK, DiskFull, InputError
from federation.space import Vector


@contextmanager
def replacing(path: Path, *, durable: bool = True, mode: int = 0o666, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Open a draft that takes the name `path` when the block ends; if the block fails, what was there before stays.

    What may be lost with the machine need not be `durable`: then the disk is not waited for. Processes that may write
    the same file at once give each a `draft` of its own.
    """
    draft = draft or path.with_name(path.name + ".new")
    make_folder(path.parent)
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


def link_file(source: Path, target: Path) -> None:
    """Give a file that never changes a second name; where that is not possible, copy it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that their names survive a loss of power."""
    missing = [folder, *folder.parents]
    for path in reversed(missing[: next((i for i, path in enumerate(missing) if path.is_dir()), len(missing))]):
        path.mkdir(exist_ok=True)
        flush_folder(path.parent)


def publish_folder(draft: Path, final: Path) -> None:
    """Give a folder with everything in it its name, so that all of it survives a loss of power."""
    for path, _, names in os.walk(draft):
        for name in names:
            with open(os.path.join(path, name), "rb+") as file:
                flush(file)
        flush_folder(Path(path))
    draft.rename(final)
    flush_folder(final.parent)


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
    HERE.flush_folder(folder)


def remove(path: Path) -> None:
    """Remove a file that need not be there. Where one in use cannot be removed (Windows), it stays for a later call."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if HERE.removes_open_files:
            raise


def map_part(file: BinaryIO, offset: int, size: int) -> Vector:
    """Map float32 numbers of a file that may be replaced or removed later: nothing is read before it is used.

    Where a mapped file could not be replaced (Windows), the numbers are read.
    """
    if HERE.removes_open_files and size:
        return np.memmap(file, np.dtype("<f4"), "r", offset=offset, shape=(size,))
    file.seek(offset)
    return np.frombuffer(file.read(4 * size), "<f4")


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
    """Hold a lock that one process has at a time; if another has it, InputError(in_use) with that one's id.

    A kill gives it back. Nothing is checked where there are no locks (some network file systems).
    """
    while True:
        with _open_lock(lock) as file:
            try:
                is_free = HERE.lock(file.fileno())
            except OSError:
                is_free = True  # a file system without locks
            if not is_free:
                holder = lock.read_text(errors="replace")[:20].strip() if lock.exists() else ""
                raise InputError(f"{in_use}, process {holder}" if holder.isdigit() else in_use)
            if not _is_still(lock, file):
                continue
            file.truncate(0)  # what a process that was killed left
            file.write(f"{os.getpid()}\n".encode())
            file.flush()
            try:
                yield
            finally:
                remove(lock)
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
