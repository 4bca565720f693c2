"""What a device keeps: named vectors and a few words, in one safetensors file, replaced at once or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from federation.errors import FULL_DISK, DiskFull, InputError
from federation.space import Vector

MOST_HEADER_BYTES = 16 << 20  # a round of history takes about two kilobytes


def save_state(path: Path, vectors: Mapping[str, Vector], about: Mapping[str, str], *, durable: bool = True) -> None:
    """Write beside, flush to the disk, then rename: after a crash there is the old file or the new one.

    The vectors go to the file as they lie in memory; no copy is made. What may be lost with the machine need not be
    `durable`: nobody waits for the disk then.
    """
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, vector in vectors.items():
        entries[name] = {"dtype": "F32", "shape": [vector.size], "data_offsets": [end, end := end + 4 * vector.size]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:  # it could not be read again
        raise InputError(f"cannot keep {path}: its description has more than {MOST_HEADER_BYTES >> 20} MiB")
    draft = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for vector in vectors.values():
                file.write(np.ascontiguousarray(vector, "<f4").data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if error.errno in FULL_DISK:
            raise DiskFull(f"no room to keep {path}; what was there before is unchanged") from None
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def load_state(path: Path) -> tuple[dict[str, Vector], dict[str, str]]:
    """The vectors, mapped and not yet read, and the words."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
                raise ValueError("no header")
            entries = json.loads(file.read(length))
            about = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
            vectors: dict[str, Vector] = {}
            for name, entry in entries.items():
                start, stop = map(int, entry["data_offsets"])
                if entry["dtype"] != "F32" or not 0 <= start <= stop <= size - 8 - length or (stop - start) % 4:
                    raise ValueError(f"{name} does not lie in the file")
                shape = ((stop - start) // 4,)
                # Mapped by the open file, not by its name, which may mean a newer file by now.
                vectors[name] = (
                    np.memmap(file, np.dtype("<f4"), "r", offset=8 + length + start, shape=shape)
                    if stop > start
                    else np.zeros(0, np.float32)
                )
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is no saved state: {error}; remove it to begin anew") from None
    return vectors, about


@contextlib.contextmanager
def sole_user(path: Path) -> Iterator[None]:
    """Meanwhile no other process keeps this state: two would write into each other's drafts.

    A kill gives the lock back. Not checked where the system has no such locks (Windows).
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    name = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = name.open("wb")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{path} is in use by another process; wait for its end or keep yours elsewhere") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """The rename itself has to reach the disk; Windows knows no such thing."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
