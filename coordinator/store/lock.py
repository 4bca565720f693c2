"""One directory, one coordinator: two would write over one another."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from federation.errors import InputError

FILE_NAME = "coordinator.lock"


@contextmanager
def sole_user(directory: Path) -> Iterator[None]:
    """Keep everybody else out; the lock ends with the process, however that ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / FILE_NAME).open("a")
    except FileExistsError:
        raise InputError(f"cannot use {directory}: it is a file, expected a directory") from None
    except OSError as error:
        raise InputError(f"cannot use {directory}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{directory} is in use: another coordinator runs on it") from None
        yield
